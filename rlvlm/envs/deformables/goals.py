"""What is to be done in the tasks of this room; imports nothing, so that tasks can be listed without a simulator."""

GOALS = {
    "straighten_rope": ("straighten the blue rope", "the blue rope is straight"),
    "pass_water": (
        "bring the water container as close to the red circle as possible without spilling water droplets",
        "the water container is at the red circle and no water droplets are spilled",
    ),
    "fold_cloth": (
        "fold the cloth along its diagonal, from the top left corner to the bottom right corner",
        "the cloth is folded along its diagonal, its top left corner on its bottom right corner",
    ),
}
"""By task: the goal phrase of the prompt, and the sentence that is true once it is reached."""
