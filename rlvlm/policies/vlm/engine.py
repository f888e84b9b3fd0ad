"""Sampling replies, many at once: what an engine is, and the one in process, for any `ReplyPolicy`.

Images are encoded when they are shown, not when they are asked about.
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
    """Samples replies of a policy, wherever it runs; every reply says which version of the weights gave it."""

    version: int
    """Version of the weights that replies are sampled with now."""
    bucket_bytes: int
    """Bytes of a bucket of weights that come from learners in other processes."""

    def pack(self, version: int, buckets: Sequence[Bucket] = ()) -> Any:
        """The weights that the trained policy has now, called `version`; called by the thread that trains.

        Args:
            version: they are to have.
            buckets: the same weights, where learners have put them into Ray's object store already.
        """
        ...

    def use(self, weights: Any) -> None:
        """From now on replies are sampled with what `pack` gave; called by the process that asks for replies."""
        ...

    def missing(self, images: Sequence[bytes]) -> list[int]:
        """Places in `images` that must be shown before they can be asked about."""
        ...

    def show(self, images: Sequence[bytes], frames: Frames) -> None:
        """Keeps `frames` [N, H, W, 3] under the keys `images`."""
        ...

    def reply(
        self,
        obs: Observations,
        seeds: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        greedy: bool = False,
    ) -> list[SampledReply]:
        """Replies to `obs`, in their order; see `PolicyEngine.reply`."""
        ...

    # one in the learner's own process has nothing beside the policy

    def report(self) -> dict[str, float]:
        """Figures of the engine, by names of `rlvlm.core.metrics`."""
        return {}

    @property
    def shares_gpus(self) -> bool:
        """Whether it samples on the learners' GPUs, and must sleep while they learn."""
        return False

    def sleep(self) -> None:
        """Leaves the learners' GPUs to them; returns once it has. Only where it shares them."""

    def wake(self, gpus: Sequence[tuple[str, str]]) -> None:
        """Takes the learners' GPUs, each given by its node in Ray and its id there. It begins asleep."""

    def close(self) -> None:
        """Frees what the engine holds beside the policy."""


class PolicyEngine(Engine):
    """Samples from `policy`, which may be in training elsewhere: weights are read when a batch is sampled.

    Args:
        policy: what samples.
        max_batch: replies that go through the model together; more are done in turn.
    """

    def __init__(self, policy: ReplyPolicy, max_batch: int = 64) -> None:
        self.policy = policy
        self.max_batch = max_batch
        self.bucket_bytes = BUCKET_MIB << 20
        self.version = 0
        """Version of the policy's weights."""

    def pack(self, version: int, buckets: Sequence[Bucket] = ()) -> int:  # noqa: ARG002 - the policy has them
        """Nothing but `version`: replies are sampled with whatever weights the policy has at that moment."""
        return version

    def use(self, weights: int) -> None:
        """The weights are the policy's own; they are called so from now on."""
        self.version = weights

    def missing(self, images: Sequence[bytes]) -> list[int]:
        """Places in `images` that must be shown before they can be asked about."""
        return self.policy.images.missing(images)

    def show(self, images: Sequence[bytes], frames: Frames) -> None:
        """Encodes `frames` [N, H, W, 3] and keeps them under the keys `images`."""
        self.policy.show(images, frames)

    def reply(
        self,
        obs: Observations,
        seeds: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        greedy: bool = False,
    ) -> list[SampledReply]:
        """Replies to `obs`, in their order: words, or the actions of a policy with an action head, for which nothing
        but the seeds and `greedy` matters.

        Args:
            obs: images, which were shown, and the user's words; the policy puts them into the model's chat format.
            seeds: of each reply alone: it does not depend on what else is in the batch.
            max_new_tokens: a longer reply is cut.
            temperature: > 0; logits are divided by it, nothing else is cut off or filtered.
            greedy: take the likeliest token each time; log-probs are still those of `temperature`.

        Raises:
            MachineError: an image was not shown.
            UsageError: a prompt and its reply would be longer than the model's window; a prompt is never cut.
        """
        if max_new_tokens < 1 or temperature <= 0:
            raise ValueError(f"need max_new_tokens >= 1 and temperature > 0, got {max_new_tokens} and {temperature}")
        replies: list[SampledReply] = []
        for begin in range(0, len(obs), self.max_batch):
            own = seeds[begin : begin + self.max_batch]
            part = obs.at(range(begin, begin + len(own)))
            sampled = self.policy.sample(
                part, ReplySampling(seeds=own, greedy=greedy, temperature=temperature, max_new_tokens=max_new_tokens)
            )
            check_replies(sampled, len(own), self.policy)
            pairs = zip(part.images, sampled, strict=True)
            replies += [replace(reply, image=image, version=self.version) for image, reply in pairs]
        return replies
