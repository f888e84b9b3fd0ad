"""Sentences of `pick_place_can`'s prompts and replies; imports nothing, so that a recipe can refer to it."""

GOAL = "pick up the red can and put it into the bin that waits for it"
MOVES: tuple[str, ...] = ("forward", "backward", "left", "right", "up", "down")
GRIPPER: tuple[str, ...] = ("close gripper", "open gripper")
ONE_VIEW = (
    "You steer the hand of a robot arm; the picture is what a camera at its wrist sees, the fingers are at the lower "
    "edge. "
)
TWO_VIEWS = (
    "You steer the hand of a robot arm; the left half of the picture is what a camera at its wrist sees, the fingers "
    "are at the lower edge; the right half shows the bin with the can from the robot. "
)
TASK = f"The task: {GOAL}. "
HAND_AT = "The hand is at "
OPEN, CLOSED = " cm, the gripper is open. ", " cm, the gripper is closed. "
CHOOSE = "Choose one of " + ", ".join(f'"{name}"' for name in (*MOVES, *GRIPPER)) + ". "
ANSWER = (
    'Answer with one JSON object that has the keys "thoughts" (where the can is, and what comes next) and "action".'
)
EMPTY, HOLDING = "My hand is empty. The can is ", "I hold the can. The bin is "
AHEAD, BEHIND = " cm ahead and ", " cm behind and "
RIGHT, LEFT = " cm to the right. Next I go ", " cm to the left. Next I go "
SENTENCES = (
    *(ONE_VIEW, TWO_VIEWS, TASK, HAND_AT, OPEN, CLOSED, CHOOSE, ANSWER),
    *(EMPTY, HOLDING, AHEAD, BEHIND, RIGHT, LEFT, *MOVES, *GRIPPER),
)
"""Sentences of prompts and of the expert's replies; a small model with one token for each reads and writes several
times as fast."""
