"""What this guest adds: the backends `robometer` and `rynnvalue` of `judge.backend`."""

from rlvlm.core.guests import Guest, JudgeBackend

_ROBOMETER = {
    "robometer_progress": "The robot's task is '{goal}'. Say for each frame of the clip how far the robot has come "
    "with it, from 0 at the start to 1 when it is done. Where the robot does something else it is 0.",
    "robometer_preference": "Two clips of a robot with the task '{goal}'. Say which one comes further with it, A or B.",
    "robometer_left": "Clip A: ",
    "robometer_right": "Clip B: ",
    "robometer_request": "Now say which of the two clips is preferred.",
}
_RYNNVALUE = {
    "rynnvalue_task": "The agent works on this task: {goal}.",
    "rynnvalue_relative": "Question: How much time lies between each frame after the first and the frame before it?",
    "rynnvalue_remaining": "Question: How many seconds are left, at the least, until the agent has done the task?",
}

GUEST = Guest(
    about="Robometer and RynnValue as judges",
    docs="reward_models.md",
    judges={
        "robometer": JudgeBackend(
            build="rlvlm.plugins.reward_heads.robometer:robometer_judge",
            wants_weights=True,
            needs_train=True,
            sees_goal_images=False,
            sentences=_ROBOMETER,
        ),
        "rynnvalue": JudgeBackend(
            build="rlvlm.plugins.reward_heads.rynnvalue:rynnvalue_judge",
            wants_weights=True,
            needs_train=True,
            sees_goal_images=False,
            sentences=_RYNNVALUE,
        ),
    },
)
