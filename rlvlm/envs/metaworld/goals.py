"""What each MetaWorld task asks for, in words. Imports nothing: the registry reads it, which loads no simulator."""

PAPER_GOALS = {
    "drawer_open": ("open the drawer", "the drawer is open"),
    "soccer": ("get the soccer ball into the goal", "the soccer ball is in the goal"),
    "sweep_into": ("minimize the distance between the green cube and the hole", "the green cube is in the hole"),
}
"""Goal phrase, and the sentence that is true once it is reached, of the reference method's tasks, by our names (Wang
et al. 2024, arXiv:2402.03681)."""
