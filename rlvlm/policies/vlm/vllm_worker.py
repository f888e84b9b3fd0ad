"""Extension of vLLM's workers that loads new weights; vLLM adds it to them by name.

The process that starts the engine writes the buckets into a folder, one after the other
(`serving.weights.feed_buckets`), which also works if the model is spread over several processes, none of which has
access to Ray.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlvlm.policies.buckets import Bucket, TensorPlace, read_bucket
from rlvlm.vlms.engines.vllm_worker import AdapterCheck

FAILED = "failed"
"""File which signals that no more buckets will come."""
MODEL = "model."
"""Prefix of the chat VLM's weights in a policy; the others belong to its heads, which vLLM does not have."""
_POLL_S = 0.002


class BucketLoader(AdapterCheck):
    """Mixin for each of vLLM's workers, through `worker_extension_cls`."""

    rank: int
    reload_weights: Any

    def load_buckets(self, folder: str, buckets: Sequence[dict[str, Any]]) -> None:
        """Replaces the model's weights by those arriving in `folder`, layer by layer; the others stay.

        Args:
            folder: folder of the files; if it disappears, no more of them come.
            buckets: as returned by `described`.

        Raises:
            ValueError: a bucket is truncated or not finite; the model is then a mixture.
            RuntimeError: no more buckets came.
        """
        self.reload_weights(weights_iterator=_stream(Path(folder), buckets, self.rank), is_checkpoint_format=True)


def described(buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    """Returns descriptions of `buckets` for another process, without references to their bytes."""
    return [{"sha256": bucket.sha256, "tensors": [asdict(tensor) for tensor in bucket.tensors]} for bucket in buckets]


def _stream(folder: Path, buckets: Sequence[dict[str, Any]], rank: int) -> Iterator[tuple[str, Tensor]]:
    for number, bucket in enumerate(buckets):
        file = folder / str(number)
        # buckets are written one at a time, so that at most two are in the folder
        while not file.exists():
            # the folder disappears with the writer, which may have had no time to signal it
            if (folder / FAILED).exists() or not folder.exists():
                raise RuntimeError(f"bucket {number} of {len(buckets)} of the weights does not come")
            time.sleep(_POLL_S)
        tensors = tuple(TensorPlace(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in bucket["tensors"])
        content: Any = np.memmap(file, np.uint8, "r")
        for name, value in read_bucket(Bucket(tensors=tensors, sha256=bucket["sha256"], where=None), content):
            # heads stay with the trainer
            if name.startswith(MODEL):
                yield name.removeprefix(MODEL), value
        del content
        # the writer may delete it once every worker has confirmed it
        file.with_name(f"{number}.read-{rank}").touch()
