"""The settings of a run: what may be said, what a task's recipe says, and their files."""
