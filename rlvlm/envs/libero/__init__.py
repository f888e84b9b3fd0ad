"""LIBERO's 130 tasks as envs in chunks."""
