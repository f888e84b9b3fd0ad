"""Vision-language models that act: an image and words in, a reply, its log-probs and a value out. Plain torch."""
