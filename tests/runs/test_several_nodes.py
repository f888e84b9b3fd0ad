"""A run on a Ray of several nodes: its judge goes to the node with the GPU, and it goes on where nodes are lost. The
nodes are real, the GPU is a word. The head node's death is in tests/faults/test_dead_head.py.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client, _set_global_client
from tiny_run import WORDS, box_words

from rlvlm.core.errors import EXIT_DONE, EXIT_PREEMPTED, MachineError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1_500)]

LONGEST_S = 600.0
TURNS = "number_line --smoke --eval.episodes 8 --track.log-every-steps 128 --track.checkpoint-every-steps 128".split()
WITH_LEARNER = "--algo.num-learners 1".split()
WITH_ENGINE = (
    "--engine.num-replicas 1 --engine.num-cpus 0 --engine.num-gpus 1 --engine.timeout-s 20 --engine.retries 30"
).split()
LEARNERS: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0}
ENGINE: dict[str, Any] = {"num_cpus": 0, "num_gpus": 1}
"""Where each of those finds a place, and the other none."""


@contextmanager
def nodes(head_cpus: int, *others: dict[str, Any]) -> Iterator[tuple[Cluster, list[Any]]]:
    """A cluster whose head has no GPU, and its other nodes; this process is on it, to ask where things are."""
    head = {"num_cpus": head_cpus, "num_gpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        found = [cluster.add_node(**other) for other in others]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False, logging_level="error")
        yield cluster, found
    finally:
        _set_global_client(None)  # it would ask the controller of this cluster in the next one
        ray.shutdown()
        cluster.shutdown()


class Run:
    """A run on a cluster, in a process of its own, whose words go to a file.

    Args:
        cluster: that it joins.
        out: its folder.
        words: that start it; none go on with what is there.
    """

    def __init__(self, cluster: Cluster, out: Path, *words: str) -> None:
        self.out, self._log = out, out.with_suffix(".log")
        line = ["rlvlm.run", *words, "--out", str(out)] if words else ["rlvlm.cli", "resume", str(out)]
        known = os.environ | {"RAY_ADDRESS": cluster.address, "MUJOCO_GL": "egl"}
        with self._log.open("w") as log:
            self.process = subprocess.Popen([sys.executable, "-m", *line], env=known, stdout=log, stderr=log)

    @property
    def said(self) -> str:
        """What it has said so far, without the frames of its boxes."""
        return box_words(self._log.read_text())

    @property
    def steps(self) -> list[int]:
        """Env steps of what it has logged."""
        file = self.out / "metrics.jsonl"
        return [int(json.loads(line)["env_steps"]) for line in file.open()] if file.exists() else []

    def wait_until(self, holds: Callable[[], Any]) -> Any:
        """Returns what `holds()` gives as soon as it is true."""
        end = time.monotonic() + LONGEST_S
        while not (found := holds()):
            assert self.process.poll() is None and time.monotonic() < end, self.said[-2_000:]
            time.sleep(0.2)
        return found

    def progressed(self) -> None:
        """Returns when it has learned on since now."""
        before = len(self.steps)
        self.wait_until(lambda: len(self.steps) >= before + 2)

    def ended(self, code: int) -> str:
        """What it has said, once it has ended with that code."""
        assert self.process.wait(LONGEST_S) == code, self.said[-2_000:]
        return self.said

    def end(self) -> None:
        """Kills it where it is still there."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def replica_nodes(kind: str) -> set[str]:
    """The nodes with a running replica of a run's `kind`: judge or policy."""
    client = _get_global_client(raise_if_no_controller_running=False)
    apps = client.get_serve_details()["applications"] if client else {}
    return {
        replica["node_id"]
        for name, app in apps.items()
        if name.startswith(f"{kind}-")
        for deployment in app["deployments"].values()
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"
    }


def lose(cluster: Cluster, node_id: str) -> None:
    """Has the node of that id die, without a word."""
    node = next(one for one in cluster.list_all_nodes() if one.node_id == node_id)
    cluster.remove_node(node, allow_graceful=False)


def test_the_judge_of_a_run_goes_where_the_gpu_is(tmp_path):
    with nodes(1, {"num_cpus": 1, "num_gpus": 1}) as (cluster, (card,)):
        judge = ["--reward.teacher", "judge", "--judge.untrained", "ok", "--serve.num-gpus", "1"]
        words = [*WORDS, "--steps", "160", *judge]
        run = Run(cluster, tmp_path / "run", *words)
        try:
            assert run.wait_until(lambda: replica_nodes("judge")) == {card.node_id}
            run.ended(EXIT_DONE)
        finally:
            run.end()
        assert json.loads((run.out / "summary.json").read_text())["queries"] > 0
        assert len(ray.nodes()) == 2  # the run has left the cluster as it was


def test_a_run_goes_on_when_the_nodes_of_its_envs_and_of_its_judge_are_lost(tmp_path):
    """The learner is on the head; env workers begin on all nodes, and the judge's replica finds the spare card."""
    card = {"num_cpus": 4, "num_gpus": 1}  # env workers that are placed anew must leave a core for the judge
    with nodes(4, card, card, {"num_cpus": 2}) as (cluster, (*_, envs)):
        words = [
            *("push_block", "--steps", "60000", "--reward.source", "judged", "--serve.num-gpus", "1"),
            *("--algo.env-workers", "3", "--algo.groups", "8", "--algo.rounds", "1", "--eval.episodes", "8"),
            *("--sft.episodes", "40", "--sft.updates", "100", "--reward.monitor.preflight", "8"),
            *("--eval.every-steps", "60000", "--track.log-every-steps", "2000"),
        ]
        run = Run(cluster, tmp_path / "run", *words)
        try:
            run.progressed()
            (judge,) = replica_nodes("judge")
            lose(cluster, envs.node_id)
            run.progressed()
            lose(cluster, judge)
            run.progressed()
            assert replica_nodes("judge").isdisjoint({judge, envs.node_id})
            run.process.terminate()
            run.ended(EXIT_PREEMPTED)  # it saves and ends as a job that was asked to
        finally:
            run.end()


def test_the_node_of_the_engine_may_be_lost_and_that_of_the_learner_ends_a_run_that_resumes(tmp_path):
    """Replicas of the policy find a spare card, in the supervised start and in training, and fetch the weights; what a
    learner held is in the checkpoint.
    """
    with nodes(0, LEARNERS, ENGINE, ENGINE, ENGINE) as (cluster, (learner, *_)):
        run = Run(cluster, tmp_path / "run", *TURNS, *WITH_LEARNER, *WITH_ENGINE, "--steps", "100000")
        try:
            for is_reached in (lambda: "collecting" in run.said, lambda: len(run.steps) >= 3):
                run.wait_until(is_reached)
                (engine,) = replica_nodes("policy")
                lose(cluster, engine)
                run.progressed()
                assert replica_nodes("policy").isdisjoint({engine})
            lose(cluster, learner.node_id)
            said = run.ended(MachineError.exit_code)
            assert "learner 0 (process" in said and "saved up to step" in said
        finally:
            run.end()
        reached, last = run.steps[-1], max((run.out / "checkpoints").glob("step_*"))
        saved = json.loads((last / "run.json").read_text())["env_steps"]
        assert 0 <= reached - saved <= 128, "no more is lost than was done since the newest checkpoint"
        cluster.add_node(**LEARNERS)
        cluster.wait_for_nodes()
        again = Run(cluster, run.out)
        try:
            again.wait_until(lambda: again.steps[-1] > reached)
            again.process.terminate()
            again.ended(EXIT_PREEMPTED)
        finally:
            again.end()
        assert again.steps == sorted(set(again.steps)), "each step stands in the log once"


def test_without_its_learner_a_supervised_start_ends_with_words(tmp_path):
    with nodes(0, LEARNERS) as (cluster, (learner,)):
        run = Run(cluster, tmp_path / "run", *TURNS, *WITH_LEARNER, "--steps", "128")
        try:
            run.wait_until(lambda: "collecting" in run.said)
            lose(cluster, learner.node_id)
            said = run.ended(MachineError.exit_code)
        finally:
            run.end()
        assert "learner 0 (process" in said and "start it again" in said
        assert not run.out.exists(), "nothing was done yet, so nothing of it stays"
