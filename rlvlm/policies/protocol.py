"""What learners, rollouts and players need of a policy that answers, whatever its answers are made of; and how it comes
to see images: `look` draws those that its `SeenImages` lack.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from numpy.random import Generator
from torch import Tensor, nn

from rlvlm.core.episodes import Answer, IntArray, Observations
from rlvlm.core.errors import MachineError, UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.policies.weights import Shardable, load_weights, swap_weights, trainable_state
from rlvlm.vlms.skeleton import device_of


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Image = TypeVar("Image", bound=_Sized)


class SeenImages(Generic[Image]):
    """Images by key, as features or as pixels; the least recently used leave when `max_bytes` is reached.

    Args:
        max_bytes: room for them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._images: OrderedDict[bytes, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._images)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._bytes

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Indices in `keys` whose image is not here, the first of each key only; the others count as used just now."""
        wanted: dict[bytes, int] = {}
        # envs side by side often show the same image: it is asked for once
        for index, key in enumerate(keys):
            if key in self._images:
                self._images.move_to_end(key)
            else:
                wanted.setdefault(key, index)
        return list(wanted.values())

    def add(self, key: bytes, image: Image) -> None:
        """Keeps `image`; images unused for longest make room for it."""
        self._bytes += image.nbytes - (self._images[key].nbytes if key in self._images else 0)
        self._images[key] = image
        self._images.move_to_end(key)
        # the newest stays, however large: a batch of one must always work
        while self._bytes > self._max_bytes and len(self._images) > 1:
            self._bytes -= self._images.popitem(last=False)[1].nbytes

    def get(self, keys: Sequence[bytes]) -> list[Image]:
        """The images of `keys`.

        Raises:
            MachineError: one is not here: it was never shown, or the cache is smaller than a batch.
        """
        try:
            return [self._images[key] for key in keys]
        except KeyError as error:
            raise MachineError(
                f"image {error} was not shown to the policy, or its cache of {self._max_bytes >> 20} MiB is smaller "
                f"than a batch ({len(set(keys))} images)",
                "raise --policy.cache-mib",
            ) from error

    def clear(self) -> None:
        """Forgets everything; after the vision encoder changed, features are stale."""
        self._images.clear()
        self._bytes = 0

    def items(self) -> dict[bytes, Image]:
        """Everything that is kept."""
        return dict(self._images)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A policy's present prediction of stored answers; everything carries gradients."""

    log_probs: Tensor
    """[B, N] of each element, float32; 0 where there is none."""
    values: Tensor | None = None
    """[B] the value head before each answer; None where the policy has none."""
    entropies: Tensor | None = None
    """[B, N] of the distribution that each element was drawn from, nats; where asked for. Of fewer answers where it is
    only logged."""
    token_values: Tensor | None = None
    """[B, N] the value head before each element; where asked for. The first is that of `values`."""
    actions: Tensor | None = None
    """[B, A] log-probs of an action head's actions; where asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imitation:
    """M demonstrated answers that a policy is ready to learn from."""

    loss: Callable[[Tensor, Tensor | None], Tensor]
    """The mean loss, a scalar with gradient, of some of them: their rows [B] in [0, M), and what each counts [B], or
    None for all alike."""
    shown: IntArray
    """[M] number of each among the answers that were shown; a policy may have no use for some."""
    lengths: Sequence[int] = ()
    """[M] tokens that the network goes through for each; empty: as many for all."""

    def __len__(self) -> int:
        """M."""
        return len(self.shown)


class Policy(nn.Module):
    """A VLM that writes, a VLM with an action head, a VLA of any form, or a network of the user's own.

    An answer is a mapping of arrays that the policy alone reads; its N elements are what was drawn with a log-prob
    each: tokens, or the numbers of a flow's denoising steps. A log-prob may be that of a density, and above 0. Policies
    of envs in turns are `ReplyPolicy`, those of envs in chunks `VLAPolicy`: these say how each is sampled.
    """

    config: Any
    """What it was built by."""

    def __init__(self) -> None:
        super().__init__()
        self.value_head: nn.Module | None = None
        self.images: SeenImages[Any] = SeenImages(256 << 20)
        """Encoded images, by key."""

    # specific to each policy

    def draw(self, env: Any, snapshots: FloatArray) -> Frames:
        """[N, ...] the images of `snapshots` [N, D] that it looks at, drawn by `env`."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it looks at")

    def log_probs(
        self,
        obs: Observations,
        answers: Sequence[Answer],
        *,
        temperature: float = 1.0,
        detach_values: bool = False,
        with_entropies: bool = False,
        with_token_values: bool = False,
    ) -> Prediction:
        """Its prediction of stored answers to `obs`, whose images it was shown.

        Args:
            obs: [B].
            answers: B.
            temperature: that they were sampled with.
            detach_values: the value head's loss does not reach the body.
            with_entropies: give entropies too; without, they may be of a few answers.
            with_token_values: give a value before each element.
        """
        raise NotImplementedError(f"{type(self).__name__} has no log-probs")

    def imitation(self, shown: Any, env: Any, sft: Any, rng: Generator, log: Callable[[str], None]) -> Imitation:
        """Gets ready to imitate demonstrations.

        Args:
            shown: of the policy's kind: episodes in turns, whose turns `ReplyPolicy.demonstrated` gives, or
                `Demonstrations` in chunks, whose statistics it has learned.
            env: draws what it sees.
            sft: settings of the supervised start, `ReplySFTConfig` or `ChunkSFTConfig`.
            rng: of all that is drawn for it.
            log: takes a line.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot imitate")

    def values(self, obs: Observations) -> Tensor:
        """[B] the value head before any answer."""
        raise NotImplementedError(f"{type(self).__name__} has no value head")

    def meta(self) -> dict[str, Any]:
        """Content of its checkpoint beside the weights that learn, as JSON; empty where the run's config says all."""
        return {}

    def shardable(self) -> Shardable:
        """How its weights may be spread over several learners.

        Raises:
            UsageError: they may not.
        """
        raise UsageError("only a large policy is worth sharding", "leave out --algo.shard, or name a --policy.model")

    # as most have it

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return device_of(self)

    @property
    def has_values(self) -> bool:
        """Whether it has a value head."""
        return self.value_head is not None

    def show(self, keys: Sequence[bytes], frames: Frames) -> None:
        """Keeps what it needs of `frames` [N, ...], as `draw` gives them, under `keys`: here the pixels."""
        for key, frame in zip(keys, frames, strict=True):
            self.images.add(key, frame)

    def forget_stale_images(self) -> None:
        """Forgets what it made of images where that changes as it learns: called after an update. Pixels stay."""

    def stop_training_vision(self) -> None:
        """From now on an image encoder that has learned stays as it is; most policies have none that learns."""

    def lengths(self, obs: Observations, answers: Sequence[Answer]) -> list[int]:
        """[B] tokens that the network goes through for each stored answer, those of images and prompts included; 1
        where all are alike.

        Args:
            obs: [B], whose images it was shown.
            answers: B.
        """
        return [1] * len(answers)

    def acting_parameters(self) -> list[nn.Parameter]:
        """Parameters that learn, without the value head's."""
        # by identity, for tensors compare by their values
        own = {id(parameter) for parameter in self.value_parameters()}
        return [parameter for parameter in self.parameters() if parameter.requires_grad and id(parameter) not in own]

    def value_parameters(self) -> list[nn.Parameter]:
        """Parameters of the value head that learn."""
        return [] if self.value_head is None else list(self.value_head.parameters())

    def trained_state(self) -> dict[str, Tensor]:
        """Name and value of everything that learns, detached: what a checkpoint and a sync of weights carry."""
        return trainable_state(self)

    def load_trained_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `trained_state` of a policy of the same kind gave, as tensors or arrays.

        Raises:
            ValueError: a name or a shape is not that of this policy.
        """
        load_weights(self.trained_state(), state)

    def with_weights(self, state: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Within, the policy has the weights that `trained_state` gave at another time: the reference is read so.
        Images keep the features they have.
        """
        return swap_weights(self.trained_state(), state)


SHOWN_AT_ONCE = 64
"""Images that are encoded together."""


def look(policy: Policy, env: Any, obs: Observations, agree: Callable[[int], int] = int) -> None:
    """Has `env` draw, and `policy` keep, the images of `obs` that it has not seen.

    Args:
        policy: what looks.
        env: of its task.
        obs: one or more.
        agree: turns this process's number of rounds of `SHOWN_AT_ONCE` images into the largest of all learners that
            gather the weights of a sharded policy; one that has encoded everything encodes one image again.
    """
    # as many rounds on every learner: to encode, a sharded policy gathers weights, and each must give its part
    missing = policy.images.missing(obs.images)
    for begin in range(0, agree(-(-len(missing) // SHOWN_AT_ONCE)) * SHOWN_AT_ONCE, SHOWN_AT_ONCE):
        indices = missing[begin : begin + SHOWN_AT_ONCE] or [0]
        policy.show([obs.images[index] for index in indices], policy.draw(env, obs.snapshots[indices]))
