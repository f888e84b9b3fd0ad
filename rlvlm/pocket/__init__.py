"""The small models that ship: their scenes, training, evaluation and weights."""
