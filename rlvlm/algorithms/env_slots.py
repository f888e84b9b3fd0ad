"""An env in turns with the episode under way in it: demonstrations, rollouts and evaluations are played here."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.episodes import Observations, Reply, SampledReply, TokenEpisode, Turn
from rlvlm.core.finite import check_finite
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.registry import make_env

_WHOLE = ("snapshot", "prompt", "reply", "env_reward", "success", "progress")
"""Columns of a turn that are kept in a checkpoint: what a later piece of the episode still shows of it."""


class EnvSlot:
    """One of the envs that are played side by side, and its running episode.

    An episode may be learned from in pieces: a piece is what was played since `begin` or `begin_piece`.

    Args:
        env: nobody else plays it.
        task: its name, for the episodes.
        place: of the slot among those side by side.
    """

    action_tokens: Callable[[Any, Any], NDArray[np.bool_]] | None = None
    """Which of a reply's ids make its action, by the span of characters; None: all do. Set where updates ask for it."""

    def __init__(self, env: TurnEnv, task: str, place: int = 0) -> None:
        self.env, self.place = env, place
        self.group = 0
        """Of the running episode."""
        self.is_over = self.is_terminated = False
        """Whether the episode has ended, for whatever reason, and whether it has for good; a time limit only cuts."""
        self._task, self._seed = task, 0
        self.turn: Turn
        """That waits for a reply; after an episode's end its last state."""
        self.image = b""
        """Key of the turn's image: equal keys look the same."""
        self._history: list[dict[str, Any]] = []
        self._first = 0

    def begin(self, seed: int, group: int = 0) -> None:
        """A new episode from a reset with `seed`, compared with others of its `group`."""
        self._seed, self._history, self.is_over, self.is_terminated = seed, [], False, False
        self.begin_piece(group)
        self._show(self.env.reset(seed=seed)[0])
        self._check({"numbers of the observation": self.turn.snapshot})

    def begin_piece(self, group: int = 0) -> None:
        """What was played so far is learned from already."""
        self._first, self.group = len(self._history), group

    @property
    def piece_len(self) -> int:
        """Turns of the piece."""
        return len(self._history) - self._first

    def play(self, reply: SampledReply | str, at: int = 0) -> bool:
        """Plays a turn, in round `at` of a rollout; says whether the episode is over."""
        # as it was when the reply was made: the env's step changes all of it
        before, image, goal, distance = self.turn, self.image, self.env.goal, distance_of(self.env)
        text = reply if isinstance(reply, str) else reply.text
        read = self.env.read(text)
        turn, env_reward, terminated, truncated, info = self.env.step(text)
        self._show(turn)
        self._check({"numbers of the observation": turn.snapshot, "rewards": float(env_reward)})
        self._history.append(
            {
                "snapshot": before.snapshot,
                "image": image,
                "prompt": before.prompt,
                "goal": goal,
                "reply": read,
                "sampled": None if isinstance(reply, str) else reply,
                "at": at,
                "env_reward": float(env_reward),
                "success": bool(info["success"]),
                "progress": float(info["progress"]),
                "gain": distance - distance_of(self.env),  # > 0 where the turn came nearer to success
            }
        )
        self.is_over, self.is_terminated = bool(terminated or truncated), bool(terminated)
        return self.is_over

    def episode(self, only_newest: bool = False) -> TokenEpisode:
        """The episode as far as it has come, of which the piece is learned from, or its newest turn alone.

        Turns that were not sampled, such as an expert's, have no tokens.
        """
        rows = self._history[-1:] if only_newest else self._history[self._first :]
        # a judge looks at the episode from its start, even where only a later piece of it is learned from
        whole = {name: [row[name] for row in self._history] for name in _WHOLE}
        snapshots = np.stack([*whole["snapshot"], self.turn.snapshot])
        sampled: list[SampledReply] = [row["sampled"] for row in rows if row["sampled"] is not None]
        tokens = tuple(
            one.tokens.reply_ids if one.action is None else np.array([one.action], np.int64) for one in sampled
        )
        masks = tuple(np.ones(len(ids), bool) for ids in tokens)
        # which tokens make the action: all of them, unless the reply's parsed text says where it stands
        actions = masks
        if self.action_tokens is not None and sampled and sampled[0].action is None:
            spans = [row["reply"].action_span for row in rows]
            actions = tuple(
                self.action_tokens(one.tokens.reply_ids, span) for one, span in zip(sampled, spans, strict=True)
            )
        read: list[Reply] = [row["reply"] for row in rows]
        return TokenEpisode(
            task=self._task,
            seed=self._seed,
            group=self.group,
            slot=self.place,
            played_at=np.array([row["at"] for row in rows], np.int64),
            obs=Observations(
                images=(*(row["image"] for row in rows), self.image),
                texts=(*(row["prompt"] for row in rows), self.turn.prompt),
                proprio=np.zeros((len(rows) + 1, 0), np.float32),
                snapshots=snapshots[len(self._history) - len(rows) :],
            ),
            snapshots=snapshots,
            steps=np.ones(len(rows), np.int64),
            tokens=tokens,
            log_probs=tuple(one.log_probs for one in sampled),
            masks=masks,
            actions=actions,
            values=np.array([one.value for one in sampled], np.float32),
            versions=np.array([one.version for one in sampled], np.int64),
            replies=tuple(whole["reply"]),
            env_rewards=np.array(whole["env_reward"], np.float32),
            success=np.array(whole["success"], bool),
            progress=np.array(whole["progress"], np.float32),
            gains=np.array([row["gain"] for row in rows], np.float32),
            action_names=tuple("" if one.action is None else self.env.action_names[one.action] for one in read),
            goals=tuple(row["goal"] for row in rows),
            is_over=self.is_over,
            terminated=self.is_terminated,
        )

    def get_state(self) -> dict[str, Any]:
        """Env and running episode: after `set_state` the future is bit-identical. A new piece begins there."""
        # tokens and log-probs are left out: what they are of was learned from before a checkpoint is made
        history = [{name: row[name] for name in _WHOLE} | {"reply": asdict(row["reply"])} for row in self._history]
        return {"world": self.env.get_state(), "seed": self._seed, "turn": asdict(self.turn), "tape": history}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self.env.set_state(state["world"])
        self._seed = state["seed"]
        self._show(Turn(**state["turn"]))
        self._history = [row | {"reply": _reply_of(row["reply"])} for row in state["tape"]]
        self.begin_piece()

    def _show(self, turn: Turn) -> None:
        self.turn = turn
        self.image = self.env.image_key(turn.snapshot[None])[0].tobytes()

    def _check(self, came: dict[str, Any]) -> None:
        """Passes where what came from the env is finite.

        Raises:
            NumericsError: it is not.
        """
        fix = f"mend the env; rlvlm check-task {self._task} looks at it"
        check_finite(f"the env {self._task}, {len(self._history)} turns after seed {self._seed}", fix, came)


def make_slot(task: str, settings: EnvConfig) -> EnvSlot:
    """A new env of `task` for demonstrations or evaluations; every episode in it begins with a seed of its own."""
    return EnvSlot(make_env(task, settings, 0), task)


def distance_of(env: TurnEnv) -> float:
    """How far success is: the expert's turns to it, or what progress lacks where nobody knows these."""
    left = env.turns_left()
    return 1.0 - env.progress() if left is None else float(left)


def _reply_of(columns: dict[str, Any]) -> Reply:
    span = columns["action_span"]
    columns["action_span"] = None if span is None else (span[0], span[1])
    return Reply(**columns)
