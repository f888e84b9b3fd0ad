"""A run: its config, Ray session, loop and folder."""
