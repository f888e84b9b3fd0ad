"""Whatever is handed to our loaders, nothing in it runs, and the refusal says what was wrong."""

import pickle
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from malicious_files import ATTACKS as ALL_ATTACKS
from malicious_files import PICKLES, copy_weights

from rlvlm.algorithms.checkpoint import PolicyFile, load_tree, save_tree
from rlvlm.algorithms.sac_pebble.player import KIND, load_policy
from rlvlm.core.errors import RunError
from rlvlm.core.guests import guests
from rlvlm.core.judging import Query
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.images import MissingImage
from rlvlm.labels.store import LabelStore, open_store
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.testing import FakeJudge

MAX_GROWTH_MIB = 300
"""Memory that a refusal may cost, the loader's own included."""


def make_checkpoint(folder: Path) -> None:
    torch.manual_seed(0)
    save_tree(folder, {"rate": np.zeros(2)}, PolicyFile(kind=KIND, weights=SquashedGaussian(3, 2, (4,)).state_dict()))


def make_store(folder: Path) -> None:
    frames = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 1, 8, 8, 3)
    query = Query(goal="open it", left=frames[0], right=frames[1])
    CachedJudge(FakeJudge(), LabelStore(folder)).compare([query])


def use_checkpoint(folder: Path) -> None:
    load_policy(folder)
    load_tree(folder)


def use_weights(folder: Path) -> None:
    from rlvlm.vlms.loading import load_vlm

    load_vlm(JudgeConfig(backend="pocket", model=str(folder)))


def use_import(folder: Path) -> None:
    from rlvlm.plugins.pickles.reference import read_reference

    read_reference(folder / "labels.pkl")


def use_store(folder: Path) -> None:
    """A store loses what is harmed and keeps the rest, so its refusal is a damaged line or a missing image."""
    store = open_store(folder)
    items = list(store.answers())
    for item in items:
        store.image(item.question.left[0])
    counts = store.count_lines()
    if counts["damaged"] or counts["unfinished"] or len(store) > len(items):
        raise MissingImage("a line is not believed")


PREPARE: dict[str, Callable[[Path], None]] = {
    "checkpoint": make_checkpoint,
    "weights": copy_weights,
    **({"import": Path.mkdir} if "pickles" in guests() else {}),
    "store": make_store,
}
USE: dict[str, Callable[[Path], None]] = {
    "checkpoint": use_checkpoint,
    "weights": use_weights,
    "import": use_import,
    "store": use_store,
}
USE = {target: use for target, use in USE.items() if target in PREPARE}
ATTACKS = [attack for attack in ALL_ATTACKS if attack.target in PREPARE]


@pytest.mark.parametrize("name", ["pickle", "pickle in text", "pickle that evaluates"])
def test_a_canary_does_sing(tmp_path, name):
    pickle.loads(PICKLES[name](tmp_path / "canary"))
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("target", USE)
def test_undamaged_files_load(tmp_path, target):
    folder = tmp_path / "it"
    PREPARE[target](folder)
    if target != "import":
        USE[target](folder)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.target}: {attack.name}")
def test_nothing_runs_and_the_refusal_is_clear(tmp_path, attack):
    folder, canary = tmp_path / "it", tmp_path / "canary"
    PREPARE[attack.target](folder)
    attack.write(folder, canary)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((RunError, MissingImage)) as refusal:
        USE[attack.target](folder)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert not canary.exists()
    assert 10 < len(str(refusal.value)) < 800 and "Traceback" not in str(refusal.value)
    assert grown < MAX_GROWTH_MIB, f"{grown:.0f} MiB"
    assert sys.getrecursionlimit() <= 10_000
