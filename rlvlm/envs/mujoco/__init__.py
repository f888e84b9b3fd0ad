"""What envs on MuJoCo share: physics with exact state, tasks from a model file, and a renderer that draws fast."""
