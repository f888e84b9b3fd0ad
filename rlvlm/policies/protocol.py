"""Interface of policies with sampled answers, as used by learners, rollouts and players, whatever their answers consist
of; and their images: `look` draws those missing in `SeenImages`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from numpy.random import Generator
from torch import Tensor, nn

from rlvlm.core.episodes import Answer, IntArray, Observations
from rlvlm.core.errors import MachineError, UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import Env
from rlvlm.policies.weights import Shardable, load_weights, swap_weights, trainable_state
from rlvlm.vlms.skeleton import device_of


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Image = TypeVar("Image", bound=_Sized)


class SeenImages(Generic[Image]):
    """Images by key, as features or pixels; the least recently used are dropped when `max_bytes` is reached.

    Args:
        max_bytes: memory for them, bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._images: OrderedDict[bytes, Image] = OrderedDict()

    def __len__(self) -> int:
        return len(self._images)

    @property
    def nbytes(self) -> int:
        """Total size of the images, bytes."""
        return self._bytes

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the indices of `keys` without an image, the first of each key only; marks the others as used."""
        wanted: dict[bytes, int] = {}
        # parallel envs often show the same image, which is requested only once
        for index, key in enumerate(keys):
            if key in self._images:
                self._images.move_to_end(key)
            else:
                wanted.setdefault(key, index)
        return list(wanted.values())

    def add(self, key: bytes, image: Image) -> None:
        """Stores `image`; drops the least recently used ones if necessary."""
        self._bytes += image.nbytes - (self._images[key].nbytes if key in self._images else 0)
        self._images[key] = image
        self._images.move_to_end(key)
        # the newest stays, however large: a batch of one must always work
        while self._bytes > self._max_bytes and len(self._images) > 1:
            self._bytes -= self._images.popitem(last=False)[1].nbytes

    def get(self, keys: Sequence[bytes]) -> list[Image]:
        """Returns the images of `keys`.

        Raises:
            MachineError: an image was never shown, or the cache is smaller than a batch.
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
        """Drops all images: features are stale after the vision encoder has changed."""
        self._images.clear()
        self._bytes = 0

    def items(self) -> dict[bytes, Image]:
        """Returns all stored images."""
        return dict(self._images)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How stored answers are read again, and what a `Prediction` of them holds besides log-probs."""

    temperature: float = 1.0
    """Temperature > 0 at which they were sampled."""
    detach_values: bool = False
    """Whether the value head's loss stops at the head."""
    with_entropies: bool = False
    """Whether to return entropies of all answers; otherwise they may be of a few."""
    with_token_values: bool = False
    """Whether to return a value before each element."""


READING = Reading()
"""Reading of answers that were sampled at temperature 1: log-probs, and values where there is a head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A policy's present prediction of stored answers; all tensors carry gradients."""

    log_probs: Tensor
    """[B, N] log-probs of the elements, float32; 0 for padding."""
    values: Tensor | None = None
    """[B] values before each answer; None if the policy has no value head."""
    entropies: Tensor | None = None
    """[B, N] entropies of the elements' distributions, nats, if requested; of fewer answers if only logged."""
    token_values: Tensor | None = None
    """[B, N] values before each element, if requested. The first equals `values`."""
    actions: Tensor | None = None
    """[B, A] log-probs of an action head's actions, if requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imitation:
    """M demonstrated answers, prepared for a policy to learn from."""

    loss: Callable[[Tensor, Tensor | None], Tensor]
    """Function that returns the mean loss, a scalar with gradient, for rows [B] in [0, M) with weights [B], or None for
    equal weights."""
    shown: IntArray
    """[M] index of each among the shown answers, of which a policy may leave some out."""
    lengths: Sequence[int] = ()
    """[M] tokens of each in the network; empty: all equal."""

    def __len__(self) -> int:
        """Returns M."""
        return len(self.shown)


class Policy(nn.Module):
    """Base of all policies with sampled answers: VLMs with text or action head, VLAs, or the user's own networks.

    An answer is a mapping of arrays that only the policy interprets; its N elements were sampled with a log-prob each:
    tokens, or the numbers of a flow's denoising steps. A log-prob may be of a density, and above 0. Policies of envs in
    turns are `ReplyPolicy`, those of envs in chunks `VLAPolicy`, which define how each is sampled.
    """

    config: Any
    """Settings with which it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.value_head: nn.Module | None = None
        self.images: SeenImages = SeenImages(256 << 20)
        """Encoded images, by key."""

    # specific to each policy

    def draw(self, env: Any, snapshots: FloatArray) -> Frames:
        """Returns [N, ...], the images of `snapshots` [N, D] that it needs, drawn by `env`."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it looks at")

    def log_probs(self, obs: Observations, answers: Sequence[Answer], reading: Reading = READING) -> Prediction:
        """Returns its prediction of stored answers to `obs`, whose images it was shown.

        Args:
            obs: [B] observations.
            answers: B answers.
            reading: how they were sampled, and what is asked for besides log-probs.
        """
        raise NotImplementedError(f"{type(self).__name__} has no log-probs")

    def imitation(self, shown: Any, env: Any, sft: Any, rng: Generator, log: Callable[[str], None]) -> Imitation:
        """Prepares for the imitation of demonstrations.

        Args:
            shown: demonstrations of the policy's kind: episodes in turns, see `ReplyPolicy.demonstrated`, or
                `Demonstrations` in chunks, whose statistics it has learned.
            env: draws its images.
            sft: settings of the supervised start, `ReplySFTConfig` or `ChunkSFTConfig`.
            rng: generator of all its random choices.
            log: receives progress messages.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot imitate")

    def values(self, obs: Observations) -> Tensor:
        """Returns [B], the value head's prediction before any answer."""
        raise NotImplementedError(f"{type(self).__name__} has no value head")

    def meta(self) -> dict[str, Any]:
        """Returns the content of its checkpoint besides trained weights, as JSON; empty if the config suffices."""
        return {}

    def shardable(self) -> Shardable:
        """Returns how its weights may be sharded over several learners.

        Raises:
            UsageError: they cannot be.
        """
        raise UsageError("only a large policy is worth sharding", "leave out --algo.shard, or name a --policy.model")

    def export(self, folder: Path) -> str:
        """Writes the policy as it is now to the empty `folder`, in the layout of the model that it was made from;
        returns whose layout that is and how it is loaded.

        Raises:
            UsageError: there is no such layout.
        """
        raise UsageError(
            f"a {type(self).__name__} is rlvlm's own, and other projects have no layout for it",
            "load it with rlvlm.load_policy",
        )

    # defaults for most policies

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return device_of(self)

    @property
    def has_values(self) -> bool:
        """Whether it has a value head."""
        return self.value_head is not None

    def show(self, keys: Sequence[bytes], frames: Frames) -> None:
        """Stores what it needs of `frames` [N, ...], as returned by `draw`, under `keys`: by default the pixels."""
        for key, frame in zip(keys, frames, strict=True):
            self.images.add(key, frame)

    def forget_stale_images(self) -> None:
        """Drops encoded images that training makes stale; called after an update. Pixels stay."""

    def stop_training_vision(self) -> None:
        """Freezes a trained image encoder; most policies have none."""

    def lengths(self, obs: Observations, answers: Sequence[Answer]) -> list[int]:
        """Returns [B], the number of tokens in the network for each stored answer, including images and prompts; 1 if
        all are equal.

        Args:
            obs: [B] observations, whose images it was shown.
            answers: B answers.
        """
        return [1] * len(answers)

    def acting_parameters(self) -> list[nn.Parameter]:
        """Returns the trained parameters, without the value head's."""
        # by identity, because tensors compare by value
        own = {id(parameter) for parameter in self.value_parameters()}
        return [parameter for parameter in self.parameters() if parameter.requires_grad and id(parameter) not in own]

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns the trained parameters of the value head."""
        return [] if self.value_head is None else list(self.value_head.parameters())

    def trained_state(self) -> dict[str, Tensor]:
        """Returns name and value of every trained tensor, detached: the content of checkpoints and weight syncs."""
        return trainable_state(self)

    def load_trained_state(self, state: Mapping[str, Any]) -> None:
        """Loads the `trained_state` of a policy of the same kind, as tensors or arrays.

        Raises:
            ValueError: a name or a shape differs.
        """
        load_weights(self.trained_state(), state)

    def with_weights(self, state: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Gives the policy an earlier `trained_state` while the context is open. Images keep their features."""
        return swap_weights(self.trained_state(), state)


SHOWN_AT_ONCE = 64
"""Number of images encoded together."""


def look(policy: Policy, env: Env, obs: Observations, agree: Callable[[int], int] = int) -> None:
    """Has `env` draw, and `policy` store, the images of `obs` that it has not seen.

    Args:
        policy: policy that needs the images.
        env: env of its task.
        obs: one or more observations.
        agree: turns this process's number of rounds of `SHOWN_AT_ONCE` images into the maximum over all learners that
            gather the weights of a sharded policy; one that has encoded everything encodes one image again.
    """
    # equally many rounds on every learner: encoding with a sharded policy gathers weights from all of them
    missing = policy.images.missing(obs.images)
    for begin in range(0, agree(-(-len(missing) // SHOWN_AT_ONCE)) * SHOWN_AT_ONCE, SHOWN_AT_ONCE):
        indices = missing[begin : begin + SHOWN_AT_ONCE] or [0]
        policy.show([obs.images[index] for index in indices], policy.draw(env, obs.snapshots[indices]))
