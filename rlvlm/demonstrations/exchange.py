"""Demonstrations as chats, in the formats that LLaVA and Qwen's trainers read, or as one Parquet table; and chats as
demonstrations.
"""

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
from rlvlm.demonstrations.card import FilterConfig, select
from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import EpisodeRecord, StepRecord
from rlvlm.envs.replies import read_reply
from rlvlm.labels.export import write_parquet
from rlvlm.labels.images import MAX_PIXELS, image_digest
from rlvlm.vlms.stills import read_rgb

ChatFormat = Literal["llava", "qwen"]
_IMAGE = "<image>"
Said = tuple[str, list[str], str]
"""The user's words, the files of the images shown with them, and the answer."""


def export_chats(
    folder: DemonstrationFolder, file: Path, form: ChatFormat, config: FilterConfig
) -> tuple[int, Counter[str]]:
    """Writes one chat per step that passes the filter; says how many those are, and why the others were left out.

    Images are named relative to the file's own folder. A LLaVA file is one JSON array, a Qwen file has a chat per line.

    Raises:
        UsageError: the folder keeps no images, or holds no turns.
        OSError: the disk refused.
    """
    if folder.kind != "turns":
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
    """Adds the chats of a file, one episode each; says how many were added and why others were not.

    They hold no snapshots, rewards or successes: those are 0. Several questions and answers make several steps; a
    system message is put before the first question.

    Args:
        file: a JSON array, or one JSON object per line; of LLaVA, Qwen, OpenAI, LLaMA-Factory or ms-swift,
            recognised by its keys. Untrusted. A chat whose images cannot all be shown is left out.
        folder: of a task in turns; answers are read with the words of its actions.
        player: name of the player that gave the answers.
        images: what image files are named relative to, and must lie in; by default the file's own folder.

    Raises:
        UsageError: the file is not of this kind, or empty.
    """
    counts: Counter[str] = Counter()
    root = (images or file.parent).resolve()
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
        # two files may have one name, and a file may be written anew: the id says which chat it is, too
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
    """One question and its answer, as the trainers of LLaVA or of Qwen read them."""
    if form == "llava":
        shown = _IMAGE * len(images) + "\n" + step.prompt
        said = [{"from": "human", "value": shown}, {"from": "gpt", "value": step.text}]
        return {"id": name, "image": images[0] if len(images) == 1 else images, "conversations": said}
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": step.prompt}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": step.text}]}
    return {"id": name, "messages": [{"role": "user", "content": parts}, answer]}


def _chats(file: Path) -> Iterator[Any]:
    """The chats of a JSON array, or of lines of JSON.

    Raises:
        UsageError: the file is neither, or cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
        lines = filter(str.strip, text.split("\n"))  # splitlines would also cut at U+2028 within a string
        yield from json.loads(text) if text.lstrip()[:1] == "[" else map(json.loads, lines)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read as chats: {error}", "a JSON array, or one object per line") from error


class _OtherImages(ValueError):  # noqa: N818 - named for what is found
    """A chat that does not say where its images are shown."""


def _said(chat: dict[str, Any]) -> list[Said]:
    """Questions and answers of a chat of any form; what is no such chat raises one of several errors.

    Images stand in the parts of a message (Qwen, OpenAI), or in a list beside the messages (LLaVA, LLaMA-Factory,
    ms-swift), one for each `<image>` in the words or part without a file; without any such mark the first question
    shows them all.

    Raises:
        _OtherImages: there are more or fewer images than marks, or one is shown outside of a question.
    """
    roles: dict[str, str] = {"human": "user", "gpt": "assistant"}
    # `from` and `value` in the line of LLaVA and ShareGPT, `role` and `content` in that of OpenAI
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
    if files or not has_own:  # else `<image>` is a word like others
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
    return [(system + said[0][0], *said[0][1:]), *said[1:]]  # envs know no system message


def _parts(content: str | list[dict[str, Any]]) -> tuple[str, list[str | None]]:
    """Text and image files of a message; None for an image whose file stands elsewhere.

    Raises:
        ValueError: a part is of another kind, e.g. a video.
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
    """A text without its marks, and an image whose file stands elsewhere for each of them."""
    if _IMAGE not in text:
        return text, shown
    return re.sub(rf"\s*{_IMAGE}\s*", " ", text).strip(), [*shown, *[None] * text.count(_IMAGE)]


def _file_of(entry: str | dict[str, Any]) -> str:
    """The file, or data URI, that an entry names: itself, or its `url` or `path`.

    Raises:
        KeyError: it names none.
    """
    name = entry if isinstance(entry, str) else entry["url" if "url" in entry else "path"]
    return name.removeprefix("file://")


def _load(root: Path, name: str) -> NDArray[np.uint8]:
    """The image [H, W, 3] in the file `name`, or in a `data:` URI; no address is followed.

    Raises:
        OSError: it is missing, lies outside `root`, or is no image of sensible size.
    """
    formats = ("PNG", "JPEG", "WEBP")
    if name.startswith("data:image/"):
        return read_rgb(BytesIO(base64.b64decode(name.partition(",")[2])), formats, MAX_PIXELS)
    path = (root / name).resolve()  # symbolic links and `..` too: a chat may not read what lies elsewhere
    if not path.is_relative_to(root) or not path.is_file():
        raise OSError(f"{name!r} is no file below {root}")
    return read_rgb(path, formats, MAX_PIXELS)


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
"""Images are named by digest, as in the folder. `action` is null where the reply could not be read."""


def export_parquet(folder: DemonstrationFolder, file: Path) -> int:
    """Writes every step of every episode and returns how many; an episode in chunks is one row. Whole or not at all.

    Raises:
        OSError: the disk refused.
    """

    def rows() -> Iterator[dict[str, Any]]:
        for record in folder.episodes():
            episode = {name: getattr(record, name) for name in ("task", "seed", "player", "goal", "env_return")}
            episode |= {"episode": record.id, "episode_success": record.success}
            # columns that are none of the schema's are left out
            steps = [episode | {"step": place, **asdict(step)} for place, step in enumerate(record.steps)]
            yield from steps or [episode]

    return write_parquet(file, SCHEMA, rows())
