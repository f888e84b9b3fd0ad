"""Demonstrations as chats and tables: what goes out comes back, and chats of others are read or left out."""

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tiny_run import box_words

from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.card import FilterConfig
from rlvlm.demonstrations.folder import create_folder, open_folder
from rlvlm.labels.images import image_digest
from rlvlm.plugins.exchange.chats import export_chats, export_parquet, import_chats
from tests.demonstrations.test_demonstrations import episode, folder_of, made


@pytest.mark.parametrize("form", ["llava", "qwen"])
def test_chats_go_out_and_come_back(tmp_path, form):
    folder = folder_of(tmp_path / "d", "blackjack", 4)
    file = tmp_path / "chats.json"
    count, reasons = export_chats(folder, file, form, FilterConfig())
    steps = [step for record in folder.episodes() for step in record.steps]
    assert count == len(steps) and not reasons
    back = create_folder(tmp_path / "back", "blackjack", "turns", folder.action_names)
    assert import_chats(file, back, "imported") == {"added": count}
    returned = [step for record in back.episodes() for step in record.steps]
    for one, other in zip(steps, returned, strict=True):
        for name in ("prompt", "text", "action", "pictures"):
            assert getattr(one, name) == getattr(other, name)
        assert np.array_equal(back.image_store.load(other.pictures[0]), folder.image_store.load(one.pictures[0]))


def test_chats_of_others_are_read_with_system_prompts_and_several_turns(tmp_path):
    folder = folder_of(tmp_path / "d", "number_line", 1)
    image = next((tmp_path / "d" / "pictures").rglob("*.png")).relative_to(tmp_path).as_posix()
    user = {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "now?"}]}
    system, reply = {"role": "system", "content": "Play."}, {"role": "assistant", "content": '{"action": "+"}'}
    good = {"messages": [system, user, reply]}
    turns = [{"from": "human", "value": "<image>\na"}, {"from": "gpt", "value": "b"}]
    two = {"image": [image, image], "conversations": turns * 2}
    outside, missing = ({"image": place, "conversations": turns} for place in ("../../etc/hostname", "no.png"))
    odd = [{}, [], 3, {"messages": [user]}, {"conversations": [{"from": "x", "value": ""}]}, {"messages": "text"}]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps(chat) for chat in [good, two, outside, missing, *odd]))
    back = create_folder(tmp_path / "back", "number_line", "turns", folder.action_names)
    counts = import_chats(file, back, "someone")
    assert (counts["added"], counts["image missing or unreadable"]) == (2, 2) and counts.total() == 4 + len(odd)
    one, other = back.episodes()
    assert one.steps[0].prompt == "Play.\n\nnow?" and one.steps[0].action == "+"
    assert [step.prompt for step in other.steps] == ["a", "a"] and other.steps[0].action is None
    export_chats(create_folder(tmp_path / "empty", "number_line", "turns", ("-", "+")), file, "llava", FilterConfig())
    assert json.loads(file.read_text()) == []
    file.write_text("no json")
    with pytest.raises(UsageError, match="cannot be read as chats"):
        import_chats(file, back, "someone")


def asked(content: Any, **beside: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]} | beside


def said(value: str, **beside: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": value}, {"from": "gpt", "value": "b"}], **beside}


NOW = {"type": "text", "text": "now?"}
LATER = {"messages": [*asked("<image>one")["messages"], *asked("<image>two")["messages"]]}


@pytest.mark.parametrize(
    ("chat", "shown"),
    [
        (asked("<image>now?", images=["a.png"]), ["a"]),  # LLaMA-Factory and ms-swift
        (asked("now?", images=["a.png", "b.png"]), ["ab"]),
        ({**LATER, "images": [{"path": "b.png", "bytes": None}, "a.png"]}, ["b", "a"]),
        ({**LATER, "images": ["a.png"]}, None),
        (asked([{"type": "image"}, NOW], images=["a.png"]), ["a"]),  # TRL
        (asked([{"type": "image_url", "image_url": {"url": "a.png"}}, NOW]), ["a"]),  # OpenAI
        (asked([{"type": "image_url", "image_url": {"url": "DATA"}}, NOW]), ["b"]),
        (asked([{"type": "image", "image": "a.png"}, {"type": "text", "text": "what is <image>?"}]), ["a"]),
        (asked([{"type": "image", "image": "a.png"}, NOW], images=["b.png"]), None),
        (asked([{"type": "video", "video": "a.mp4"}, NOW]), None),
        (asked("<video>now?", videos=["a.mp4"]), None),
        (asked("<image>now?"), None),
        (said("now?", image="a.png"), ["a"]),  # LLaVA
        (said("<image>now?", image=["a.png", "b.png"]), None),
        (said("<image><image>now?", images=["b.png", "a.png"]), ["ba"]),
        (asked("now?", messages=[{"role": "system", "content": "<image>"}, *LATER["messages"]], image="a.png"), None),
    ],
)  # fmt: skip
def test_a_chat_is_read_with_all_of_its_images_or_left_out(tmp_path, chat, shown):
    images = {name: np.full((8, 8, 3), 100 + place, np.uint8) for place, name in enumerate("ab")}
    for name, image in images.items():
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    names = {image_digest(image): name for name, image in images.items()}
    data = f"data:image/png;base64,{base64.b64encode((tmp_path / 'b.png').read_bytes()).decode()}"
    (tmp_path / "chats.json").write_text(json.dumps([chat]).replace("DATA", data))
    folder = create_folder(tmp_path / "d", "number_line", "turns", ("-", "+"))
    counts = import_chats(tmp_path / "chats.json", folder, "someone")
    assert (counts["added"], counts.total()) == (int(shown is not None), 1)
    read = [step for record in folder.episodes() for step in record.steps]
    assert ["".join(names[digest] for digest in step.pictures) for step in read] == (shown or [])


def test_a_second_file_of_one_name_is_added_and_the_same_file_again_is_not(tmp_path):
    names = made("number_line").action_names
    back = create_folder(tmp_path / "back", "number_line", "turns", names)
    for place, answer in enumerate("+-"):
        file = tmp_path / str(place) / "chats.json"
        file.parent.mkdir()
        said = [{"from": "human", "value": "now?"}, {"from": "gpt", "value": f'{{"action": "{answer}"}}'}]
        file.write_text(json.dumps([{"conversations": said}]))
        assert import_chats(file, back, "someone") == {"added": 1}
        assert import_chats(file, back, "someone") == {"there already": 1}
    assert [record.steps[0].action for record in back.episodes()] == ["+", "-"]


def test_chats_survive_any_text_of_a_model(tmp_path):
    folder = create_folder(tmp_path / "d", "number_line", "turns", ("-", "+"))
    chats = [
        {"messages": [{"role": "user", "content": f"a{mark}b"}, {"role": "assistant", "content": f"c{mark}d"}]}
        for mark in ("\u2028", "\u2029", "\u0085", "\n")
    ]
    marks = {"conversations": [{"from": "human", "value": "<image> <image>"}, {"from": "gpt", "value": "b"}]}
    lines = [json.dumps(chat, ensure_ascii=False) for chat in (*chats, marks)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    counts = import_chats(tmp_path / "chats.jsonl", folder, "me")
    assert counts["added"] == 4 and counts.total() == 5, "more marks than images is a chat of another form"


def test_the_table_has_a_row_per_step(tmp_path):
    folder = folder_of(tmp_path / "d", "doorkey_5x5", 2)
    count = export_parquet(folder, tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert count == len(table) == sum(len(record.steps) for record in folder.episodes())
    assert table[0]["action"] in folder.action_names and len(table[0]["pictures"]) == 1 and table[-1]["success"]


def test_an_episode_in_chunks_is_one_row(tmp_path):
    arrays = {"actions": np.ones((3, 4, 7), np.float32), "proprio": np.zeros((3, 8), np.float32)}
    record = replace(episode(kind="chunks", task="push_block", goal="push the red block"), arrays=arrays)
    create_folder(tmp_path / "d", "push_block", "chunks").add(record)
    assert export_parquet(open_folder(tmp_path / "d"), tmp_path / "t.parquet") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("data exprot", "data export --help"),
        ("data export chunks --out x.json", "write a table with --form parquet"),
        ("data import letters/a.txt --task drawer_open --out d", "is not an env in turns"),
        ("data import letters/a.txt --task number_line --out d --cut.image-px 9", "--success are for trajectories"),
        ("data import letters --task number_line --out d", "name a JSON array of chats"),
        ("data import nowhere --task push_block --form libero --out d", "name a file or a data set"),
    ],
)
def test_a_mistake_is_reported_with_its_fix(line, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").touch()
    create_folder(tmp_path / "chunks", "push_block", "chunks")
    assert main(line.split()) == 2
    assert said in box_words(capsys.readouterr().err) and not (tmp_path / "d").exists()
