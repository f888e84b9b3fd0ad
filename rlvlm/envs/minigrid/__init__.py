"""Any env of the package MiniGrid as an env in turns, with the whole grid as its image."""
