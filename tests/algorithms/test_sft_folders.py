from dataclasses import replace

import pytest

from rlvlm.algorithms.sft_folders import (
    check_sft_manifest,
    load_demonstrations,
    read_sft_manifest,
    sft_manifest_of,
    write_sft_manifest,
)
from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.envs.minigrid.config import MiniGridConfig
from rlvlm.envs.registry import make_env, task_env
from rlvlm.envs.slots import EnvSlot
from rlvlm.policies.vlm.config import PolicyConfig


def test_the_manifest_of_a_supervised_policy_is_compared_by_hand(tmp_path):
    taught = sft_manifest_of("a", MiniGridConfig(prompt_last_action=True), PolicyConfig(), ("left", "right"))
    assert read_sft_manifest(tmp_path) is None
    check_sft_manifest(tmp_path, taught, pytest.fail)
    write_sft_manifest(tmp_path, taught)
    assert read_sft_manifest(tmp_path) == taught and not taught.lacks(taught) + taught.differs(taught)
    lines: list[str] = []
    check_sft_manifest(
        tmp_path, sft_manifest_of("b", MiniGridConfig(split="training"), PolicyConfig(), ("left",)), lines.append
    )
    assert [line.partition("something else: ")[2] for line in lines] == [
        "its task was a, not b", "env.split was all, not training", "env.prompt_last_action was True, not False",
    ]  # fmt: skip
    wanted = sft_manifest_of("a", MiniGridConfig(), PolicyConfig(head="actions", new_words=("x",)), ("left", "up"))
    with pytest.raises(UsageError, match="actions are not 'up'; policy.head was text, not actions; policy.new"):
        check_sft_manifest(tmp_path, wanted, pytest.fail)
    (tmp_path / "sft.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot read"):
        check_sft_manifest(tmp_path, taught, pytest.fail)


def test_a_collection_comes_back_as_it_was_played(tmp_path):
    assert main(["collect", "number_line", "--episodes", "3", "--out", str(tmp_path / "d")]) == 0
    slot = EnvSlot(make_env("number_line", task_env("number_line"), 0), "number_line")
    episodes = load_demonstrations(tmp_path / "d", slot.env, task_env("number_line"))
    assert len(episodes) == 3
    slot.begin(episodes[0].seed)
    for reply in episodes[0].replies:
        assert slot.env.expert_action() == reply.action
        slot.play(reply.text)


@pytest.mark.slow
def test_held_out_starts_are_never_learned_from(tmp_path):
    folder = tmp_path / "d"
    assert main(["collect", "points24", "--episodes", "40", "--out", str(folder), "--env.split", "all"]) == 0
    sides = {}
    for split in ("all", "training", "held_out"):
        env = replace(task_env("points24"), split=split)
        episodes = load_demonstrations(folder, make_env("points24", env, 0), env)
        sides[split] = [episode.seed for episode in episodes]
    assert len(sides["all"]) == 40 and sorted(sides["training"] + sides["held_out"]) == sides["all"]
    assert sides["training"] and sides["held_out"]
    only = tmp_path / "only"
    assert main(["collect", "points24", "--episodes", "2", "--out", str(only), "--env.split", "held_out"]) == 0
    env = replace(task_env("points24"), split="training")
    with pytest.raises(UsageError, match="none on the side 'training'"):
        load_demonstrations(only, make_env("points24", env, 0), env)


def test_demonstrations_of_an_env_set_up_otherwise_are_not_learned_from(tmp_path):
    folder = str(tmp_path / "d")
    assert main(["collect", "points24", "--episodes", "2", "--out", folder, "--env.rules", "legacy"]) == 0
    strict = task_env("points24")
    with pytest.raises(UsageError, match="collected with env.rules legacy, not strict") as refused:
        load_demonstrations(tmp_path / "d", make_env("points24", strict, 0), strict)
    assert "rlvlm collect points24" in refused.value.fix
    legacy = replace(strict, rules="legacy", deals="solvable", episode_steps=3)  # the same play, of fewer hands
    assert len(load_demonstrations(tmp_path / "d", make_env("points24", legacy, 0), legacy)) == 2
    (about := tmp_path / "d" / "demonstrations.json").write_text(about.read_text().replace('"rules"', '"older"'))
    assert len(load_demonstrations(tmp_path / "d", make_env("points24", strict, 0), strict)) == 2, "nobody told"


def test_imported_chats_say_why_nothing_can_be_learned_from_them(tmp_path, capsys):
    played, chats, imported = tmp_path / "d", tmp_path / "chats.json", tmp_path / "i"
    assert main(["collect", "number_line", "--episodes", "1", "--out", str(played)]) == 0
    assert main(["data", "export", str(played), "--form", "llava", "--out", str(chats)]) == 0, capsys.readouterr().err
    assert main(["data", "import", str(chats), "--task", "number_line", "--out", str(imported)]) == 0
    with pytest.raises(UsageError, match="keeps no snapshots"):
        load_demonstrations(imported, make_env("number_line", task_env("number_line"), 0), task_env("number_line"))
    assert main(["sft", "number_line", "--from", str(imported), "--out", str(tmp_path / "sft")]) == 2
    assert not (tmp_path / "sft").exists()


def test_demonstrations_of_another_env_are_not_learned_from(tmp_path):
    folder = tmp_path / "demos"
    assert main(["collect", "number_line", "--episodes", "2", "--out", str(folder)]) == 0
    with pytest.raises(UsageError, match="holds demonstrations of number_line, whose actions or snapshots are not"):
        load_demonstrations(folder, make_env("blackjack", task_env("blackjack"), 0), task_env("blackjack"))
