"""`minigrid/ID`, and short names such as `doorkey_6x6`: any env of MiniGrid, played by its image.

Source: Chevalier-Boisvert et al. 2023 (MiniGrid and Miniworld), arXiv:2306.13831; the image of the whole grid and the
names of the actions are those of the VLM_PPO repository. Departures from the latter: colours are true (there, a
conversion turned green into pink and red into cyan), and a reply that cannot be read lets a turn pass and costs 0.1.
"""

from functools import cache
from itertools import takewhile
from typing import Any

import gymnasium as gym
import minigrid  # noqa: F401 - registers its envs  # pyright: ignore[reportUnusedImport]
import numpy as np
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX
from minigrid.minigrid_env import MiniGridEnv
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import Outcome, TurnEnv
from rlvlm.envs.minigrid.config import MiniGridConfig
from rlvlm.envs.minigrid.ids import OTHERS, WITHOUT_EXPERT, family
from rlvlm.envs.minigrid.missions import read_mission
from rlvlm.envs.minigrid.planner import LEFT, RIGHT, STEPS, Plan, plan_shortest, plan_subgoals
from rlvlm.envs.minigrid.renderer import TILE_PX, paint

_INVALID = -0.1
_PASSED = -1  # replaces an unreadable reply in the list of actions
_DIRECTIONS = ("right", "down", "left", "up")


class MiniGridTurnEnv(TurnEnv):
    """An env of MiniGrid with its own rewards. A snapshot is the encoded grid [W * H * 3] and the agent [3].

    Actions are MiniGrid's seven; those without use in a family of envs are not legal there. Progress is the share of
    the shortest way that is done, where the planner knows the mission, and otherwise 1 at success.

    Args:
        config: rules, text, and turns of an episode, where fewer than MiniGrid allows.
        seed: of the grids, until `reset` is given another seed.
        name: id of the env.
    """

    action_names = ("turn left", "turn right", "move forward", "pick up", "drop", "toggle", "done")
    grain = 1  # snapshots hold whole numbers

    def __init__(self, config: MiniGridConfig, seed: int, name: str) -> None:
        env = gym.make(name, disable_env_checker=True).unwrapped
        assert isinstance(env, MiniGridEnv)
        self.inner, self._name = env, name
        self.rules, self.split = config.rules, config.split
        self._max_turns = config.episode_steps
        self._shows_text, self._prompt_last_action = config.shows_text, config.prompt_last_action
        entry = family(name)
        self.goal, _, useful = entry
        self._has_mission = entry is OTHERS
        self._legal = tuple(self.action_names.index(word) for word in useful or self.action_names)
        self._wants_door = name.startswith("MiniGrid-Unlock-")
        self.image_px = (env.height * TILE_PX, env.width * TILE_PX)
        self.snapshot_size = env.width * env.height * 3 + 3
        self.has_expert = name not in WITHOUT_EXPERT
        self._is_still = "Dynamic" not in name
        # whether breadth-first search can plan the mission; otherwise subgoals are planned
        self._is_exact = not self._has_mission and self._is_still
        self.reset(seed=seed)

    def begin(self) -> None:
        """Starts an episode with a new grid."""
        self._start(int(self.np_random.integers(2**31)))

    def act(self, action: int | None) -> Outcome:
        """Makes one step of the env; None makes none."""
        before = self.snapshot()
        # records every turn, unreadable replies too: set_state replays them
        self._done.append(_PASSED if action is None else action)
        self._last = "could not be read"
        if action is None:  # not an action of the env: in some envs even "done" moves the agent
            self.inner.step_count += 1
            return _INVALID, False, self.inner.step_count >= self.inner.max_steps
        _, reward, terminated, truncated, _ = self.inner.step(action)
        is_in_vain = np.array_equal(before, self.snapshot())  # a greedy policy cannot see this and would try again
        self._last = f"was {self.action_names[action]}" + (" and changed nothing" if is_in_vain else "")
        self._is_success = bool(terminated) and float(reward) > 0  # lava and wrong objects end an episode, too
        plan = self._plan
        if terminated:
            self._plan = None
        elif self._is_still and plan is not None and plan.actions[0] == action and len(plan.actions) > 1:
            # Follow the plan: replanning is expensive in larger mazes and would not be shorter.
            self._plan = Plan(plan.actions[1:], plan.targets[1:])
        elif not (self._is_still and plan is None and action in self._legal[:3]):
            self._plan = self._new_plan()  # walking never opens a way, but any other action may
        return float(reward), bool(terminated), bool(truncated) and not terminated

    def legal(self) -> tuple[int, ...]:
        """Returns the actions that are of use in this family of envs."""
        return self._legal

    def start_key(self, first: FloatArray) -> bytes:
        """Returns the grid, wherever the agent starts in it; if there is only one grid, the agent's start."""
        seen = first if _has_one_grid(self._name) else first[:-3]  # the last three are the agent
        return np.rint(seen).astype(np.int64).tobytes()

    def prompt(self) -> str:
        """Returns the task; the mission, direction and carried object, if text is wanted or the mission changes; and
        the last action, if wanted.
        """
        names = ", ".join(f'"{self.action_names[i]}"' for i in self._legal)
        stated = ""
        if self._shows_text or self._has_mission:
            thing = self.inner.carrying
            hand = f"the {thing.color} {thing.type}" if thing is not None else "nothing"
            facing = _DIRECTIONS[int(self.inner.agent_dir)]
            stated = f" Mission: {self.inner.mission}. It faces {facing} and carries {hand}."
        if self._prompt_last_action and self._last:
            stated += f" Your last action {self._last}."
        return (
            "You steer the red triangle in a grid of cells, seen from above; its tip points where it faces. "
            f"The task: {self.goal}.{stated} Choose one of {names}. Answer with one JSON object that has the keys "
            '"thoughts" (what you see, and what comes next) and "action".'
        )

    def is_success(self) -> bool:
        """Returns whether the env ended the episode with a reward."""
        return self._is_success

    def progress(self) -> float:
        """Returns 1 at success; otherwise the share of the first shortest way that is done."""
        if self._is_success or self._plan is None or not self._first_length:
            return float(self._is_success)
        return max(0.0, 1.0 - len(self._plan.actions) / self._first_length)

    def turns_left(self) -> int | None:
        """Returns the length of a shortest way; None if there is none, or the planner does not know the mission."""
        return 0 if self._is_success else None if self._plan is None else len(self._plan.actions)

    def snapshot(self) -> FloatArray:
        """Returns [S]: the encoded grid, then column, row and direction of the agent."""
        return np.concatenate([self._grid().ravel(), self._agent()]).astype(np.float32)

    def draw(self, snapshots: FloatArray) -> Frames:
        """Returns images [N, H * 32, W * 32, 3] of the whole grid, lighter where the agent sees."""
        keys = self.image_key(snapshots)
        grids = keys[:, :-3].reshape(len(keys), self.inner.width, self.inner.height, 3)
        return paint(grids, keys[:, -3:], self.inner.agent_view_size, self.inner.see_through_walls)

    def hand_path(self, snapshots: FloatArray, camera: str = "") -> FloatArray:
        """Returns [N, 2]: the middle of the agent's cell."""
        return (snapshots[:, -3:-1] + 0.5) / np.array([self.inner.width, self.inner.height], np.float32)

    def get_state(self) -> dict[str, Any]:
        """Returns the seed of the grid and all actions since: replaying them restores any env exactly."""
        actions = np.array(self._done, np.int64)
        return {"grid_seed": self._grid_seed, "actions": actions, "generator": self.generator_text()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._start(int(state["grid_seed"]))
        for action in state["actions"]:
            self.act(None if action == _PASSED else int(action))
        self.set_generator(str(state["generator"]))

    def expert_action(self) -> int:
        """Returns the first step to success; the way is a shortest one if the mission is a goal square or a locked
        door.

        Raises:
            UsageError: this env's missions are not known here.
        """
        if not self.has_expert:
            raise UsageError("the missions of this env are not known to the scripted expert; see has_expert")
        return self._plan.actions[0] if self._plan is not None else self._legal[0]  # turns in place while it waits

    def expert_thought(self) -> str:
        """Returns the agent's position and direction, its target, and the next cell on the way.

        The action follows from these words alone, which is easier to learn for unseen layouts: the agent turns until it
        faces the next cell, and acts once that cell is the target's.
        """
        column, row, facing = (int(value) for value in self._agent())
        seen = f"I stand at {column},{row} and face {_DIRECTIONS[facing]}."
        if self._plan is None:
            return f'"thoughts": "{seen} I know no way."'
        thing, (target_column, target_row) = self._plan.targets[0]
        # direction once the plan's initial turns are made
        turns = list(takewhile(lambda action: action in (LEFT, RIGHT), self._plan.actions))
        heading = (facing + turns.count(RIGHT) - turns.count(LEFT)) % len(STEPS)
        way = f"I go {_DIRECTIONS[heading]} to {column + STEPS[heading][0]},{row + STEPS[heading][1]}."
        return f'"thoughts": "{seen} Next is the {thing} at {target_column},{target_row}. {way}"'

    def _start(self, grid_seed: int) -> None:
        self._grid_seed = grid_seed
        self._done: list[int] = []
        self._last = ""
        self.inner.reset(seed=grid_seed)
        # MiniGrid's reward counts steps relative to this limit; our shorter limit must replace it
        self.inner.max_steps = min(self.inner.max_steps, self._max_turns)
        if self._has_mission:
            self.goal = self.inner.mission or OTHERS[0]
        self._is_success = False
        self._plan = self._new_plan()
        self._first_length = len(self._plan.actions) if self._plan is not None else 0

    def _new_plan(self) -> Plan | None:
        if not self.has_expert:
            return None
        if not self._is_exact:  # the mission asks for more than a square or a door, or something moves by itself
            mission = read_mission(self.inner)
            return None if mission is None else plan_subgoals(self.inner, mission)
        thing = self.inner.carrying
        carried = None if thing is None else (OBJECT_TO_IDX[thing.type], COLOR_TO_IDX[thing.color])
        column, row, facing = (int(value) for value in self._agent())
        return plan_shortest(self._grid(), (column, row, facing), carried, self._wants_door)

    def _grid(self) -> NDArray[np.int64]:
        return self.inner.grid.encode().astype(np.int64)

    def _agent(self) -> NDArray[np.int64]:
        return np.array([*self.inner.agent_pos, int(self.inner.agent_dir)], np.int64)


_GRIDS = 8  # grids compared per env


@cache
def _has_one_grid(name: str) -> bool:
    """Returns whether the env with that id has the same grid in every episode, judged by a few seeds."""
    env: Any = gym.make(name, disable_env_checker=True).unwrapped
    grids = set()
    for seed in range(_GRIDS):
        env.reset(seed=seed)
        grids.add(env.grid.encode().tobytes())
    return len(grids) == 1
