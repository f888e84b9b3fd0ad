"""Training of the small models that ship with rlvlm: one trainer and one evaluation over four datasets."""
