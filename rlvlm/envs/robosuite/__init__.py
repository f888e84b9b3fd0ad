"""What the envs on robosuite share: loading it quietly, a lean arm controller, and light models to draw."""
