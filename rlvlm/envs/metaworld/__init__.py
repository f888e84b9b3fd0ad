"""MetaWorld's tasks as worlds: the paper's scenes, and every stock task by its name. Made by the registry."""
