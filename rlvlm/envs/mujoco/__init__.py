"""Common parts of envs on MuJoCo: physics with exact state, tasks from a model file, and a renderer that draws fast."""
