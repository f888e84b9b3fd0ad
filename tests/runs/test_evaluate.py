"""What `rlvlm eval` counts, prints and writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlvlm.algorithms.evaluation import PlayedEpisode
from rlvlm.core.errors import MachineError
from rlvlm.runs import build, evaluate
from rlvlm.runs.build import Players
from rlvlm.runs.folder import RunFolder
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import override


class OneStart:
    """Plays the same episode again and again, or, given seeds that count, another one each time."""

    def __init__(self, is_varied: bool) -> None:
        self.is_varied = is_varied

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        ones = np.ones(3, np.float32)
        return [
            PlayedEpisode(
                snapshots=np.full((3, 1), seed if self.is_varied else 0, np.float32),
                env_rewards=ones,
                learned_rewards=ones * np.nan,
                success=np.array([False, True, self.is_varied]),
                progress=ones,
            )
            for seed in seeds
        ]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    players = Players(own=OneStart(False), draw=lambda rows, size_px: rows, others={"random": OneStart(True)})
    chosen = SimpleNamespace(step=5, algorithm=Path())
    monkeypatch.setattr(evaluate, "open_players", lambda *_: players)
    monkeypatch.setattr(evaluate, "choose_checkpoint", lambda *_: chosen)


def test_one_episode_played_forty_times_is_one_episode(
    folder: RunFolder, played: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.checkpoints = SimpleNamespace(all=lambda: [SimpleNamespace(step=5)])
    evaluate.evaluate_run(folder, folder.path, 40, False)
    said = capsys.readouterr().out
    compared = json.loads((folder.path / "evaluation.json").read_text())["compared"]
    own, varied = compared["policy"], compared["random"]
    assert (own["episodes"], own["distinct"], varied["distinct"]) == (40, 1, 40)
    assert own["success_low"] < 0.25 and varied["success_low"] > 0.9, "one success supports little, forty much"
    assert (own["success"], own["success_at_end"], varied["success_at_end"]) == (1.0, 0.0, 1.0)
    (line,) = (line for line in said.splitlines() if line.startswith("policy  "))
    assert "100.0 (" not in line and line.rstrip().endswith("1 of 40"), "no interval is shown of one episode"
    assert "100.0 (91 to 100)" in said and "policy: fewer starts than episodes" in said


def test_what_cannot_be_written_was_printed_before(
    folder: RunFolder, played: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.checkpoints = SimpleNamespace(all=lambda: [SimpleNamespace(step=9)])
    (tmp_path / "a file").touch()
    with pytest.raises(MachineError, match="the figures above could not be written") as caught:
        evaluate.evaluate_run(folder, folder.path, 3, False, tmp_path / "a file" / "below")
    said = capsys.readouterr().out
    assert "success at end, %" in said and "the best; the last is of step 9" in said
    assert "--out DIR" in caught.value.fix
    out = tmp_path / "elsewhere"
    evaluate.evaluate_run(folder, folder.path, 3, False, out)
    assert (out / "evaluation.json").is_file() and not (folder.path / "evaluation.json").exists()


@pytest.mark.parametrize(("task", "others"), [("drawer_open", ["policy, random starts"]), ("rlvlm.testing:TINY", None)])
def test_a_policy_of_one_start_is_also_played_from_others(
    task: str, others: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_actor", lambda _: None)
    players = build.open_players(recipe(task), Path())
    assert others is None or list(players.others) == others
    assert not build.open_players(override(recipe(task), {"env.start": "random"}), Path()).others
