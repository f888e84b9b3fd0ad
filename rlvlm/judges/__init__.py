"""Frozen VLMs that look and answer: prompts, parsing, cache, one file per backend. Used by preferences and serving."""
