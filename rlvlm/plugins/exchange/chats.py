"""Demonstrations exported as chats for LLaVA's and Qwen's trainers, or as a Parquet table, and imported from chats."""

import base64
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.disk import replacing
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import open_inside, parse_json, read_text
from rlvlm.demonstrations.card import FilterConfig, select
from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import EpisodeRecord, StepRecord
from rlvlm.envs.replies import read_reply
from rlvlm.labels.export import write_parquet
from rlvlm.labels.images import MAX_PIXELS, image_digest
from rlvlm.vlms.stills import read_rgb

ChatFormat = Literal["llava", "qwen"]
_IMAGE = "<image>"
_MAX_BYTES = 2**31  # limit for a file of chats, which may hold their images
Said = tuple[str, list[str], str]
"""User message, files of its images, and the answer."""


def export_chats(
    folder: DemonstrationFolder, file: Path, form: ChatFormat, config: FilterConfig
) -> tuple[int, Counter[str]]:
    """Writes one chat per step that passes the filter; returns their number, and the others by reason.

    Images are named relative to the file's own folder. A LLaVA file is one JSON array, a Qwen file has a chat per line.

    Raises:
        UsageError: the folder stores no images, or contains no turns.
        OSError: writing failed.
    """
    if folder.has_chunks:
        what = f"{folder.path} holds {folder.kind} of {folder.task}, and chats are of turns"
        raise UsageError(what, "write a table with --form parquet")
    count, reasons = 0, Counter[str]()
    with replacing(file) as partial, open(partial, "w") as stream:
        for record in folder.episodes():
            kept, left_out = select([record], config)
            reasons += left_out
            for place in (place for _, places in kept for place in places):
                if not record.steps or not record.steps[place].pictures:
                    raise UsageError(
                        f"{folder.path} keeps no images of its turns, and chats need them", "collect with --pictures"
                    )
                step = record.steps[place]
                images = [os.path.relpath(folder.image_store.file(digest), file.parent) for digest in step.pictures]
                chat = json.dumps(_chat(form, f"{record.id}-{place}", images, step), ensure_ascii=False)
                opening = ("[\n" if not count else ",\n") if form == "llava" else ""
                stream.write(opening + chat + ("" if form == "llava" else "\n"))
                count += 1
        if form == "llava":
            stream.write("\n]\n" if count else "[]\n")
    return count, reasons


def import_chats(file: Path, folder: DemonstrationFolder, player: str, images: Path | None = None) -> Counter[str]:
    """Adds the chats of a file as one episode each; returns counts of those added and, by reason, of those left out.

    Chats have no snapshots, rewards or successes: these are 0. Several questions and answers become several steps; a
    system message is prepended to the first question.

    Args:
        file: a JSON array, or one JSON object per line; of LLaVA, Qwen, OpenAI, LLaMA-Factory or ms-swift, recognised
            by its keys. Untrusted. A chat with an image that cannot be shown is left out.
        folder: folder of a task in turns; answers are read with the words of its actions.
        player: name stored as the player of the answers.
        images: folder that image files are relative to and must lie in; by default the file's own folder.

    Raises:
        UsageError: the file has none of these formats, or is empty.
    """
    counts: Counter[str] = Counter()
    root = (images or file.parent).absolute()  # a chat may name its images in full
    known = {record.id for record in folder.episodes()}
    for number, chat in enumerate(_chats(file)):
        try:
            said = _said(chat)
            loaded = [[_load(root, name) for name in names] for _, names, _ in said]
        except _OtherImages:
            counts["chat with more or fewer images than places for them"] += 1
            continue
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration):
            counts["chat without pairs of question and answer, or of another form"] += 1
            continue
        except (OSError, SyntaxError, Image.DecompressionBombError):
            counts["image missing or unreadable"] += 1
            continue
        # two files may share a name, and a file may be rewritten: the id identifies the chat as well
        digest = hashlib.sha256(json.dumps(chat, sort_keys=True).encode()).hexdigest()[:12]
        name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{file.stem[:60]}-{number}-{digest}")
        if name in known:
            counts["there already"] += 1
            continue
        steps = []
        for (prompt, _, answer), shown in zip(said, loaded, strict=True):
            action = read_reply(answer, folder.action_names, range(len(folder.action_names))).action
            steps.append(
                StepRecord(
                    prompt=prompt,
                    text=answer,
                    action=None if action is None else folder.action_names[action],
                    env_reward=0.0,
                    success=False,
                    progress=0.0,
                    pictures=tuple(image_digest(image) for image in shown),
                )
            )
        record = EpisodeRecord(
            id=name,
            task=folder.task,
            kind=folder.kind,
            seed=number,
            player=player,
            goal="",
            env_return=0.0,
            success=False,
            terminated=False,
            steps=tuple(steps),
        )
        folder.add(record, sum(loaded, []))
        counts["added"] += 1
    if not counts:
        raise UsageError(f"{file} holds no chats", "name a JSON array of chats, or a file with one chat per line")
    return counts


def _chat(form: ChatFormat, name: str, images: list[str], step: StepRecord) -> dict[str, Any]:
    """Returns one question and its answer in the format of LLaVA's or Qwen's trainers."""
    if form == "llava":
        shown = _IMAGE * len(images) + "\n" + step.prompt
        said = [{"from": "human", "value": shown}, {"from": "gpt", "value": step.text}]
        return {"id": name, "image": images[0] if len(images) == 1 else images, "conversations": said}
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": step.prompt}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": step.text}]}
    return {"id": name, "messages": [{"role": "user", "content": parts}, answer]}


def _chats(file: Path) -> Iterator[Any]:
    """Yields the chats of a JSON array, or of lines of JSON.

    Raises:
        UsageError: the file is neither, or cannot be read.
    """
    try:
        text = read_text(file, _MAX_BYTES)
        lines = filter(str.strip, text.split("\n"))  # splitlines would also split at U+2028 within a string
        yield from parse_json(text) if text.lstrip()[:1] == "[" else map(parse_json, lines)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read as chats: {error}", "a JSON array, or one object per line") from error


class _OtherImages(ValueError):  # noqa: N818 - named for what is found
    """A chat whose images cannot be matched to its questions."""


def _said(chat: dict[str, Any]) -> list[Said]:
    """Returns questions and answers of a chat of any form; for other content it raises one of several errors.

    Images are in the parts of a message (Qwen, OpenAI), or in a list beside the messages (LLaVA, LLaMA-Factory,
    ms-swift), one for each `<image>` mark in the text or part without a file; without any such mark the first question
    shows them all.

    Raises:
        _OtherImages: the numbers of images and marks differ, or an image is shown outside of a question.
    """
    roles: dict[str, str] = {"human": "user", "gpt": "assistant"}
    # `from` and `value` in the style of LLaVA and ShareGPT, `role` and `content` in that of OpenAI
    messages = chat["messages"] if "messages" in chat else chat["conversations"]
    turns: list[tuple[str, str, list[str | None]]] = []
    for message in messages:
        role = str(message["role"] if "role" in message else message["from"])
        text, shown = _parts(message["content"] if "content" in message else message["value"])
        turns.append((roles.get(role, role), text, shown))
    given = [chat.get(key) or [] for key in ("image", "images")]
    files = [_file_of(entry) for value in given for entry in (value if isinstance(value, list) else [value])]
    if chat.get("videos") or chat.get("audios"):
        raise _OtherImages
    has_own = any(shown for _, _, shown in turns)
    if files or not has_own:  # otherwise `<image>` is ordinary text
        turns = [
            (role, *((text, shown) if role == "assistant" else _marked(text, shown))) for role, text, shown in turns
        ]
    if files and not any(shown for _, _, shown in turns):
        first = next(place for place, (role, _, _) in enumerate(turns) if role == "user")
        turns[first][2].extend([None] * len(files))
    rest = iter(files)
    filled = [(role, text, [name or next(rest, None) for name in shown]) for role, text, shown in turns]
    outside = any(shown for role, _, shown in filled if role != "user")
    if outside or next(rest, None) or any(None in shown for _, _, shown in filled):
        raise _OtherImages
    asked = [turn for turn in filled if turn[0] != "system"]
    if not asked or [role for role, _, _ in asked] != ["user", "assistant"] * (len(asked) // 2):
        raise ValueError("questions and answers must alternate")
    said = [(ask[1], list(filter(None, ask[2])), reply[1]) for ask, reply in zip(asked[::2], asked[1::2], strict=True)]
    system = "".join(f"{text}\n\n" for role, text, _ in filled if role == "system")
    return [(system + said[0][0], *said[0][1:]), *said[1:]]  # envs have no system message


def _parts(content: str | list[dict[str, Any]]) -> tuple[str, list[str | None]]:
    """Returns text and image files of a message; None for an image whose file is listed elsewhere.

    Raises:
        ValueError: a part has another type, e.g. a video.
    """
    if isinstance(content, str):
        return content, []
    texts, shown = [], []
    for part in content:
        if part["type"] == "text":
            texts.append(part["text"])
        elif part["type"] in ("image", "image_url"):
            named = (part.get(key) for key in ("image", "image_url", "url", "path"))
            shown.append(next((_file_of(reference) for reference in named if reference), None))
        else:
            raise ValueError(f"a part is of type {part['type']}")
    return "\n".join(texts), shown


def _marked(text: str, shown: list[str | None]) -> tuple[str, list[str | None]]:
    """Returns a text without its marks, and for each of them an image whose file is listed elsewhere."""
    if _IMAGE not in text:
        return text, shown
    return re.sub(rf"\s*{_IMAGE}\s*", " ", text).strip(), [*shown, *[None] * text.count(_IMAGE)]


def _file_of(entry: str | dict[str, Any]) -> str:
    """Returns the file, or data URI, of an entry: itself, or its `url` or `path`.

    Raises:
        KeyError: the entry has none.
    """
    name = entry if isinstance(entry, str) else entry["url" if "url" in entry else "path"]
    return name.removeprefix("file://")


def _load(root: Path, name: str) -> NDArray[np.uint8]:
    """Returns the image [H, W, 3] in the file `name`, or in a `data:` URI; URLs are not fetched.

    Raises:
        OSError: the file is missing, lies outside of `root`, or is not an image of sensible size.
    """
    formats = ("PNG", "JPEG", "WEBP")
    if name.startswith("data:image/"):
        return read_rgb(BytesIO(base64.b64decode(name.partition(",")[2])), formats, MAX_PIXELS)
    with open_inside(root, root / name) as stream:  # a chat may not read files elsewhere
        return read_rgb(stream, formats, MAX_PIXELS)


SCHEMA = pa.schema(
    [
        ("episode", pa.string()),
        ("task", pa.string()),
        ("seed", pa.int64()),
        ("player", pa.string()),
        ("goal", pa.string()),
        ("step", pa.int32()),
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("action", pa.string()),
        ("is_noise", pa.bool_()),
        ("env_reward", pa.float64()),
        ("success", pa.bool_()),
        ("progress", pa.float64()),
        ("quality", pa.float64()),
        ("pictures", pa.list_(pa.string())),
        ("env_return", pa.float64()),
        ("episode_success", pa.bool_()),
    ]
)
"""Columns of the Parquet table. Images are named by digest, as in the folder; `action` is null for an unreadable
reply."""


def export_parquet(folder: DemonstrationFolder, file: Path) -> int:
    """Writes every step of every episode, atomically, and returns their number; an episode in chunks is one row.

    Raises:
        OSError: writing failed.
    """

    def rows() -> Iterator[dict[str, Any]]:
        for record in folder.episodes():
            episode = {name: getattr(record, name) for name in ("task", "seed", "player", "goal", "env_return")}
            episode |= {"episode": record.id, "episode_success": record.success}
            # columns outside the schema are left out
            steps = [episode | {"step": place, **asdict(step)} for place, step in enumerate(record.steps)]
            yield from steps or [episode]

    return write_parquet(file, SCHEMA, rows())
