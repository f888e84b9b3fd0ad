import json
from pathlib import Path

import numpy as np
import pytest

from rlvlm.commands import data
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.card import FilterConfig, census, select, split, write_card
from rlvlm.demonstrations.collect import FIRST_SEED, PlayerReply, ScriptedExpert, collect, play
from rlvlm.demonstrations.folder import DemonstrationFolder, create_folder, open_folder
from rlvlm.demonstrations.records import EpisodeRecord, StepRecord, to_token_episode
from rlvlm.envs.registry import make_env, task_env


def made(task: str):
    return make_env(task, task_env(task), 0)


def folder_of(path: Path, task: str, episodes: int = 5, player: ScriptedExpert | None = None) -> DemonstrationFolder:
    env = made(task)
    folder = create_folder(path, task, "turns", env.action_names)
    collect(env, player or ScriptedExpert(), folder, episodes, seed=0)
    return folder


def step(**fields) -> StepRecord:
    plain = {"prompt": "p", "text": "t", "action": "+", "env_reward": 0.0, "success": False, "progress": 0.0}
    return StepRecord(**(plain | fields))


def episode(*steps: StepRecord, **fields) -> EpisodeRecord:
    plain = {"id": "e", "task": "number_line", "kind": "turns", "seed": 0, "player": "x", "goal": "", "env_return": 1.0}
    return EpisodeRecord(**(plain | {"success": True, "terminated": True} | fields), steps=steps)


def test_a_filter_worked_by_hand():
    """Of three steps one is unreadable and one spoilt on purpose; of three episodes one was lost, one too poor."""
    won = episode(step(), step(action=None), step(is_noise=True))
    lost, poor = episode(step(), id="lost", success=False), episode(step(), id="poor", env_return=0.5)
    kept, reasons = select([won, lost, poor], FilterConfig(successful=True, noise=False, min_return=1.0))
    assert kept == [(won, (0,))]
    names = ("unreadable reply", "spoilt on purpose", "episode without success", "return too small")
    assert reasons == dict.fromkeys(names, 1)


def test_recorded_steps_replay(tmp_path):
    env = made("ez_points")
    folder = folder_of(tmp_path / "d", "ez_points", 3)
    record = next(iter(open_folder(tmp_path / "d").episodes()))
    assert record.seed == FIRST_SEED and record.success and record.env_return == 10.0 and record.terminated
    whole = to_token_episode(record, env)
    turn, _ = env.reset(seed=record.seed)
    for t, reply in enumerate(whole.replies):
        assert np.array_equal(turn.snapshot, whole.snapshots[t]) and turn.prompt == whole.obs.texts[t]
        (digest,) = record.steps[t].pictures
        assert np.array_equal(folder.image_store.load(digest), env.draw(turn.snapshot[None])[0])
        assert reply.action_span is not None and reply.action is not None
        assert reply.text[slice(*reply.action_span)] == env.action_names[reply.action] == record.steps[t].action
        turn, reward, terminated, _, info = env.step(reply.text)
        assert (reward, info["success"]) == (whole.env_rewards[t], whole.success[t])
    assert terminated and np.array_equal(turn.snapshot, whole.snapshots[-1])


def test_a_stopped_collection_goes_on_and_a_finished_one_stays(tmp_path):
    folder = folder_of(tmp_path / "a", "number_line", 3)
    env = made("number_line")
    assert collect(env, ScriptedExpert(), folder, 5, seed=0) == 2
    assert collect(env, ScriptedExpert(), folder, 5, seed=0) == 0
    whole = folder_of(tmp_path / "b", "number_line", 5)
    assert [record.steps for record in folder.episodes()] == [record.steps for record in whole.episodes()]
    assert collect(env, ScriptedExpert(), folder, 2, seed=1) == 2


@pytest.mark.slow
def test_noise_has_the_share_that_is_asked_for_and_is_known(tmp_path):
    folder = folder_of(tmp_path, "number_line", 150, ScriptedExpert(p_wrong_action=0.3, p_wrong_thought=0.2))
    steps = [step for record in folder.episodes() for step in record.steps]
    assert np.mean([step.is_noise for step in steps]) == pytest.approx(1 - 0.7 * 0.8, abs=0.09)
    assert np.mean([step.env_reward < 0 for step in steps]) == pytest.approx(0.3, abs=0.09)
    counts = census(folder.episodes())
    assert len(list((tmp_path / "pictures").rglob("*.png"))) == len(counts.images) <= 36 < counts.steps, "kept once"
    kept, reasons = select(folder.episodes(), FilterConfig(noise=False))
    assert reasons["spoilt on purpose"] == sum(step.is_noise for step in steps)
    text = (write_card(folder), (tmp_path / "README.md").read_text())[1]
    assert "expert-wrong-actions-0.3-thoughts-0.2" in text and "Deliberate mistakes" in text


def test_unreadable_replies_are_counted_as_such(tmp_path):
    class Mumbler:
        name = "mumbler"

        def begin(self, seed: int) -> None:
            pass

        def reply(self, env, turn) -> PlayerReply:
            return PlayerReply("hm\ud800")

    env = made("number_line")
    folder = create_folder(tmp_path / "d", "number_line", "turns", env.action_names)
    collect(env, Mumbler(), folder, 2, seed=0)
    counts = write_card(folder)
    assert counts.rejected == {"unreadable reply": 20} and counts.actions == {"(none)": 20}


def test_a_split_keeps_seeds_together_and_is_stable():
    records = [episode(step(), id=f"{seed}-{player}", seed=seed) for seed in range(400) for player in "ab"]
    learned, held_out = split(records, 0.1)
    assert not {record.seed for record in learned} & {record.seed for record in held_out}
    assert len(held_out) / len(records) == pytest.approx(0.1, abs=0.05)
    assert {record.id for record in split(records[:100], 0.1)[1]} <= {record.id for record in held_out}
    assert split(records, 0.0)[1] == []


def test_damage_costs_one_episode_and_is_counted(tmp_path):
    folder = folder_of(tmp_path, "number_line", 4)
    lines = (tmp_path / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    ids = [json.loads(line)["id"] for line in lines]
    nested = b"[" * 100_000 + b"\n"
    stolen = json.dumps(json.loads(lines[3]) | {"id": "../../other"}).encode() + b"\n"
    not_a_number = lines[3].replace(b'"env_return":1.0', b'"env_return":NaN')
    (tmp_path / "arrays" / f"{ids[1]}.npz").write_bytes(b"torn")
    (tmp_path / "episodes.jsonl").write_bytes(lines[0] + lines[1] + nested + stolen + not_a_number + lines[2][:40])
    record = play(made("number_line"), ScriptedExpert(), "number_line", 7)
    folder.add(record)
    assert [found.id for found in folder.episodes()] == [ids[0], record.id]
    assert folder.num_damaged == 5


def test_an_array_file_with_any_byte_changed_costs_no_other_episode(tmp_path):
    folder = folder_of(tmp_path, "number_line", 2)
    first, second = folder.episodes()
    file = tmp_path / "arrays" / f"{first.id}.npz"
    whole = file.read_bytes()
    for text in (b"", *(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(len(whole)))):
        file.write_bytes(text)
        assert second.id in [found.id for found in folder.episodes()]


def test_texts_of_others_break_no_table_of_the_card_and_rule_no_terminal(tmp_path, capsys):
    folder = create_folder(tmp_path / "d", "push_block", "chunks", chunks={"camera|s": "a\n`b`"})
    folder.add(episode(task="push_block", kind="chunks", player="x`\x1b[31m", goal="a |\n| b\x1b]0;c\x07\ud800"))
    write_card(folder)
    lines = (tmp_path / "d/README.md").read_text().splitlines()
    assert r"| `x'\x1b[31m` | 1 |" in lines and r"| a \| \| b\x1b]0;c\x07\ud800 | 1 | 1 |" in lines
    assert r"| camera\|s | a 'b' |" in lines
    create_folder(tmp_path / "t", "number_line", "turns", ("-", "+")).add(episode(step(), player="x\x1b[31m"))
    assert data.command(["show", str(tmp_path / "t")], "rlvlm data") == 0
    assert r"`x\x1b[31m`" in capsys.readouterr().out


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not a folder of demonstrations"):
        create_folder(tmp_path, "number_line", "turns")
    folder = folder_of(tmp_path / "d", "number_line", 1)
    with pytest.raises(UsageError, match="not of blackjack"):
        create_folder(folder.path, "blackjack", "turns", ("stand", "hit"))
    with pytest.raises(ValueError, match="holds number_line"):
        folder.add(episode(task="blackjack"))
    with pytest.raises(ValueError, match="an id is"):
        folder.add(episode(id="../x"))
