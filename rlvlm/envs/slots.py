"""Slots whose episodes are learned from: an episode played in one, in turns or chunks, becomes a `TokenEpisode`."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.episodes import Answer, Observations, Reply, SampledChunk, SampledReply, TokenEpisode, Turn
from rlvlm.core.finite import check_finite
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import ChunkEnv, TurnEnv
from rlvlm.envs.playing import Slot
from rlvlm.envs.registry import make_env


class TokenSlot(Slot):
    """A slot that returns its episode in the form for learning, whole or in pieces: a piece was played since `begin` or
    `begin_piece`. Its observations are `Observations` of one moment.

    Args:
        env: env played by this slot alone.
        task: name of the task, for the episodes.
        index: index of the slot among those side by side.
    """

    def __init__(self, env: TurnEnv | ChunkEnv, task: str, index: int = 0) -> None:
        super().__init__(env, index)
        self._task = task

    def open(self, start: int, obs: Any, info: dict[str, Any]) -> None:
        """Starts a new episode, for which the env returned `obs` and `info`."""
        super().open(start, obs, info)
        self.begin_piece()

    def begin_piece(self, group: int = 0, at: int = 0) -> None:
        """Begins a new piece: earlier turns have been learned from.

        Args:
            group: group of the piece, whose other members had the same start.
            at: index of the rollout's round in which its first answer will be played.
        """
        self._first, self.group, self._first_round = len(self.answers), group, at

    @property
    def piece_len(self) -> int:
        """Number of answers in the piece."""
        return len(self.answers) - self._first

    @property
    def obs(self) -> Observations:
        """Observation that waits for an answer."""
        return self.seen[-1]

    def _episode(self, first: int, **of_kind: Any) -> TokenEpisode:
        """Returns the episode so far, whose answers from index `first` on are learned from.

        Answers that were not sampled, such as an expert's, are left out.

        Args:
            first: index, 0 or more.
            of_kind: fields that differ between turns and chunks.
        """
        sampled = [answer for answer in self.answers[first:] if isinstance(answer, SampledReply | SampledChunk)]
        steps, infos = np.array([len(rewards) for rewards in self.env_rewards], np.int64), self.infos[1:]
        ends = steps.cumsum() - 1
        # an env in chunks gives success and progress after each chunk, not after each of its steps
        success, progress = np.zeros(ends[-1] + 1, bool), np.full(ends[-1] + 1, np.nan, np.float32)
        success[ends] = [info["success"] for info in infos]
        progress[ends] = [info["progress"] for info in infos]
        return TokenEpisode(
            task=self._task,
            seed=self.start,
            group=self.group,
            slot=self.index,
            obs=Observations.joined(self.seen[first:]),
            # a judge sees the episode from its start, even if only a later piece of it is learned from
            snapshots=np.concatenate(self.snapshots),
            steps=steps[first:],
            answers=tuple(answer.answer for answer in sampled),
            log_probs=tuple(answer.log_probs for answer in sampled),
            values=np.array([answer.value for answer in sampled], np.float32),
            versions=np.array([answer.version for answer in sampled], np.int64),
            env_rewards=np.concatenate(self.env_rewards),
            success=success,
            progress=progress,
            is_over=self.is_over,
            terminated=self.is_terminated,
            **of_kind,
        )


class EnvSlot(TokenSlot):
    """A slot of an env in turns.

    Args:
        env: env played by this slot alone.
        task: name of the task, for the episodes.
        index: index of the slot among those side by side.
        history: number of images in a prompt of the policy, `PolicyConfig.history`.
    """

    env: TurnEnv
    action_elements: Callable[[Answer, tuple[int, int] | None], NDArray[np.bool_] | None] | None = None
    """`ReplyPolicy.action_elements`; None: all elements. Set if updates need it."""

    def __init__(self, env: TurnEnv, task: str, index: int = 0, history: int = 1) -> None:
        super().__init__(env, task, index)
        self._history = history
        self._latest: list[Observations] = []

    @property
    def turn(self) -> Turn:
        """Turn that waits for a reply; after the episode's end its last state."""
        return self.shown

    def open(self, start: int, obs: Turn, info: dict[str, Any]) -> None:
        self._latest = []  # images of the previous episode are not shown
        super().open(start, obs, info)

    def begin(self, start: int, group: int = 0, at: int = 0) -> None:
        """Starts a new episode from the seed `start`; for `group` and `at` see `begin_piece`."""
        super().begin(start)
        self.begin_piece(group, at)
        self._check({"numbers of the observation": self.turn.snapshot})

    def play(self, answer: Any) -> bool:
        """Plays a turn, by a sampled reply, a script's or a text, and returns whether the episode is over."""
        # as it was when the reply was made: the env's step changes all of it
        goal, distance = self.env.goal, distance_of(self.env)
        text = answer if isinstance(answer, str) else answer.text
        if isinstance(answer, SampledReply) and answer.action is not None:  # the choice of an action head
            text = self.env.action_text(answer.action)
        turn, reward, terminated, truncated, info = self.env.step(text)
        self._check({"numbers of the observation": turn.snapshot, "rewards": float(reward)})
        # the gain is positive if the turn came nearer to success
        own = {"goal": goal, "gain": distance - distance_of(self.env)}
        return self.keep(answer, turn, reward, terminated, truncated, info | own)

    def see(self, obs: Turn) -> Observations:
        """Returns the turn in the policies' form."""
        image = self.env.image_key(obs.snapshot[None])[0].tobytes()
        own = Observations(texts=(obs.prompt,), images=(image,), snapshots=obs.snapshot[None])
        self._latest = [*self._latest, own][-self._history :]
        return Observations.joined(self._latest).with_history(self._history).row(len(self._latest) - 1)

    def episode(self, only_newest: bool = False) -> TokenEpisode:
        """Returns the episode so far, of which the piece is learned from, or only its newest turn."""
        first = len(self.answers) - 1 if only_newest else self._first
        infos = self.infos[first + 1 :]
        read: list[Reply] = [info["reply"] for info in infos]
        # elements of the action: all of them, unless the reply's parsed text gives its position
        sampled = [answer for answer in self.answers[first:] if isinstance(answer, SampledReply)]
        actions = masks = tuple(np.ones(len(answer.log_probs), bool) for answer in sampled)
        if (mark := self.action_elements) is not None and sampled:
            marked = [mark(sample.answer, reply.action_span) for sample, reply in zip(sampled, read, strict=True)]
            actions = tuple(all_ if own is None else own for own, all_ in zip(marked, masks, strict=True))
        return self._episode(
            first,
            played_at=self._first_round + np.arange(first, len(self.answers)) - self._first,
            masks=masks,
            actions=actions,
            replies=tuple(info["reply"] for info in self.infos[1:]),
            gains=np.array([info["gain"] for info in infos], np.float32),
            action_names=tuple("" if reply.action is None else self.env.action_names[reply.action] for reply in read),
            goals=tuple(info["goal"] for info in infos),
        )

    def get_state(self) -> dict[str, Any]:
        """Returns env and running episode: after `set_state` the future is bit-identical. A new piece begins there."""
        # tokens and log-probs are left out: they were learned from before a checkpoint is made
        history = [
            {
                "snapshot": seen.snapshots[0][-self.env.snapshot_size :],  # earlier images are part of earlier entries
                "prompt": seen.texts[0],
                "reply": asdict(info["reply"]),
                "env_reward": reward,
                "success": bool(info["success"]),
                "progress": float(info["progress"]),
            }
            for seen, reward, info in zip(self.seen, self.rewards, self.infos[1:], strict=False)  # one more is seen
        ]
        return {"env": self.env.get_state(), "seed": self.start, "turn": asdict(self.turn), "history": history}

    def set_state(self, state: dict[str, Any]) -> None:
        self.env.set_state(state["env"])
        turns = [Turn(snapshot=row["snapshot"], prompt=row["prompt"]) for row in state["history"]]
        first, *after = [*turns, Turn(**state["turn"])]
        self.open(state["seed"], first, {})
        self.snapshots = [first.snapshot[None]]
        for row, turn in zip(state["history"], after, strict=True):
            info = {"success": row["success"], "progress": row["progress"], "reply": _reply_of(row["reply"])}
            self.keep(row["reply"]["text"], turn, row["env_reward"], False, False, info)
            self.snapshots[-1] = turn.snapshot[None]
        self.begin_piece()

    def _check(self, came: dict[str, Any]) -> None:
        """Raises NumericsError unless all values from the env are finite."""
        fix = f"mend the env; rlvlm check-task {self._task} looks at it"
        check_finite(f"the env {self._task}, {len(self.answers)} turns after seed {self.start}", fix, came)


class ChunkSlot(TokenSlot):
    """A slot of an env in chunks, or of one of many that are stepped as one."""

    def episode(self) -> TokenEpisode:
        """Returns the whole episode."""
        # an episode's end may cut its last chunk short: elements of unexecuted steps teach nothing
        pairs = zip(self.answers, self.env_rewards, strict=True)
        runs = tuple(chunk.steps < len(rewards) for chunk, rewards in pairs)
        progress = np.array([0.0, *(info["progress"] for info in self.infos[1:])])
        was_solved = any(info["success"] for info in self.infos[1:])
        return self._episode(
            0,
            played_at=np.zeros(len(self.answers), np.int64),  # whole episodes: a rollout's rounds are irrelevant
            masks=tuple(run & chunk.mask for run, chunk in zip(runs, self.answers, strict=True)),
            runs=runs,
            chunks=tuple(chunk.actions for chunk in self.answers),
            gains=(progress[1:] - progress[:-1]).astype(np.float32),
            goals=(self.goal,) * len(self.answers),
            success_lost=was_solved and not self.infos[-1]["success_at_end"],
        )


def make_slot(task: str, settings: EnvConfig, history: int = 1) -> EnvSlot:
    """Makes a new env of `task` for demonstrations or evaluations; every episode in it has a seed of its own."""
    return EnvSlot(make_env(task, settings, 0), task, history=history)


def distance_of(env: TurnEnv) -> float:
    """Returns the distance to success: the expert's turns or, if unknown, 1 minus the progress."""
    left = env.turns_left()
    return 1.0 - env.progress() if left is None else float(left)


def _reply_of(columns: dict[str, Any]) -> Reply:
    span = columns["action_span"]
    columns["action_span"] = None if span is None else (span[0], span[1])
    return Reply(**columns)
