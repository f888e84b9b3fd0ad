"""Who plays for a collection. A player is asked for each turn and may look at the env, as a scripted expert does."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlvlm.core.turns import Turn
from rlvlm.envs.turn_env import TurnEnv

_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class PlayerReply:
    """A reply, and whether it was spoilt on purpose."""

    text: str
    is_noise: bool = False


class Player(Protocol):
    """Anything that answers turns: a script, a policy, a VLM behind an API."""

    name: str
    """Kept with each episode."""

    def begin(self, seed: int) -> None:
        """An episode of that seed begins."""
        ...

    def reply(self, env: TurnEnv, turn: Turn) -> PlayerReply:
        """The answer to `turn`, which `env` waits for."""
        ...


class ScriptedExpert:
    """The env's own expert, with a share of mistakes that gives learning by trial something to do.

    A wrong action is another legal one; a wrong thought is one that belonged to an earlier turn. Equal seeds make equal
    mistakes, as long as the episodes are played in the same order.

    Args:
        p_wrong_action: probability of a wrong action.
        p_wrong_thought: probability of a wrong thought.
    """

    def __init__(self, p_wrong_action: float = 0.0, p_wrong_thought: float = 0.0) -> None:
        for name, value in (("p_wrong_action", p_wrong_action), ("p_wrong_thought", p_wrong_thought)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        self.name = "expert"
        if p_wrong_action or p_wrong_thought:
            self.name = f"expert-wrong-actions-{p_wrong_action:g}-thoughts-{p_wrong_thought:g}"
        self._p_wrong_action, self._p_wrong_thought = p_wrong_action, p_wrong_thought
        self._noise = np.random.default_rng(0)
        self._thoughts: deque[str] = deque(maxlen=_REMEMBERED)

    def begin(self, seed: int) -> None:
        """Mistakes depend on the seed."""
        self._noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))

    def reply(self, env: TurnEnv, turn: Turn) -> PlayerReply:
        """The expert's reply, or a spoilt one."""
        action, thought = env.expert_action(), env.expert_thought()
        others = [other for other in env.legal() if other != action]
        is_wrong_action = bool(others) and self._noise.random() < self._p_wrong_action
        if is_wrong_action:
            action = int(self._noise.choice(others))
        earlier = sorted({known for known in self._thoughts if known != thought})
        is_wrong_thought = bool(earlier) and self._noise.random() < self._p_wrong_thought
        self._thoughts.append(thought)
        if is_wrong_thought:
            thought = earlier[int(self._noise.integers(len(earlier)))]
        return PlayerReply(env.action_text(action, thought), is_wrong_action or is_wrong_thought)


class RandomPlayer:
    """Any legal action, without a thought: what a task gives to those who cannot play it."""

    name = "random"

    def begin(self, seed: int) -> None:
        """Actions depend on the seed."""
        self._noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(2,)))

    def reply(self, env: TurnEnv, turn: Turn) -> PlayerReply:
        """A reply that can be read."""
        return PlayerReply(env.action_text(int(self._noise.choice(env.legal()))))
