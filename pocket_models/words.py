"""Goals in other words: what a judge that reads is taught with, and other words that it is only tried with.

Each task has some goals `taught`, its own among them, and some `tried`, which no training ever shows. `undone_by` names
the task that is done where this one is undone, such as closing what the other one opens. Used by `smollm`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Share = Literal["taught", "tried"]
FRAMES: Mapping[Share, tuple[str, ...]] = {
    "taught": ("{goal}", "{goal}", "{goal}", "please {goal}", "the robot should {goal}", "task: {goal}", "{goal} now"),
    "tried": ("{goal}", "could you {goal}", "we want you to {goal}"),
}
"""Sentences around a goal; most often there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """How one goal can be said."""

    taught: tuple[str, ...]
    """The task's own goal first."""
    tried: tuple[str, ...]
    undone_by: str = ""
    """The task whose progress is 1 less this one's; empty where there is none."""
    is_scene: bool = True
    """Whether there are images of it; the others are goals of other tasks' scenes alone."""


WORDS = {
    "drawer_open": Words(
        taught=("open the drawer", "pull the drawer out", "slide the drawer open", "get the drawer to be open",
                "make the drawer stick out of the cabinet", "draw out the drawer"),
        tried=("tug the drawer until it is open", "the drawer has to be pulled open", "extend the drawer all the way"),
        undone_by="metaworld/drawer-close-v3",
    ),
    "soccer": Words(
        taught=("get the soccer ball into the goal", "push the soccer ball into the net", "score a goal with the ball",
                "kick the ball into the goal", "move the ball to the inside of the goal"),
        tried=("the football belongs in the net", "shoot the soccer ball at the goal", "bring the ball into the net"),
    ),
    "sweep_into": Words(
        taught=("minimize the distance between the green cube and the hole", "sweep the cube into the hole",
                "move the green block to the hole", "bring the green cube as near to the hole as possible",
                "drop the small green cube into the hole in the table"),
        tried=("get the green block into the opening of the table", "the cube should end up in the hole",
               "sweep the green box towards the hole"),
    ),
    "cartpole": Words(
        taught=("balance the brown pole on the black cart to be upright", "keep the pole upright",
                "hold the pole vertical on the cart", "make the brown stick stand straight up",
                "balance the pole on the cart"),
        tried=("do not let the brown pole tip over", "the stick on the cart should point up",
               "keep the rod of the cart standing"),
    ),
    "straighten_rope": Words(
        taught=("straighten the blue rope", "pull the rope straight", "stretch the rope out into a line",
                "make the blue cord straight", "lay the rope in a straight line"),
        tried=("the blue string should form a straight line", "untangle and stretch the rope", "extend the blue rope"),
    ),
    "pass_water": Words(
        taught=("bring the water container as close to the red circle as possible without spilling water droplets",
                "move the glass of water to the red circle", "carry the container to the red circle and spill nothing",
                "bring the water to the red mark without spilling", "take the container with water to the circle"),
        tried=("transport the water to the red spot", "the glass belongs at the red circle with its water in it",
               "shift the water container over to the red ring and keep it full"),
    ),
    "fold_cloth": Words(
        taught=("fold the cloth along its diagonal, from the top left corner to the bottom right corner",
                "fold the cloth in half along the diagonal", "fold the towel into a triangle",
                "bring the top left corner of the cloth onto the bottom right one", "fold the cloth diagonally"),
        tried=("make a triangle of the cloth", "double the fabric over along its diagonal",
               "lay one corner of the cloth on the opposite corner"),
    ),
    "metaworld/drawer-close-v3": Words(
        taught=("close the drawer", "push the drawer shut", "slide the drawer back in", "shut the drawer"),
        tried=("the drawer has to be closed", "press the drawer into the cabinet"),
        undone_by="drawer_open",
    ),
    "metaworld/door-open-v3": Words(
        taught=("open the door", "pull the door open", "swing the door open", "get the door to be open"),
        tried=("the door should stand open", "move the door away from its frame"),
        undone_by="metaworld/door-close-v3",
    ),
    "metaworld/door-close-v3": Words(
        taught=("close the door", "push the door shut", "shut the door", "swing the door closed"),
        tried=("the door should be shut", "bring the door back into its frame"),
        undone_by="metaworld/door-open-v3",
    ),
    "metaworld/window-open-v3": Words(
        taught=("open the window", "slide the window open", "push the window open"),
        tried=("let air in through the window", "the window has to stand open"),
        undone_by="metaworld/window-close-v3",
    ),
    "metaworld/window-close-v3": Words(
        taught=("close the window", "slide the window shut", "shut the window"),
        tried=("the window has to be shut", "bring the window back to where it is closed"),
        undone_by="metaworld/window-open-v3",
    ),
    "metaworld/button-press-topdown-v3": Words(
        taught=("press the button down", "push the red button down", "press the button from above"),
        tried=("the button has to be pressed", "hit the button on top of the box"),
    ),
    "metaworld/plate-slide-v3": Words(
        taught=("slide the black puck into the net", "push the plate into the goal", "slide the puck into the goal"),
        tried=("the black disc should be in the net", "shove the puck into the cage"),
    ),
    "metaworld/handle-press-v3": Words(
        taught=("press the handle down", "push the handle down", "lower the handle"),
        tried=("the handle has to go down", "bear down on the handle"),
    ),
    "metaworld/coffee-push-v3": Words(
        taught=("push the mug under the coffee machine", "move the cup to the coffee machine",
                "put the mug below the coffee machine"),
        tried=("the coffee cup should stand under the machine", "slide the mug towards the coffee maker"),
    ),
    "metaworld/lever-pull-v3": Words(
        taught=("pull the lever up", "lift the lever", "raise the lever"),
        tried=("the lever has to point up", "move the lever upwards"),
    ),
    # goals without scenes of their own: elsewhere nothing that is done comes nearer to them
    "nothing": Words(
        taught=("leave everything as it is", "do nothing", "stack the plates", "water the flowers",
                "turn on the lamp", "sort the screws into the tray", "put the book on the shelf", "pick up the soup",
                "unlock the box with the key", "pour the milk into the bowl", "hang the towel on the hook"),
        tried=("feed the cat", "peel the apple", "fill the kettle", "light the candle"),
        is_scene=False,
    ),
}  # fmt: skip
"""By the task's name in the registry."""
PUSH = Words(
    taught=("push the {colour} block onto the pad", "move the {colour} block onto the white square",
            "bring the {colour} square to the pad", "put the {colour} block on the pad",
            "the {colour} block goes onto the white pad"),
    tried=("slide the {colour} box onto the white area", "the {colour} cube belongs on the pad",
           "get the {colour} block to the white target"),
)  # fmt: skip
"""The goals of push_block, with a slot for the colour."""
WORDS |= {
    f"push_block/{colour}": Words(
        taught=tuple(goal.format(colour=colour) for goal in PUSH.taught),
        tried=tuple(goal.format(colour=colour) for goal in PUSH.tried),
    )
    for colour in ("red", "green", "blue", "yellow")
}
