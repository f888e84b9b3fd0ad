"""Worlds to act in: tasks by name, their scenes, and pictures drawn from stored snapshots. Used by floors 3-6."""
