"""Sampling of replies in batches: the interface of engines, and the engine in process for any `ReplyPolicy`.

Images are encoded when they are shown, not when they are used. The learner recomputes log-probs; those of an engine are
a check.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlvlm.core.episodes import Observations, SampledReply
from rlvlm.core.steps import Frames
from rlvlm.policies.buckets import Bucket
from rlvlm.policies.reply_policy import ReplyPolicy, ReplySampling, check_replies
from rlvlm.policies.vlm.config import BUCKET_MIB


class Engine(Protocol):
    """Samples replies of a policy, wherever it runs; every reply carries the version of its weights."""

    version: int = 0
    """Version of the weights with which replies are sampled now."""
    bucket_bytes: int = BUCKET_MIB << 20
    """Size of a bucket of weights from learners in other processes, bytes."""

    def pack(self, version: int, buckets: Sequence[Bucket] = ()) -> Any:
        """Packs the present weights of the policy in training; called by the training thread.

        Args:
            version: version to give them.
            buckets: the same weights, if learners have put them into Ray's object store already.
        """
        ...

    def use(self, weights: Any) -> None:
        """Samples replies with these packed weights from now on; called by the process that asks for replies."""
        ...

    def missing(self, images: Sequence[bytes]) -> list[int]:
        """Returns the indices of `images` that must be shown before they can be used."""
        ...

    def show(self, images: Sequence[bytes], frames: Frames) -> None:
        """Stores `frames` [N, H, W, 3] under the keys `images`."""
        ...

    def reply(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
        """Returns replies to `obs`, in order; see `PolicyEngine.reply`."""
        ...

    # defaults for an engine in the learner's own process, which owns nothing besides the policy

    def report(self) -> dict[str, float]:
        """Returns metrics of the engine, by names in `rlvlm.core.metrics`."""
        return {}

    @property
    def shares_gpus(self) -> bool:
        """Whether it samples on the learners' GPUs, and must sleep while they learn."""
        return False

    def sleep(self) -> None:
        """Releases the learners' GPUs, and returns once it has. Only if it shares them."""

    def wake(self, gpus: Sequence[tuple[str, str]]) -> None:
        """Takes the learners' GPUs, each as its node in Ray and its id there. It starts asleep."""

    def close(self) -> None:
        """Frees what the engine holds besides the policy."""


class PolicyEngine(Engine):
    """Samples from `policy`, which may be in training elsewhere: weights are read when a batch is sampled.

    Args:
        policy: policy to sample from.
        max_batch: maximum replies processed together; more are split.
    """

    def __init__(self, policy: ReplyPolicy, max_batch: int = 64) -> None:
        self.policy = policy
        self.max_batch = max_batch

    def pack(self, version: int, buckets: Sequence[Bucket] = ()) -> int:  # noqa: ARG002 - the policy has them
        """Returns only `version`: replies are sampled with the policy's weights at that moment."""
        return version

    def use(self, weights: int) -> None:
        """Sets the version of the weights, which are the policy's own."""
        self.version = weights

    def missing(self, images: Sequence[bytes]) -> list[int]:
        return self.policy.images.missing(images)

    def show(self, images: Sequence[bytes], frames: Frames) -> None:
        self.policy.show(images, frames)

    def reply(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
        """Returns replies to `obs`, in order: texts, or the actions of a policy with an action head, for which only the
        seeds and `greedy` matter.

        Args:
            obs: images, which were shown, and user messages, which the policy puts into the model's chat format.
            seeds: seed of each reply, which does not depend on the rest of the batch.
            sampling: settings for all of them.

        Raises:
            MachineError: an image was not shown.
            UsageError: a prompt and its reply would be longer than the model's window; a prompt is never cut.
        """
        replies: list[SampledReply] = []
        for begin in range(0, len(obs), self.max_batch):
            own = seeds[begin : begin + self.max_batch]
            part = obs.at(range(begin, begin + len(own)))
            sampled = self.policy.sample(part, own, sampling)
            check_replies(sampled, len(own), self.policy)
            pairs = zip(part.images, sampled, strict=True)
            replies += [replace(reply, image=image, version=self.version) for image, reply in pairs]
        return replies
