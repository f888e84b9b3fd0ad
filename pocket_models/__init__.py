"""How the small models that ship with rlvlm were made: one trainer and one evaluation over four datasets."""
