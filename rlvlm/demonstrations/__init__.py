"""Folders of episodes to learn from: collected, filtered, split, exchanged; for `rlvlm collect`, `data` and SFT."""
