"""Engines that share the learners' cards: who has them when, the same replies as apart, and what a lost one does."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos import replica_pids, wait_until
from ray import serve

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient
from rlvlm.core import metrics
from rlvlm.core.errors import ModelUnavailable, UsageError
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.runs.placement import roles_of
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import override
from rlvlm.serving.apps import running_policy
from rlvlm.serving.card_turns import torch_device
from rlvlm.serving.config import ServedEngineConfig
from rlvlm.serving.engine import ServedEngine
from rlvlm.vlms.devices import card_of
from tests.algorithms.policy_gradient.tiny_runs import build
from tests.serving.test_served_engine import frames_of_tiny_policy, ids_of, trainer
from tests.tiny_policy import requests
from tests.tiny_vlm import save_tiny_vlm

APART = ServedEngineConfig(num_replicas=2, num_cpus=0.1, timeout_s=60.0, retries=8, bucket_mib=1)
COLOCATED = replace(APART, colocated=True)


def noted(engine: Any, learners: Any) -> list[str]:
    """What is done from now on, in its order; a list that grows."""
    events: list[str] = []

    def note(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def noting(*arguments: Any, **words: Any) -> Any:
            outcome = work(*arguments, **words)
            events.append(arguments[0] if name == "call_all" else name)
            return outcome

        setattr(owner, name, noting)

    for name in ("sleep", "wake", "pack", "reply"):
        note(engine, name)
    note(learners, "call_all")
    return events


@pytest.mark.ray
@pytest.mark.slow
def test_engines_sleep_while_learners_learn_and_give_the_replies_that_they_give_apart(
    local_ray: None, tmp_path: Path
) -> None:
    save_tiny_vlm(tmp_path, "qwen3_vl")
    config = PolicyConfig(model=str(tmp_path), device="cpu", learns="all", seed=1)
    found = []
    for engine in (APART, COLOCATED):
        turns = engine.colocated
        with running_policy(config, 0, engine.placement, "turns", batch_size=2, takes_turns=turns) as app:
            algorithm: PolicyGradient = build(tmp_path, make_engine=partial(ServedEngine, app, config=engine))
            algorithm.train()
            events = noted(algorithm._engine, algorithm._learners)
            algorithm.train()
            done = [one for one in events if one in ("sleep", "learn", "wake", "pack", "reply")]
            first_reply, last_reply = done.index("reply"), len(done) - done[::-1].index("reply")
            assert done[:first_reply] == ["pack"] and set(done[first_reply:last_reply]) == {"reply"}
            assert done[last_reply:] == (["sleep", "learn", "wake"] if turns else ["learn"])
            report = algorithm.report()
            assert report[metrics.UPDATE_FIRST_RATIO] <= 1e-4 and report[metrics.UPDATES] == 2
            weights = {name: value.clone() for name, value in algorithm._policy.trained_state().items()}
            found.append((report[metrics.UPDATE_POLICY_LOSS], weights))
            algorithm.stop()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
    serve.shutdown()


@pytest.mark.ray
@pytest.mark.slow
def test_one_that_sleeps_answers_when_it_is_its_turn_again_also_when_it_was_lost(
    local_ray: None, tmp_path: Path
) -> None:
    save_tiny_vlm(tmp_path, "qwen3_vl")
    config = PolicyConfig(model=str(tmp_path), device="cpu", learns="all", seed=1)
    with running_policy(
        config, 0, COLOCATED.placement, "turns", batch_size=8, build=load_policy, takes_turns=True
    ) as app:
        policy, obs, ids, frame = trainer(tmp_path)
        engine, here = ServedEngine(app, policy, obs, ids, frame, config=COLOCATED), PolicyEngine(policy)
        for key, image in frames_of_tiny_policy().items():
            engine.show([key], image[None])
        own = ids_of(here.reply(*requests(8), max_new_tokens=6))
        engine.use(engine.pack(1))
        with ThreadPoolExecutor(1) as pool:
            for lost in (False, True):
                waits = pool.submit(engine.reply, *requests(8), max_new_tokens=6)
                time.sleep(1.0)
                assert not waits.done(), "it sleeps"
                if lost:
                    gone = replica_pids(app)[0]
                    os.kill(gone, signal.SIGKILL)
                    wait_until(lambda gone=gone: gone not in replica_pids(app), 60, "it is gone")
                engine.wake([])
                assert ids_of(waits.result(60)) == own
                engine.sleep()
        engine.close()

    def fails_to_load(config: PolicyConfig, num_actions: int) -> VLMPolicy:
        raise ValueError("the card is full")

    app_of_none = running_policy(
        config, 0, replace(COLOCATED, num_replicas=1).placement, "turns", 8, fails_to_load, takes_turns=True
    )
    with app_of_none as app:
        policy, obs, ids, frame = trainer(tmp_path)
        engine = ServedEngine(app, policy, obs, ids, frame, config=COLOCATED)
        with pytest.raises(ModelUnavailable, match="cannot wake: .*the card is full"):
            engine.wake([])
        engine.close()
    serve.shutdown()


def test_cards_have_the_names_that_this_process_sees_them_by(monkeypatch: pytest.MonkeyPatch) -> None:
    # by hand: of the cards 4, 2 and 7 torch calls 2 the second
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2,7")
    assert card_of(torch.device("cuda", 1)) == "2" and torch_device("2") == "cuda:1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert card_of(torch.device("cuda")) == "0" and torch_device("3") == "cuda:3"
    assert card_of(torch.device("cpu")) == "" and torch_device("") == "cpu"


def test_what_cannot_be_shared_is_refused_and_the_plan_books_no_card_for_it() -> None:
    with pytest.raises(ValueError, match="engine.num_gpus must be 0 with engine.colocated"):
        ServedEngineConfig(num_replicas=1, num_gpus=0.5, colocated=True)
    with pytest.raises(ValueError, match="no effect without engine.num_replicas"):
        ServedEngineConfig(colocated=True)
    two = {"engine.num_replicas": 2, "algo.num_learners": 2, "algo.gpus_per_learner": 1.0, "engine.colocated": True}
    with pytest.raises(UsageError, match="algo.staleness 1 has no effect with engine.colocated"):
        override(recipe("number_line"), two | {"algo.staleness": 1})
    with pytest.raises(UsageError, match="at most one replica for each learner"):
        override(recipe("number_line"), two | {"engine.num_replicas": 3})
    roles = roles_of(override(recipe("number_line"), two))
    (engines,) = [one for one in roles if one.name.startswith("the policy's replicas")]
    assert "on the learners' GPUs" in engines.name and engines.gpus == 0
    # the run's own process takes a card too where a Ray that was started before has nominal ones
    assert sum(one.count * one.gpus for one in roles if not one.is_own) == 2
