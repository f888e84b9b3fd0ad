"""Any env of the package MiniGrid as a world in turns, with the whole grid as its picture."""
