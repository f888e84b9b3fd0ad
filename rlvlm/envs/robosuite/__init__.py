"""Common parts of envs on robosuite: loading it quietly, a lean arm controller, and lighter models for drawing."""
