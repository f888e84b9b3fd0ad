"""Small real files of recorded data of each form: LeRobot's, LIBERO's, TensorFlow's records and films."""

import io
import json
import struct
from collections.abc import Collection
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from rlvlm.core.steps import FloatArray, Frames

GREEN, RED = "push the green block onto the pad", "push the red block onto the pad"
PX = 16
Recorded = tuple[FloatArray, FloatArray, Frames]
"""Actions [T, 7] in LIBERO's units, states [T, 8] and images [T, 2, PX, PX, 3]."""
NAMES, FPS = ("observation.images.wrist_image", "observation.images.image"), 20


def trajectory(num: int, seed: int = 0) -> Recorded:
    """Images tell the step, the camera and the trajectory, in one corner."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-0.9, 0.9, (num, 7)).astype(np.float32)
    actions[:, 6] = np.where(np.arange(num) < num // 2, -1.0, 1.0)
    images = np.zeros((num, 2, PX, PX, 3), np.uint8)
    for step in range(num):
        for camera in range(2):
            images[step, camera, : PX // 2, : PX // 2] = (40 + 10 * step, 90 * camera, 10 * seed)
    return actions, rng.normal(size=(num, 8)).astype(np.float32), images


def write_libero(file: Path, instruction: str, demos: list[Recorded], is_own: bool) -> None:
    """As LIBERO's own script writes it, which looks after each action, or as OpenVLA's. Images are upside down."""
    with h5py.File(file, "w") as target:
        data = target.create_group("data")
        if is_own:
            data.attrs["problem_info"] = json.dumps({"language_instruction": list(instruction)})
            data.attrs["num_demos"] = len(demos)
        for number, (actions, states, images) in enumerate(demos):
            demo = data.create_group(f"demo_{number}")
            raw = images[:, :, ::-1, ::-1]
            if is_own:
                states, raw = np.roll(states, -1, axis=0), np.roll(raw, -1, axis=0)
            demo["actions"], demo["rewards"] = actions.astype(np.float64), np.eye(len(actions), dtype=np.uint8)[-1]
            demo["obs/ee_states"], demo["obs/gripper_states"] = states[:, :6], states[:, 6:]
            demo["obs/agentview_rgb"], demo["obs/eye_in_hand_rgb"] = raw[:, 0], raw[:, 1]


def tfrecord(*records: bytes) -> bytes:
    framed = b""
    for record in records:
        head = struct.pack("<Q", len(record))
        framed += head + struct.pack("<I", masked_crc32c(head)) + record + b"\0\0\0\0"
    return framed


def example(actions: FloatArray, states: FloatArray, images: Frames, instruction: str, kind: str = "png") -> bytes:
    from rlvlm.plugins.exchange.rlds import _example_class

    made = _example_class()()
    features = made.features.feature
    features["steps/action"].float_list.value.extend(actions.ravel().tolist())
    features["steps/observation/state"].float_list.value.extend(states.ravel().tolist())
    features["steps/reward"].float_list.value.extend([0.0] * (len(actions) - 1) + [1.0])
    features["steps/language_instruction"].bytes_list.value.extend([instruction.encode()] * len(actions))
    for camera, name in enumerate(("image", "wrist_image")):
        features[f"steps/observation/{name}"].bytes_list.value.extend(png(image, kind) for image in images[:, camera])
    return made.SerializeToString()


def png(image: np.ndarray, kind: str = "png") -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(data, kind, quality=95)
    return data.getvalue()


def write_lerobot(root: Path, version: str, shown: list[Recorded], kind: str, lost: Collection[int] = ()) -> None:
    """A data set of version 2.1 or 3.0, with images in Parquet or in films; an episode is RED, the others GREEN. All
    but those `lost` are successes.
    """
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    tables = [table_of(number, one, kind, won=number not in lost) for number, one in enumerate(shown)]
    rows = np.split(np.arange(sum(map(len, tables))), np.cumsum([len(table) for table in tables])[:-1])
    tables = [table.append_column("index", [one]) for table, one in zip(tables, rows, strict=True)]
    episodes: list[dict[str, Any]] = [
        {"episode_index": number, "tasks": [RED if number == 1 else GREEN], "length": len(one[0])}
        for number, one in enumerate(shown)
    ]
    films = [[one[2] for one in shown], [np.concatenate([one[2] for one in shown])]][version == "v3.0"]
    if version == "v3.0":
        data_path = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        video_path = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        begins = np.cumsum([0, *(len(one[0]) for one in shown)]) / FPS
        for episode, begin in zip(episodes, begins.tolist(), strict=False):
            episode |= {"data/chunk_index": 0, "data/file_index": 0, "stats/action/mean": 0.0}
            place = {"chunk_index": 0, "file_index": 0, "from_timestamp": begin}
            episode |= {f"videos/{name}/{key}": value for name in NAMES for key, value in place.items()}
        pq.write_table(pa.Table.from_pylist(episodes), root / "meta/episodes/chunk-000/file-000.parquet")
        tables = [pa.concat_tables(tables)]
    else:
        data_path = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
        video_path = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        (root / "meta/episodes.jsonl").write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
    for number, table in enumerate(tables):
        place = {"episode_chunk": 0, "episode_index": number, "chunk_index": 0, "file_index": number}
        pq.write_table(table, root / data_path.format(**place))
        for camera, name in zip((1, 0), NAMES, strict=True):
            if kind == "video":
                write_film(root / video_path.format(video_key=name, **place), films[number][:, camera])
    features = {name: {"dtype": kind, "shape": [PX, PX, 3]} for name in NAMES}
    features |= {"action": {"dtype": "float32", "shape": [7]}, "observation.state": {"dtype": "float32", "shape": [8]}}
    info = {"codebase_version": version, "fps": FPS, "chunks_size": 1000, "features": features}
    info |= {"data_path": data_path, "video_path": video_path if kind == "video" else None}
    (root / "meta/info.json").write_text(json.dumps(info))


def table_of(number: int, recorded: Recorded, kind: str, won: bool = True) -> pa.Table:
    actions, states, images = recorded
    is_last = (np.arange(len(actions)) == len(actions) - 1) & won
    columns: dict[str, Any] = {"action": actions.tolist(), "observation.state": states.tolist()}
    columns["next.success"] = is_last
    # in LeRobot's own shape, [T, 1]: a person takes over in the second half of the third episode
    columns["intervention"] = [[number == 2 and step >= len(actions) / 2] for step in range(len(actions))]
    columns |= {"episode_index": [number] * len(actions), "frame_index": list(range(len(actions)))}
    if kind == "image":
        for camera, name in zip((1, 0), NAMES, strict=True):
            columns[name] = [{"bytes": png(image), "path": None} for image in images[:, camera]]
    return pa.table(columns)


def write_film(file: Path, frames: Frames, fps: int = FPS, begin_s: float = 0.0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "0", "g": "2"})
        stream.width, stream.height, stream.pix_fmt = PX, PX, "yuv444p"
        stream.codec_context.time_base = Fraction(1, fps * 100)
        for number, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            # finer than a frame, so that films may begin between two
            frame.pts, frame.time_base = number * 100 + round(begin_s * fps * 100), Fraction(1, fps * 100)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
