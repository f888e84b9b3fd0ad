"""Extension of vLLM's workers that loads new weights; vLLM mixes it into them by its name.

The process that starts the engine writes the buckets into a folder, one after the other
(`serving.weights.feed_buckets`), which also works where the model is spread over several processes, none of which knows
Ray.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlvlm.policies.buckets import Bucket, TensorPlace, read_bucket

FAILED = "failed"
"""A file that says that no more buckets will come."""
MODEL = "model."
"""Prefix of a policy's names of its chat VLM's weights; the others belong to its heads, which vLLM does not have."""
_POLL_S = 0.002


class BucketLoader:
    """Mixed into each of vLLM's workers, by `worker_extension_cls`."""

    rank: int
    reload_weights: Any

    def load_buckets(self, folder: str, buckets: Sequence[dict[str, Any]]) -> None:
        """Puts what comes into `folder` in the place of the model's weights, layer by layer; what does not come stays.

        Args:
            folder: of the files; one that is gone brings no more of them.
            buckets: as `described` gives them.

        Raises:
            ValueError: what came is torn or not finite; the model is then a mixture.
            RuntimeError: no more came.
        """
        self.reload_weights(weights_iterator=_stream(Path(folder), buckets, self.rank), is_checkpoint_format=True)


def described(buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    """`buckets` in words that go to another process; where their bytes lie stays behind."""
    return [{"sha256": bucket.sha256, "tensors": [asdict(tensor) for tensor in bucket.tensors]} for bucket in buckets]


def _stream(folder: Path, buckets: Sequence[dict[str, Any]], rank: int) -> Iterator[tuple[str, Tensor]]:
    for number, bucket in enumerate(buckets):
        file = folder / str(number)
        # buckets are written one at a time, so that no more than two lie in the folder
        while not file.exists():
            # the folder goes away with the writer, which may have had no time to say so
            if (folder / FAILED).exists() or not folder.exists():
                raise RuntimeError(f"bucket {number} of {len(buckets)} of the weights does not come")
            time.sleep(_POLL_S)
        tensors = tuple(TensorPlace(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in bucket["tensors"])
        content: Any = np.memmap(file, np.uint8, "r")
        for name, value in read_bucket(Bucket(tensors=tensors, sha256=bucket["sha256"], where=None), content):
            # heads are the trainer's own
            if name.startswith(MODEL):
                yield name.removeprefix(MODEL), value
        del content
        # the writer may delete it once every worker has said so
        file.with_name(f"{number}.read-{rank}").touch()
