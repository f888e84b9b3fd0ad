"""Envs to act in: tasks by name, their scenes, and images drawn from stored snapshots. Used by floors 3-6."""
