"""Vision-language-action policies: images, an instruction and proprioception in, a chunk of action tokens out."""
