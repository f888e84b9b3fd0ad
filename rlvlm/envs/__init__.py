"""Environments: tasks by name, their scenes, and the drawing of images from stored snapshots."""
