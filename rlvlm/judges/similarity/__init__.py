"""Judges by similarity of image and goal, without a question. Built by `judges.build`."""
