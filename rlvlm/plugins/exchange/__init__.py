"""Demonstrations from and for other projects: `rlvlm data import` and `rlvlm data export`."""
