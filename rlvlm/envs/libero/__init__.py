"""LIBERO's 130 tasks as worlds in chunks."""
