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
