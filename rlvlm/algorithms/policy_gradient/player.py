"""Whole episodes of a policy for evaluations and `rlvlm eval`, and the policy's part of a checkpoint."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlvlm.algorithms.checkpoint import PolicyFile, corrupt_if_unreadable, load_policy_file, load_tree
from rlvlm.algorithms.evaluation import FIRST_SEED, Evaluation, PlayedEpisode
from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler, play_held_out
from rlvlm.algorithms.policy_gradient.turns import Actor, play_turns
from rlvlm.core import metrics
from rlvlm.core.disk import expand_home
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import MachineError, UsageError
from rlvlm.core.trust import names_of
from rlvlm.demonstrations.collect import Demonstrator, acting
from rlvlm.envs.env import ChunkEnv
from rlvlm.envs.playing import play
from rlvlm.envs.slots import EnvSlot
from rlvlm.judges.agreement import wilson_interval
from rlvlm.policies.protocol import Policy
from rlvlm.policies.reply_policy import ReplyPolicy
from rlvlm.policies.vla.build import read_config, read_policy
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.policy import VLAPolicy

VLM_KIND, VLA_KIND = "vlm", "vla"
"""Kinds of the policy's file in a checkpoint."""
_PLAYABLE = "policy that can be played"
_TRIES = 5
"""Attempts at episodes that were lost with their env."""
Roll = Callable[[Sequence[int], bool], list[TokenEpisode]]
"""Function from seeds to whole episodes in their order; greedy or sampled."""
PlayHeldOut = Callable[[NDArray[np.int64], bool], list[TokenEpisode]]
"""Function like `play_held_out` for initial states [N], greedy or sampled; returns fewer if some were lost."""


class TokenPlayer:
    """Plays a policy in envs of its own, without effect on training.

    Args:
        roll: plays the episodes.
        greedy: whether to take the most likely token each time.
        first_sampled_seed: first seed of sampled evaluations.
        milestones: milestones of the env, by name, see `TurnEnv`.
    """

    def __init__(
        self,
        roll: Roll,
        greedy: bool = True,
        first_sampled_seed: int = FIRST_SEED,
        milestones: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.roll, self._greedy = roll, greedy
        self._first_sampled_seed, self._milestones = first_sampled_seed, milestones

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """Plays an episode from each seed; fewer if greedy ones would repeat."""
        return [as_played(episode) for episode in self.roll(seeds, self._greedy)]

    def evaluate(self, num_episodes: int) -> tuple[Evaluation, list[TokenEpisode]]:
        """Evaluates as many greedy episodes as sampled ones, from fixed seeds; also returns the greedy ones.

        Args:
            num_episodes: number of each kind, >= 1.
        """
        # the same seeds every time: evaluations, within a run or between runs, differ by the policy alone
        greedy = self.roll(range(FIRST_SEED, FIRST_SEED + num_episodes), True)
        first = self._first_sampled_seed
        sampled = self.roll(range(first, first + num_episodes), False)
        measured = {metrics.EVAL_SAMPLED_SUCCESS: share(episode.is_success for episode in sampled)}
        if greedy and greedy[0].replies:
            measured |= _of_replies(greedy, sampled)
        both = {
            metrics.EVAL_REACHED: [as_played(episode) for episode in greedy],
            metrics.EVAL_SAMPLED_REACHED: [as_played(episode) for episode in sampled],
        }
        measured |= {
            before + name: share(episode.reaches(least) for episode in episodes)
            for before, episodes in both.items()
            for name, least in self._milestones.items()
        }
        return Evaluation(episodes=both[metrics.EVAL_REACHED], metrics=measured), greedy


def turn_player(
    actor: Actor,
    make_slot: Callable[[], EnvSlot],
    num_slots: int,
    greedy: bool = True,
    milestones: Mapping[str, float] = MappingProxyType({}),
) -> TokenPlayer:
    """Makes a player of envs in turns, `num_slots` at once; sampled evaluations share no seed with greedy ones."""

    def roll(seeds: Sequence[int], is_greedy: bool) -> list[TokenEpisode]:
        return play_turns(actor, make_slot, seeds, num_slots, is_greedy)

    return TokenPlayer(roll, greedy, 2 * FIRST_SEED, milestones)


def chunk_player(sampler: ChunkSampler, greedy: bool = True, play: PlayHeldOut | None = None) -> TokenPlayer:
    """Makes a player of envs in chunks, in this process or by `play`; a seed is the number of an initial state.

    Greedy episodes from the same state are equal: once consecutive seeds return to the first state, no more are played.
    """

    def roll(seeds: Sequence[int], is_greedy: bool) -> list[TokenEpisode]:
        ids = np.array(seeds[: sampler.env.num_held_out] if is_greedy else seeds, np.int64)
        if not len(ids):
            return []
        for _ in range(_TRIES):
            played = play(ids, is_greedy) if play else play_held_out(sampler, sampler.env.many(), ids, is_greedy)
            if len(played) == len(ids):
                return sorted(played, key=lambda episode: episode.slot)
        raise MachineError(
            f"in {_TRIES} tries to play {len(ids)} episodes an env runner or worker was lost each time",
            "look for what ends them (memory?), then `rlvlm resume` with fewer --algo.env-runners or env-workers",
        )

    return TokenPlayer(roll, greedy)


def script_player(script: Demonstrator, slot: EnvSlot) -> TokenPlayer:
    """Makes a player of a script in `slot`, such as the env's expert, for comparison with policies."""
    return TokenPlayer(lambda seeds, _: [slot.episode() for slot in play([slot], seeds, acting(script))])


def _of_replies(greedy: Sequence[TokenEpisode], sampled: Sequence[TokenEpisode]) -> dict[str, float]:
    """Returns metrics of policies with replies."""
    strict, sampled_strict = ([is_strict_success(episode) for episode in played] for played in (greedy, sampled))
    low, high = wilson_interval(sum(strict), len(strict))
    sampled_low, sampled_high = wilson_interval(sum(sampled_strict), len(sampled_strict))
    lengths = [len(log_probs) if len(episode.actions) else 0 for episode in greedy for log_probs in episode.log_probs]
    return {
        metrics.EVAL_STRICT_SUCCESS: share(strict),
        metrics.EVAL_STRICT_LOW: low,
        metrics.EVAL_STRICT_HIGH: high,
        metrics.EVAL_SAMPLED_STRICT_SUCCESS: share(sampled_strict),
        metrics.EVAL_SAMPLED_STRICT_LOW: sampled_low,
        metrics.EVAL_SAMPLED_STRICT_HIGH: sampled_high,
        metrics.EVAL_INVALID: share(reply.action is None for episode in greedy for reply in episode.replies),
        metrics.EVAL_SAMPLED_INVALID: share(reply.action is None for episode in sampled for reply in episode.replies),
        metrics.EVAL_STANDS_STILL: share(map(stands_still, greedy)),
        metrics.EVAL_REPLY_TOKENS: float(np.mean(lengths)) if lengths else 0.0,
    }


def as_played(episode: TokenEpisode) -> PlayedEpisode:
    """Returns an episode in env steps for all pages; the captions are the replies, or the instruction."""
    steps = len(episode.env_rewards)
    captions = tuple(reply.text for reply in episode.replies) or episode.goals[:1] * steps
    return PlayedEpisode(
        snapshots=episode.snapshots[1:],
        env_rewards=episode.env_rewards,
        learned_rewards=np.full(steps, np.nan, np.float32),
        success=episode.success,
        progress=episode.progress,
        captions=captions,
    )


def is_strict_success(episode: TokenEpisode) -> bool:
    """Returns whether the episode's return is above 0: RL4VLM's test, which in some tasks one wrong turn fails."""
    return float(episode.env_rewards.sum(dtype=np.float64)) > 0


def stands_still(episode: TokenEpisode) -> bool:
    """Returns whether a greedy episode ended stuck: image and text of its last turn equal those of the turn before.
    Such a policy repeats itself for ever, with an action that changes nothing or an unreadable reply.
    """
    if episode.terminated or len(episode) < 2:
        return False
    # there is one more image and text than turns: the last is of the state after the episode
    (image, text), (last_image, last_text) = zip(episode.obs.images[-3:-1], episode.obs.texts[-3:-1], strict=True)
    return image == last_image and text == last_text


def share(truths: Iterable[bool]) -> float:
    """Returns the share of true values; 0 if there are none."""
    listed = list(truths)
    return float(np.mean(listed)) if listed else 0.0


def policy_file(policy: Policy) -> PolicyFile:
    """Returns the policy's part of a checkpoint: trained weights and, for a VLA, its config and its scale."""
    weights = {name: value.contiguous() for name, value in policy.trained_state().items()}
    meta = policy.meta()
    return PolicyFile(kind=kind_of(meta), weights=weights, meta=meta)


def kind_of(meta: Mapping[str, Any]) -> str:
    """Returns the kind of the policy with these arguments: a VLM has none."""
    return VLA_KIND if meta else VLM_KIND


def load_vlm(policy: ReplyPolicy, folder: Path) -> None:
    """Loads the trained weights in the checkpoint in `folder` into `policy`, which has the others itself.

    Raises:
        CorruptCheckpoint: a file is missing, has changed since it was written, or contains another kind of policy.
    """
    file = load_policy_file(folder, VLM_KIND)
    with corrupt_if_unreadable(folder, _PLAYABLE, "use a checkpoint made with the same --policy options"):
        policy.load_trained_state(file.weights)


def load_start(policy: Policy, folder: Path) -> bool:
    """Loads the weights from which learning started, from the checkpoint in `folder`; returns False if it has none.

    Raises:
        CorruptCheckpoint: a file is missing or has changed since it was written.
    """
    start = load_tree(folder)["learner"]["start"]
    if start:
        own = policy.trained_state()
        policy.load_trained_state(
            {name: torch.tensor(np.array(value)).to(own[name].dtype) for name, value in start.items()}
        )
    return bool(start)


def load_vla(folder: Path, env: ChunkEnv, known: VLAConfig) -> VLAPolicy:
    """Loads the policy of the checkpoint in `folder`.

    Args:
        folder: the algorithm's folder in a checkpoint, or one from `rlvlm sft`.
        env: env in which it acts.
        known: settings of the policy that its reader has read and trusts, e.g. the run's.

    Raises:
        UsageError: the checkpoint names code or files that `known` does not.
        CorruptCheckpoint: a file is missing, has changed since it was written, or contains another kind of policy.
        ModelUnavailable: the checkpoint is of an adapter, and the model that it belongs to cannot be loaded.
    """
    file = load_policy_file(folder, VLA_KIND)
    with corrupt_if_unreadable(folder, _PLAYABLE):
        config = read_config(file.meta)
    # the checkpoint has a copy of the settings, in a file that is not read before its folder is trusted
    (code, out), (known_code, known_out) = names_of(config), names_of(known)
    if odd := {*code, *map(expand_home, out.values())} - {*known_code, *map(expand_home, known_out.values())}:
        raise UsageError(
            f"the policy in {folder} names {', '.join(sorted(odd))}, which the settings of its run do not",
            "do not use it: it was changed after it was saved",
        )
    with corrupt_if_unreadable(folder, _PLAYABLE):
        policy = read_policy(file.meta, env)
        policy.load_trained_state(file.weights)
        return policy


def take_vla(folder: Path, policy: VLAPolicy) -> None:
    """Loads the weights and statistics of the checkpoint in `folder` into `policy`.

    Raises:
        CorruptCheckpoint: a file is missing, has changed since it was written, or contains another kind of policy.
        UsageError: its policy was built with other settings, or for an env of another shape.
    """
    file = load_policy_file(folder, VLA_KIND)
    with corrupt_if_unreadable(folder, _PLAYABLE):
        before, wanted = read_config(file.meta).built_by(), policy.config.built_by()
    if odd := {name: value for name, value in before.items() if wanted.get(name) != value}:
        names = ", ".join(f"{name} {value}" for name, value in odd.items())
        raise UsageError(f"the policy of {folder.parent} was built with {names}", "give this run the same")
    # compared here, so that the message can name a weight and the fix
    shapes = {name: tuple(value.shape) for name, value in policy.trained_state().items()}
    found = {name: tuple(value.shape) for name, value in file.weights.items()}
    if other := sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)):
        name = other[0]
        raise UsageError(
            f"the policy of {folder.parent} was made for another env: {name} is {found.get(name, 'missing')} there "
            f"and {shapes.get(name, 'missing')} here",
            "start from a run of the same task, or of one with the same cameras, actions and proprioception",
        )
    with corrupt_if_unreadable(folder, _PLAYABLE):
        policy.load_trained_state(file.weights)
        policy.load_statistics(file.meta["statistics"])
