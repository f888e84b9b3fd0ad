"""Episodes to learn from, in a folder: collected, filtered, split, exchanged; for `rlvlm collect`, `data` and SFT."""
