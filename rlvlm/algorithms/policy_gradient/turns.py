"""Plays envs that are talked to: a slot is an env with its running episode, the actor asks an engine for the replies of
many, the runner plays the rollouts of a run. Whoever plays gives `TokenEpisode`s: demonstrations, evaluations and
`rlvlm eval` are made of these too.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import BaseRunner
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller
from rlvlm.algorithms.policy_gradient.source import Play, Rollout, Weights
from rlvlm.core.episodes import Observations, Reply, SampledReply, TokenEpisode, Turn
from rlvlm.core.finite import check_finite
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.registry import make_env
from rlvlm.policies.vlm.engine import Engine

_FIRST_TRAINING_SEED = 2**32
"""Seeds of training episodes lie here and above: evaluations, which count from 1,000,000, never share one."""
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
        tokens = tuple(one.ids for one in sampled)
        masks = tuple(np.ones(len(ids), bool) for ids in tokens)
        # which tokens make the action: all of them, unless the reply's parsed text says where it stands
        actions = masks
        if self.action_tokens is not None and sampled and sampled[0].action is None:
            spans = [row["reply"].action_span for row in rows]
            actions = tuple(self.action_tokens(one.ids, span) for one, span in zip(sampled, spans, strict=True))
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
        return {"env": self.env.get_state(), "seed": self._seed, "turn": asdict(self.turn), "history": history}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self.env.set_state(state["env"])
        self._seed = state["seed"]
        self._show(Turn(**state["turn"]))
        self._history = [row | {"reply": _reply_of(row["reply"])} for row in state["history"]]
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


class Actor:
    """Asks a policy engine for the replies of many slots at once, showing it what it has not seen.

    Args:
        engine: in process or served.
        max_reply_tokens: a reply is cut after so many.
        temperature: of sampling.
    """

    def __init__(self, engine: Engine, max_reply_tokens: int, temperature: float) -> None:
        self._engine = engine
        self._max_reply_tokens = max_reply_tokens
        self._temperature = temperature

    def act(self, slots: Sequence[EnvSlot], seeds: Sequence[int], greedy: bool = False) -> list[SampledReply]:
        """A reply to the present turn of every slot, in their order; an action head's action is one token.

        Args:
            slots: of one task.
            seeds: of each reply alone.
            greedy: the likeliest token each time.
        """
        replies = self._engine.reply(
            self.show(slots), seeds,
            max_new_tokens=self._max_reply_tokens, temperature=self._temperature, greedy=greedy,
        )  # fmt: skip
        # what an action head picks, in the words that the env reads
        return [
            one if one.action is None else replace(one, text=slot.env.action_text(one.action))
            for slot, one in zip(slots, replies, strict=True)
        ]

    def show(self, slots: Sequence[EnvSlot]) -> Observations:
        """What `slots` show now; draws and encodes what the engine does not have of it."""
        obs = Observations(
            texts=tuple(slot.turn.prompt for slot in slots),
            snapshots=np.stack([slot.turn.snapshot for slot in slots]),
            images=tuple(slot.image for slot in slots),
        )
        if missing := self._engine.missing(obs.images):
            frames = slots[0].env.draw(obs.snapshots[missing])
            self._engine.show([obs.images[place] for place in missing], frames)
        return obs


def play_turns(
    actor: Actor, make_slot: Callable[[], EnvSlot], seeds: Sequence[int], num_slots: int, greedy: bool
) -> list[TokenEpisode]:
    """A whole episode from a reset with each seed, in their order.

    Replies are drawn from the episode's seed and the number of the turn: what else is played at the same time makes no
    difference to them.

    Args:
        actor: plays.
        make_slot: makes a slot with an env of its own.
        seeds: >= 0.
        num_slots: episodes under way at once.
        greedy: the likeliest token each time.
    """
    waiting = list(enumerate(seeds))[::-1]
    done: dict[int, TokenEpisode] = {}
    free = [make_slot() for _ in range(min(num_slots, len(seeds)))]
    running: list[tuple[EnvSlot, np.random.Generator]] = []
    while waiting or running:
        while free and waiting:
            slot = free.pop()
            slot.place, seed = waiting.pop()
            slot.begin(seed)
            running.append((slot, np.random.default_rng(seed)))
        # from each episode's own generator: what else is under way makes no difference to a reply
        noise = [int(rng.integers(2**63)) for _, rng in running]
        replies = actor.act([slot for slot, _ in running], noise, greedy)
        for (slot, rng), reply in zip(list(running), replies, strict=True):
            if slot.play(reply, slot.piece_len):
                done[slot.place] = slot.episode()
                running.remove((slot, rng))
                free.append(slot)
    return [done[index] for index in range(len(seeds))]


class TurnRunner(BaseRunner):
    """Envs that are talked to, played side by side by the policy that is trained, in its process.

    Seeds of episodes and replies come from one generator of the runner's own.

    Args:
        config: of the algorithm.
        worker_index: 0; there are no others.
    """

    actor: Actor
    """Set by the algorithm: plays with the learner's policy."""
    show: Callable[[Sequence[TokenEpisode]], None] | None = None
    """Set by the algorithm: is handed each row of turns as soon as it was played."""

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: Any) -> None:
        super().__init__(config=config, worker_index=worker_index)
        self._noise = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(3,)))
        task, settings = config.task, config.env_settings
        self.slots = [
            EnvSlot(make_env(task, settings, config.seed), task, place) for place in range(config.algo.num_envs)
        ]
        self._next_group = 0
        for slot in self.slots:
            slot.begin(self._fresh_seed())

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - who calls it passes these
        self, *, num_turns: int
    ) -> list[TokenEpisode]:
        """The pieces of `num_turns` turns of every env; an episode that ends is followed by the next at once."""
        for slot in self.slots:
            slot.begin_piece(self._new_group())
        episodes: list[TokenEpisode] = []
        for at in range(num_turns):
            for slot in self._play_row(at, self.slots):
                episodes.append(slot.episode())
                slot.begin(self._fresh_seed(), self._new_group())
        self.actor.show(self.slots)  # the critic is asked about the last states
        return episodes + [slot.episode() for slot in self.slots if slot.piece_len]

    def sample_groups(self, *, group_size: int) -> list[TokenEpisode]:
        """One whole episode of every env; `group_size` neighbours start from the same seed."""
        # one seed for a group: its episodes differ by what the policy draws, and by nothing else
        starts = [(self._fresh_seed(), self._new_group()) for _ in range(len(self.slots) // group_size)]
        for place, slot in enumerate(self.slots):
            slot.begin(*starts[place // group_size])
        running, at = list(self.slots), 0
        while running:
            ended = self._play_row(at, running)
            running, at = [slot for slot in running if slot not in ended], at + 1
        return [slot.episode() for slot in self.slots]

    def _new_group(self) -> int:
        self._next_group += 1
        return self._next_group - 1

    def _play_row(self, at: int, slots: Sequence[EnvSlot]) -> list[EnvSlot]:
        """A turn of each of `slots`; those whose episode ended with it.

        States that a time limit cut off are shown to the policy: its critic is asked about them next.
        """
        replies = self.actor.act(slots, [int(self._noise.integers(2**63)) for _ in slots])
        ended = [slot for slot, reply in zip(slots, replies, strict=True) if slot.play(reply, at)]
        for slot in ended:
            if not slot.is_terminated:
                self.actor.show([slot])
        if self.show is not None:
            self.show([slot.episode(only_newest=True) for slot in slots])
        return ended

    def _fresh_seed(self) -> int:
        return int(self._noise.integers(_FIRST_TRAINING_SEED, 2 * _FIRST_TRAINING_SEED))

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Snapshots and the actions' numbers, under the name RLlib gives to the only module."""
        env = self.slots[0].env
        snapshots = gym.spaces.Box(-np.inf, np.inf, (env.snapshot_size,), np.float32)
        return {DEFAULT_MODULE_ID: (snapshots, gym.spaces.Discrete(len(env.action_names)))}

    def save_tree(self) -> dict[str, Any]:
        """Envs, running episodes and seeds to come: after `load_tree` the future is bit-identical."""
        return {"slots": [slot.get_state() for slot in self.slots], "noise": self._noise.bit_generator.state}

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        for slot, saved in zip(self.slots, tree["slots"], strict=True):
            slot.set_state(saved)
        self._noise.bit_generator.state = tree["noise"]

    def stop(self) -> None:
        """Closes the envs."""
        for slot in self.slots:
            slot.env.close()


def play_turns_of(
    runner: TurnRunner, engine: Engine, labeller: RewardLabeller, algo: PolicyGradientConfig, is_compared: bool
) -> Play:
    """Plays envs that are talked to; the runner shows each row of turns to the labeller."""
    if labeller.asks:
        runner.show = labeller.show

    def play(weights: Weights) -> Rollout:
        engine.use(weights)
        if algo.rollout_turns and not is_compared:
            return runner.sample(num_turns=algo.rollout_turns // algo.num_envs), {}
        return runner.sample_groups(group_size=algo.group_size if is_compared else 1), {}

    return play
