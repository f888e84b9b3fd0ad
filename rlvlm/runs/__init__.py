"""A run: its config, session, loop and folder."""
