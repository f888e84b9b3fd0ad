"""Common parts of envs on robosuite: loading it quietly, a lean arm controller, and light models to draw."""
