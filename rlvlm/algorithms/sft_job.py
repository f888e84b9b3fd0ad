"""The supervised start as a job of its own, `rlvlm sft`: a run's learners and imitation, without its rollouts.

The job's folder contains its newest checkpoint in `algorithm/`, from which it resumes and a run may start; for a policy
with replies also `sft.json`, see `sft_folders`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import quiet_rllib
from rlvlm.algorithms.learners import Learners
from rlvlm.algorithms.policy_gradient.algorithm_config import TokenConfig
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.rollouts import ROLLOUTS
from rlvlm.algorithms.policy_gradient.supervised_start import Imitation, Lessons
from rlvlm.algorithms.sft_folders import (
    SFTManifest,
    read_sft_manifest,
    sft_manifest_of,
    write_sft_manifest,
)
from rlvlm.algorithms.sft_replies import validate
from rlvlm.core import metrics
from rlvlm.core.console.signals import StoppedEarly
from rlvlm.core.errors import UsageError
from rlvlm.envs.registry import make_env
from rlvlm.policies.vlm.config import BUCKET_MIB
from rlvlm.policies.vlm.engine import PolicyEngine

CHECKPOINT = "algorithm"
"""Name in the job's folder; a run's checkpoints have their algorithm under the same name."""
_BUCKET_BYTES = BUCKET_MIB << 20


def run_sft(
    config: TokenConfig, save_every: int, folder: Path, log: Callable[[str], None] = lambda line: None
) -> dict[str, float]:
    """Trains, or resumes an earlier job in `folder`; returns the metrics after the last update, by names in
    `rlvlm.core.metrics`.

    Args:
        config: with `sft.demonstrations`; `algo` sets the learners and their micro-batches.
        save_every: updates between checkpoints, each of which is validated.
        folder: folder of the checkpoint and of the result.
        log: receives progress messages.

    Raises:
        UsageError: the demonstrations are unusable, or differ from those of an earlier job.
        CorruptCheckpoint: that job's checkpoint is corrupt.
        StoppedEarly: `log` did, and the job can continue after its last update.
        RunError: a learner failed, or the loss is not finite.
    """
    kind = ROLLOUTS[config.kind]
    env = make_env(config.task, kind.viewer_settings(config), config.seed)
    unused = gym.spaces.Box(-1, 1)  # RLlib asks for spaces; policies see images and text instead
    with quiet_rllib():
        group = config.build_learner_group(spaces={DEFAULT_MODULE_ID: (unused, unused)})
    try:
        learners: Learners[TokenLearner] = Learners(group, config.algo.threads)
        policy: Any = config.policy_for(env) if learners.local is None else learners.local.policy
        if learners.local is None:
            learners.call_all("watch")
        else:
            learners.local.watch(env)
            learners.local.log = log
        lessons = kind.gather(config, policy, env, log)
        if kind.has_manifest:
            _write_manifest(folder, sft_manifest_of(config.task, config.env_settings, policy.config, env.action_names))
        return _train(config, learners, policy, lessons, folder / CHECKPOINT, save_every, log)
    finally:
        group.shutdown()


def _write_manifest(folder: Path, manifest: SFTManifest) -> None:
    """Writes to `folder`, before the training, what is to be learned there, so that it survives a kill.

    Raises:
        UsageError: something else was learned there.
    """
    before = read_sft_manifest(folder)
    if before is not None and (odd := before.lacks(manifest) + before.differs(manifest)):
        raise UsageError(f"{folder} holds a policy trained with other settings: {'; '.join(odd)}", "--out another")
    folder.mkdir(parents=True, exist_ok=True)
    write_sft_manifest(folder, manifest)


def _train(  # noqa: PLR0913, PLR0917 - what `run_sft` has put together
    config: TokenConfig, learners: Learners[TokenLearner], policy: Any, lessons: Lessons, checkpoint: Path,
    save_every: int, log: Callable[[str], None],
) -> dict[str, float]:  # fmt: skip
    """Makes all remaining updates, with a checkpoint after each `save_every`; returns the last metrics.

    Raises:
        StoppedEarly: `log` did, and a checkpoint was saved.
    """
    sft = config.sft
    imitation = Imitation(
        learners=learners, policy=policy, lessons=lessons, sft=sft, bucket_bytes=_BUCKET_BYTES, folder=checkpoint,
        log=log,
    )  # fmt: skip
    measured = imitation.measured
    while imitation.done < sft.updates:
        try:
            imitation.train(min(imitation.done - imitation.done % save_every + save_every, sft.updates))
        except StoppedEarly:
            imitation.save()
            raise
        learners.sync_to(policy, _BUCKET_BYTES)
        line = f"update {imitation.done} of {sft.updates}, loss {measured[metrics.SFT_LOSS]:.3f}"
        if lessons.held_out:
            env = make_env(config.task, config.env_settings.for_demonstrations(), 0)
            engine = PolicyEngine(policy, sft.batch_size)
            measured |= validate(engine, env, lessons.held_out, sft, config.algo.max_reply_tokens)
            measured[metrics.SFT_HELD_OUT_LOSS] = learners.call("held_out_loss", lessons.held_out, sft)
            line += (
                f"; held out: loss {measured[metrics.SFT_HELD_OUT_LOSS]:.3f}, "
                f"{measured[metrics.SFT_EXACT_ACTION]:.0%} of actions as demonstrated"
            )
        imitation.save()
        log(line)
    return measured
