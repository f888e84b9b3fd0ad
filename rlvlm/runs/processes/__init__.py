"""The processes around a run: how much memory they take, and that none outlives it."""
