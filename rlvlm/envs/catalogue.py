"""The tasks that come with rlvlm. Imports no simulator: names and goals lie in modules of their own."""

import importlib.util
from collections.abc import Iterator

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.deformables.goals import DEFORMABLE_ENVS, DEFORMABLE_GOALS, RETURN_RANGES, SOFTGYM_GOALS
from rlvlm.envs.gym_cards.games import GAMES
from rlvlm.envs.libero.suites import EPISODE_STEPS, SUITES, instruction_of
from rlvlm.envs.metaworld.goals import PAPER_GOALS, STOCK_GOALS
from rlvlm.envs.minigrid.ids import IDS, SHORT_NAMES, family
from rlvlm.envs.task import Task


def shipped_tasks() -> Iterator[Task]:
    """Each of them, once; SoftGym's only where it is installed."""
    for name, (goal, goal_state) in PAPER_GOALS.items():
        yield Task(
            name=name,
            goal=goal,
            goal_state=goal_state,
            maker=f"rlvlm.envs.metaworld.paper:make_{name}",
            used_settings=("start", "robot", "num_envs"),
        )
    for name, (goal, goal_state) in STOCK_GOALS.items():
        yield Task(
            name=f"metaworld/{name}",
            goal=goal,
            goal_state=goal_state,
            arguments=(name,),
            maker="rlvlm.envs.metaworld.stock:make_stock",
            env=EnvConfig(robot="visible"),
            used_settings=("start", "robot", "num_envs"),
        )
    yield Task(
        name="cartpole",
        goal="balance the brown pole on the black cart to be upright",
        goal_state="the brown pole on the black cart is upright",
        maker="rlvlm.envs.cartpole:CartPole",
        env=EnvConfig(episode_steps=100),
        used_settings=("start", "num_envs"),
        return_range=(-2_640.0, 0.0),
    )
    for name, (goal, goal_state) in DEFORMABLE_GOALS.items():
        yield Task(
            name=name,
            goal=goal,
            goal_state=goal_state,
            return_range=RETURN_RANGES[name],
            maker=f"rlvlm.envs.deformables.{name}:make_{name}",
            env=DEFORMABLE_ENVS[name],
            used_settings=("start", "num_envs"),
        )
    if importlib.util.find_spec("softgym") is not None:
        for name, (goal, goal_state) in SOFTGYM_GOALS.items():
            yield Task(
                name=f"softgym/{name}",
                goal=goal,
                goal_state=goal_state,
                arguments=(name,),
                maker="rlvlm.envs.deformables.softgym:SoftGymEnv",
                env=EnvConfig(episode_steps=100),
            )
    for name, (goal, goal_state, maker, turns) in GAMES.items():
        yield Task(
            name=name,
            goal=goal,
            goal_state=goal_state,
            maker=f"rlvlm.envs.gym_cards.{maker}",
            env=EnvConfig(episode_steps=turns),
            most_steps=turns,
            used_settings=("rules", "deals", "split"),
            kind="turns",
        )
    yield Task(
        name="push_block",
        goal="push the block of the named colour onto the pad",
        goal_state="the block of the named colour lies on the pad",
        maker="rlvlm.envs.push_block.env:PushBlock",
        env=EnvConfig(episode_steps=32),
        used_settings=("plays_on",),
        kind="chunks",
    )
    yield Task(
        name="pick_place_can",
        goal="pick up the red can and put it into the bin that waits for it",
        goal_state="the red can lies in its bin",
        maker="rlvlm.envs.robosuite.pick_place_can:PickPlaceCan",
        env=EnvConfig(episode_steps=120),
        kind="turns",
        used_settings=("rules", "shows_text", "move_ticks", "second_view", "view_px", "physics"),
    )
    for suite, files in SUITES.items():
        yield Task(
            name=suite,
            goal="do what the instruction says",
            maker="rlvlm.envs.libero.suite:LiberoSuite",
            arguments=(suite,),
            env=EnvConfig(episode_steps=EPISODE_STEPS[suite]),
            used_settings=("moved", "mesh_cell", "physics", "plays_on"),
            kind="chunks",
        )
        for number, file in enumerate(files):
            yield Task(
                name=f"{suite}/{number}",
                goal=instruction_of(file),
                maker="rlvlm.envs.libero.env:LiberoEnv",
                arguments=(suite, str(number)),
                env=EnvConfig(episode_steps=EPISODE_STEPS[suite]),
                used_settings=("moved", "mesh_cell", "physics", "plays_on"),
                kind="chunks",
            )
    for name, env_id, turns in [(short, *entry) for short, entry in SHORT_NAMES.items()] + [
        (f"minigrid/{env_id}", env_id, 1_000) for env_id in IDS
    ]:
        goal, goal_state, _ = family(env_id)
        yield Task(
            name=name,
            goal=goal,
            goal_state=goal_state,
            arguments=(env_id,),
            maker="rlvlm.envs.minigrid.env:MiniGridTurnEnv",
            env=EnvConfig(episode_steps=turns),
            most_steps=IDS[env_id],
            used_settings=("rules", "split", "shows_text", "shows_last"),
            kind="turns",
        )
