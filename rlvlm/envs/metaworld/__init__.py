"""MetaWorld's tasks as envs: the paper's scenes, and every stock task by its name. Made by the registry."""
