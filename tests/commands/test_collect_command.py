"""`rlvlm collect`, `data` and `sft`, as typed."""

import json
import shlex

import pytest
from api_server import ApiServer, Response, completion, error
from tiny_run import box_words

from rlvlm.algorithms import sft_job
from rlvlm.algorithms.sft_folders import sft_manifest_of, write_sft_manifest
from rlvlm.cli import main, run_command
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.folder import open_folder
from rlvlm.envs.minigrid.config import MiniGridConfig
from rlvlm.pocket.models import weights_folder
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.settings.arguments import parse_run


def test_collect_show_export_and_import(tmp_path, capsys):
    folder = str(tmp_path / "d")
    assert main(["collect", "number_line", "--episodes", "4", "--out", folder]) == 0
    assert "4 new episodes" in capsys.readouterr().out
    assert main(["collect", "number_line", "--episodes", "6", "--out", folder, "--wrong-actions", "0.5"]) == 0
    assert "now 10 with" in capsys.readouterr().out
    assert main(["data", "show", folder]) == 0
    assert "10 episodes" in capsys.readouterr().out
    chats = tmp_path / "chats.jsonl"
    assert main(["data", "export", folder, "--out", str(chats), "--filter.successful"]) == 0, capsys.readouterr().err
    assert "chats in" in capsys.readouterr().out and json.loads(chats.read_text().splitlines()[0])["messages"]
    assert main(["data", "import", str(chats), "--task", "number_line", "--out", str(tmp_path / "e")]) == 0
    assert "chats added" in capsys.readouterr().out


@pytest.mark.slow
def test_a_vlm_behind_an_api_plays(tmp_path, capsys):
    """It sees the turn's image and prompt; what it writes is kept as it is, readable or not."""
    server = ApiServer(*(Response(completion(text)) for text in ("I go up.", '{"thoughts": "up", "action": "+"}')))
    server.truth = lambda call: Response(completion('{"action": "+"}'))
    folder = tmp_path / "d"
    words = ["collect", "number_line", "--episodes", "2", "--out", str(folder), "--player.model", "big/vlm-7b"]
    with server.running() as url:
        remote = ["--player.backend", "openai", "--player.api.base-url", url]
        assert main([*words, *remote]) == 0
        assert "2 new episodes" in capsys.readouterr().out
        assert server.calls[0].images[0].shape == (300, 300, 3) and "number line" in server.calls[0].text
        server.script = [error(500, "down")] * 9
        assert main([*words, "--seed", "1", *remote, "--player.api.retries", "0"]) == 3
        assert "vlm-7b did not answer a turn" in box_words(capsys.readouterr().err)
        # an empty text teaches nothing, whatever it came from
        empty = {"stop": "wrote nothing", "error": "did not answer", "length": "raise --player.max-reply-tokens"}
        for ending, message in empty.items():
            server.script = [Response(completion("", finish=ending))] * 9
            assert main([*words, "--seed", "1", *remote, "--player.api.retries", "0"]) == 3
            assert message in box_words(capsys.readouterr().err)
    episodes = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    first, second, *_ = episodes[0]["steps"]
    assert len(episodes) == 2 and episodes[0]["player"] == "vlm-vlm-7b"
    assert (first["text"], first["action"], second["action"]) == ("I go up.", None, "+")


@pytest.mark.slow
def test_a_vlm_of_this_machine_plays(tmp_path, capsys):
    words = ["collect", "number_line", "--episodes", "1", "--out", str(tmp_path / "d")]
    assert main([*words, "--player.model", str(weights_folder("policy")), "--player.max-reply-tokens", "48"]) == 0
    assert "1 new episodes" in capsys.readouterr().out
    [episode] = [json.loads(line) for line in (tmp_path / "d" / "episodes.jsonl").read_text().splitlines()]
    assert any(step["action"] for step in episode["steps"]), "the pocket policy writes what can be read"


def test_chunks_are_collected_and_shown(tmp_path, capsys):
    folder = tmp_path / "d"
    words = ["collect", "push_block", "--episodes", "3", "--noise", "0.1", "--p-perturb", "0.1", "--out", str(folder)]
    assert main(words) == 0
    assert "3 new episodes" in capsys.readouterr().out
    assert main(words) == 0
    assert "0 new episodes" in capsys.readouterr().out
    sheet = (folder / "episodes.png").read_bytes()
    (folder / "episodes.png").unlink()
    assert main(["data", "show", str(folder)]) == 0
    message = capsys.readouterr().out
    assert "3 episodes" in message and "| push the" in message and "episodes.png" in message
    assert (folder / "episodes.png").read_bytes() == sheet


@pytest.mark.slow
def test_a_folder_has_one_set_of_settings_of_the_env(tmp_path, capsys):
    words = ["collect", "empty_random_5x5", "--episodes", "2", "--out", str(tmp_path / "d")]
    assert main([*words, "--env.prompt-last-action"]) == 0
    assert main([*words, "--env.prompt-last-action", "--seed", "1", "--wrong-actions", "0.2"]) == 0
    assert "now 4 with" in capsys.readouterr().out
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert main(words) == 2
    message = box_words(capsys.readouterr().err)
    assert "env.prompt_last_action True, not False" in message and "--out" in message
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_a_script_that_fails_is_no_teacher(tmp_path, capsys):
    assert main(["collect", "push_block", "--env.episode-steps", "8", "--out", str(tmp_path / "d")]) == 2
    assert "succeeded in 0 of 20 episodes" in box_words(capsys.readouterr().err)
    (tmp_path / "none.json").write_text("")
    words = ["data", "import", str(tmp_path / "none.json"), "--out", str(tmp_path / "e"), "--task", "number_line"]
    assert main(words) == 2
    assert "holds no chats" in box_words(capsys.readouterr().err)


@pytest.mark.slow
def test_demonstrations_and_policies_of_other_prompts_are_not_mixed(tmp_path):
    source, out = str(tmp_path / "demos"), tmp_path / "out"
    assert run_command(["collect", "empty_random_5x5", "--episodes", "1", "--out", source]) == 0
    words = ["sft", "empty_random_5x5", "--from", source, "--out", str(out)]
    with pytest.raises(UsageError, match="collected with env.prompt_last_action False, not True"):
        run_command([*words, "--env.prompt-last-action"])
    assert not out.exists()
    names = open_folder(tmp_path / "demos").action_names
    out.mkdir()
    write_sft_manifest(
        out, sft_manifest_of("empty_random_5x5", MiniGridConfig(prompt_last_action=True), PolicyConfig(), names)
    )
    with pytest.raises(UsageError, match="trained with other settings: .*env.prompt_last_action was True, not False"):
        run_command(words)


def test_a_job_says_how_much_it_learns_from_and_how_to_train_on(tmp_path, monkeypatch, capsys):
    """What the job does meanwhile is tested in `tests/algorithms/test_sft_job.py`."""
    monkeypatch.setattr(sft_job, "run_sft", lambda *settings: {"sft/held_out_loss": 0.5})
    source, out = str(tmp_path / "demos"), tmp_path / "a policy"
    assert run_command(["collect", "number_line", "--episodes", "3", "--out", source]) == 0
    assert run_command(["sft", "number_line", "--from", source, "--out", str(out), "--sft.updates", "7"]) == 0
    said = capsys.readouterr()
    assert "7 updates into" in said.err
    assert "held out loss 0.500" in said.out
    words = shlex.split(said.out.splitlines()[-1].partition("rlvlm run ")[2])
    assert parse_run(words, "rlvlm run").config.sft.start_from == str(out)  # pyright: ignore[reportOptionalMemberAccess]


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demos") / "number_line"
    assert main(["collect", "number_line", "--episodes", "2", "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sft.weighting filter", "sft.weighting needs sft.labels"),
        ("--sft.labels none.parquet --sft.weighting filter", "none.parquet"),
        ("--sft.labels none.parquet --sft.weighting condition", "one has no effect without the other"),
        ("--sft.turns 7", "--sft.turns: no effect with --from"),
        ("--sft.demonstrations other", "--from names the demonstrations"),
        ("--sft.start-from other", r"no effect beside\s+sft\.start_from"),
        ("--job.shard", "job.shard needs job.num_workers >= 2"),
    ],
)
def test_a_job_without_sense_is_refused_before_it_starts(demos, tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        run_command(["sft", "number_line", "--from", str(demos), "--out", str(tmp_path / "o"), *options.split()])
    assert not (tmp_path / "o").exists()


def test_the_policy_and_its_lessons_are_those_of_the_tasks_recipe(capsys):
    with pytest.raises(SystemExit):
        run_command(["sft", "pick_place_can", "--help"])
    message = "".join(line.strip("│ ") for line in capsys.readouterr().out.splitlines())
    assert "(default: actions)" in message and "(default: 800)" in message
