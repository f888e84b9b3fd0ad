"""The contract of an env in turns: it shows an image and words, and is answered in text.

`rlvlm.envs.contracts` holds every member to it. What is kept of an episode are snapshots; images are drawn from them
when somebody looks.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.core.turns import Reply, Turn
from rlvlm.envs.replies import read_legacy, read_reply, write_reply

Outcome = tuple[float, bool, bool]
"""Reward, terminated, truncated."""


_MAX_STARTS = 1_000
_HELD_OUT_BYTES = 51
"""Of 256 values of a byte: a fifth."""


def _is_held_out(start_key: bytes) -> bool:
    return hashlib.sha256(start_key).digest()[0] < _HELD_OUT_BYTES


class TurnEnv(gym.Env[Turn, str]):
    """An env that is played by writing JSON: `{"thoughts": "...", "action": "..."}`.

    `reset` and `step` put into `info`: `success` (bool), `progress` (float in [0, 1], the simulator's truth), `legal`
    (indices of the actions that are legal now) and, after a step, `is_invalid` (whether no legal action could be read)
    and `action` (the index that was carried out, None for none). A reply that cannot be read changes nothing but the
    number of turns and costs the task's penalty; only the reference's rules answer it with a random action.

    A member implements what is abstract here and may rely on `self.np_random` alone for chance.
    """

    goal: str
    """Fills the slot of the prompt of a judge, e.g. `bring the current number to the target`."""
    snapshot_size: int
    """S."""
    action_names: tuple[str, ...]
    """Every word that an action may be, in a fixed order."""
    picture_px: tuple[int, int]
    """Height and width as the reference draws it."""
    rules: Literal["mended", "legacy"] = "mended"
    """legacy: read and answer replies as the reference does."""
    split: Literal["all", "training", "held_out"] = "all"
    """Which starts episodes may have; see `EnvConfig`."""
    milestones: Mapping[str, float] = MappingProxyType({})
    """What lies on the way to success, by its name: reached as soon as `progress` is at least so much."""
    has_expert: bool = True
    """Whether `expert_action` and `expert_thought` know what to do."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Turn, dict[str, Any]]:
        """First turn and info of a new episode; `options` is not used.

        Raises:
            UsageError: no start of the wanted side of the split turned up: the env has too few different ones.
        """
        super().reset(seed=seed, options=options)
        for _ in range(_MAX_STARTS):
            self.begin()
            if self.may_start(self.snapshot()):
                return self.turn(), self.info()
        raise UsageError(f"no start of this env is on the side {self.split!r} of the split", "--env.split all")

    def step(self, text: str) -> tuple[Turn, float, bool, bool, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride] - the action of an env in turns is a text
        """Next turn, true reward, terminated, truncated, info.

        Args:
            text: what the player wrote; anything is allowed.
        """
        reply = self.read(text)
        action = reply.action
        if action is None and self.rules == "legacy":
            action = int(self.np_random.choice(self.legal()))
        reward, terminated, truncated = self.act(action)
        return (
            self.turn(),
            reward,
            terminated,
            truncated,
            self.info() | {"is_invalid": reply.action is None, "action": action},
        )

    def read(self, text: str) -> Reply:
        """What the env understands; nothing is raised and nothing changes."""
        return (read_legacy if self.rules == "legacy" else read_reply)(text, self.action_names, self.legal())

    def action_text(self, action: int, thought: str = "") -> str:
        """A well-formed reply; `thought` as `expert_thought` gives it, or plain words."""
        return write_reply(self.action_names[action], thought)

    def turn(self) -> Turn:
        """What the player is given now."""
        return Turn(snapshot=self.snapshot(), prompt=self.prompt())

    def info(self) -> dict[str, Any]:
        """What `reset` and `step` tell besides."""
        return {"success": self.is_success(), "progress": self.progress(), "legal": self.legal()}

    def legal(self) -> tuple[int, ...]:
        """Indices of the actions that are legal now: all, unless a member says otherwise."""
        return tuple(range(len(self.action_names)))

    def may_start(self, first: FloatArray) -> bool:
        """Whether an episode may start as the one whose first snapshot [S] is `first` did: the split has it."""
        return self.split == "all" or (self.split == "held_out") == _is_held_out(self.start_key(first))

    def start_key(self, first: FloatArray) -> bytes:
        """What makes a start a different one from others, by its snapshot [S]."""
        return first.tobytes()

    def generator_text(self) -> str:
        """The state of the generator, for `get_state`."""
        return json.dumps(self.np_random.bit_generator.state)

    def set_generator(self, text: str) -> None:
        """Restores what `generator_text` gave."""
        self.np_random.bit_generator.state = json.loads(text)

    @abstractmethod
    def begin(self) -> None:
        """Starts an episode, drawing from `self.np_random`."""

    @abstractmethod
    def act(self, action: int | None) -> Outcome:
        """Carries out an action, or lets a turn pass for its price where `action` is None."""

    @abstractmethod
    def prompt(self) -> str:
        """The user's words of this turn."""

    @abstractmethod
    def is_success(self) -> bool:
        """The env's own success test."""

    @abstractmethod
    def progress(self) -> float:
        """How near to success, in [0, 1]."""

    def turns_left(self) -> int | None:
        """Turns that the expert would still take to success, 0 once it is reached; None where nobody knows."""
        return None

    @abstractmethod
    def snapshot(self) -> FloatArray:
        """The present state as `[S]`: everything that can change the image."""

    @abstractmethod
    def draw(self, snapshots: FloatArray) -> Frames:
        """Images `[N, H, W, 3]` of `snapshots` `[N, S]`, H and W as `picture_px` says. No episode is disturbed."""

    @abstractmethod
    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """`[N, P]`: snapshots with equal keys look the same."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """The full state as arrays, numbers and strings: after `set_state` the future is bit-identical."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, on this or another instance of the same config."""

    @abstractmethod
    def expert_action(self) -> int:
        """What an exact script does now."""

    @abstractmethod
    def expert_thought(self) -> str:
        """What it reads off the image and why it acts so: members of the reply's JSON object, as text."""
