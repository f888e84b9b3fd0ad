"""Chat VLMs as policies: an image and text in; a reply, its log-probs and a value out. Plain torch."""
