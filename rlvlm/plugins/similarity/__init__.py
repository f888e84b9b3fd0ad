"""CLIP, SigLIP and BLIP-2 as judges: similarity of image and goal, without a question."""
