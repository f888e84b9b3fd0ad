"""SoftGym's tasks by name, for the registry of tasks; imports no simulator."""

import importlib.util

from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import Task

GOALS = {
    "RopeFlatten": ("straighten the rope", "the rope is straight"),
    "ClothFlatten": ("spread the cloth out flat on the floor", "the cloth is spread out flat on the floor"),
    "ClothFold": ("fold the cloth in half", "the cloth is folded in half"),
    "ClothDrop": ("lay the cloth down flat on the floor", "the cloth lies flat on the floor"),
    "PassWater": ("bring the container to the goal without spilling water", "the full container is at the goal"),
    "PourWater": ("pour the water into the other container", "the water is in the other container"),
}
"""Goal phrases and sentences of SoftGym's tasks, by its names."""


def softgym_tasks() -> list[Task]:
    """Returns the tasks; none where SoftGym is not installed."""
    if importlib.util.find_spec("softgym") is None:
        return []
    return [
        Task(
            name=f"softgym/{name}",
            goal=goal,
            goal_state=goal_state,
            maker="rlvlm.plugins.softgym.env:SoftGymEnv",
            arguments=(name,),
            env=StepEnvConfig(episode_steps=100),
            recipe="rlvlm.plugins.softgym.recipe:stock",
        )
        for name, (goal, goal_state) in GOALS.items()
    ]
