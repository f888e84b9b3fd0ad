"""Any env of the MiniGrid package as an env in turns, with the whole grid as its image."""
