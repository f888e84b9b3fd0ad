"""Frozen VLMs that judge images: prompts, parsing, cache, one file per backend. Used by preferences and serving."""
