"""Goals of the tasks of this package; imports no simulator, so that tasks can be listed without one."""

from rlvlm.envs.config import StepEnvConfig

DEFORMABLE_GOALS = {
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
"""By task: the goal phrase of the prompt, and a sentence that is true once the goal is reached."""

DEFORMABLE_ENVS = {
    "straighten_rope": StepEnvConfig(episode_steps=40),
    "pass_water": StepEnvConfig(episode_steps=75),
    "fold_cloth": StepEnvConfig(episode_steps=1, num_envs=10),
}
"""Settings by task: episode lengths as in the paper; a fold is a whole episode."""

RETURN_RANGES = {"straighten_rope": (10.0, 20.0), "pass_water": (-290.0, -20.0), "fold_cloth": (-0.65, -0.02)}
"""By task: true returns of random play and of a solved task; a run's return is reported as a share of that range."""

SOFTGYM_GOALS = {
    "RopeFlatten": ("straighten the rope", "the rope is straight"),
    "ClothFlatten": ("spread the cloth out flat on the floor", "the cloth is spread out flat on the floor"),
    "ClothFold": ("fold the cloth in half", "the cloth is folded in half"),
    "ClothDrop": ("lay the cloth down flat on the floor", "the cloth lies flat on the floor"),
    "PassWater": ("bring the container to the goal without spilling water", "the full container is at the goal"),
    "PourWater": ("pour the water into the other container", "the water is in the other container"),
}
"""Goal phrases and sentences of SoftGym's tasks, by its names."""
