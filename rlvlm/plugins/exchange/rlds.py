"""RLDS data sets as TensorFlow Datasets writes them, such as `modified_libero_rlds`, read without TensorFlow.

A `.tfrecord` file is a sequence of records: length (8 bytes), its checksum (4), the record, its checksum (4). A record
is one episode as a `tf.train.Example`: features by name; those of its steps are concatenated.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import open_inside
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.plugins.exchange.cutting import CutConfig
from rlvlm.plugins.exchange.encoded import decoded, is_depth

_OBSERVED = "steps/observation/"


def read_rlds(source: Path, config: CutConfig) -> Iterator[RobotTrajectory | CorruptEpisode]:
    """Yields the episodes of a `.tfrecord` file, or of all such files of a folder.

    Raises:
        UsageError: there is no file.
    """
    from google.protobuf.message import DecodeError  # of the train extra, as is TensorBoard, which checks the records

    root = source if source.is_dir() else source.parent
    files = sorted(source.rglob("*.tfrecord*")) if source.is_dir() else [source]
    if not files:
        raise UsageError(f"{source} has no .tfrecord file", "name a version's folder, e.g. libero_10_no_noops/1.0.0")
    for path in files:
        try:
            for number, record in enumerate(_records(root, path)):
                yield _trajectory(path, number, record, config)
        except (OSError, KeyError, ValueError, IndexError, DecodeError) as error:
            yield CorruptEpisode(file=path, reason=f"torn, or without episodes of a robot: {error}")


def _records(root: Path, path: Path) -> Iterator[bytes]:
    """Yields the records of a file.

    Raises:
        ValueError: it is not such a file, or truncated.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c  # takes 0.2 s

    with open_inside(root, path) as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            head = file.read(12)
            length, checksum = struct.unpack("<QI", head) if len(head) == 12 else (left, 0)
            # the length is verified before reading: a corrupt file may claim any size. Records are not: a checksum over
            # megabytes is slow in Python, and a corrupt record does not parse
            if length > left - 16 or masked_crc32c(head[:8]) != checksum:
                raise ValueError(f"no whole record {left} bytes before its end")
            yield file.read(length)
            file.seek(4, 1)
            left -= length + 16


def _trajectory(path: Path, number: int, record: bytes, config: CutConfig) -> RobotTrajectory:
    example = _example_class()()
    example.ParseFromString(record)
    features: Mapping[str, Any] = example.features.feature
    instruction = features["steps/language_instruction"].bytes_list.value[0].decode()
    num = len(features["steps/language_instruction"].bytes_list.value)

    def numbers(name: str) -> NDArray[np.float32]:
        if name not in features:  # access would create it in protobuf's map
            raise KeyError(f"{name}; there are {', '.join(sorted(features))}")
        return np.array(features[name].float_list.value, np.float32).reshape(num, -1)

    named = [f"{_OBSERVED}{camera}" for camera in config.cameras] or _cameras(features)
    if missing := [name for name in named if name not in features]:
        raise KeyError(f"{', '.join(missing)}; images are {', '.join(_cameras(features))}")
    shelves = [list(features[name].bytes_list.value) for name in named]
    if any(len(shelf) != num for shelf in shelves):
        raise ValueError(f"{num} steps have {', '.join(str(len(shelf)) for shelf in shelves)} images")
    actions, proprio = numbers("steps/action"), numbers(f"{_OBSERVED}state")
    # an episode with rewards is a success if any is above 0
    rewards = list(features["steps/reward"].float_list.value) if "steps/reward" in features else []
    return RobotTrajectory.recorded(
        actions,
        proprio,
        is_late=bool(config.late),
        name=f"{number}",
        file=path,
        instruction=instruction,
        look=partial(_look, shelves),
        success=max(rewards) > 0 if rewards else None,
    )


def _cameras(features: Mapping[str, Any]) -> list[str]:
    """Returns the names of the features that hold images, the wrist's last."""
    names = [
        name
        for name in features
        if name.startswith(_OBSERVED)
        and features[name].bytes_list.value
        and (first := features[name].bytes_list.value[0]).startswith((b"\xff\xd8", b"\x89PNG"))  # JPEG and PNG
        and not is_depth(first)
    ]
    return sorted(names, key=lambda name: ("wrist" in name or "hand" in name, name))


def _look(shelves: list[list[bytes]], steps: NDArray[np.intp]) -> Frames:
    return np.stack([np.stack([decoded(shelf[step]) for step in steps]) for shelf in shelves], axis=1)


@cache
def _example_class() -> Any:
    """Defines the message `tf.train.Example` here, because its file only comes with TensorFlow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="example", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, str], repeated: bool = False) -> Any:
        """Defines a message with fields of name, type and, for messages, the type's name; numbered from 1."""
        made = file.message_type.add(name=name)
        for number, (key, kind, of) in enumerate(fields, start=1):
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            made.field.add(name=key, number=number, type=kind, type_name=of or None, label=label)  # pyright: ignore[reportArgumentType]
        return made

    message("BytesList", ("value", field.TYPE_BYTES, ""), repeated=True)
    message("FloatList", ("value", field.TYPE_FLOAT, ""), repeated=True)
    message("Int64List", ("value", field.TYPE_INT64, ""), repeated=True)
    kinds = ("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")
    message("Feature", *((key, field.TYPE_MESSAGE, f".example.{of}") for key, of in kinds))
    entry = ".example.Features.FeatureEntry"
    features = message("Features", ("feature", field.TYPE_MESSAGE, entry), repeated=True)
    pair = features.nested_type.add(name="FeatureEntry")
    pair.options.map_entry = True
    pair.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    pair.field.add(
        name="value", number=2, type=field.TYPE_MESSAGE, type_name=".example.Feature", label=field.LABEL_OPTIONAL
    )
    message("Example", ("features", field.TYPE_MESSAGE, ".example.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("example.Example"))
