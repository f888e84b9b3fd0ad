"""The figures for Prometheus, and the dashboard over them."""

import json
import re
from pathlib import Path

from rlvlm.serving import monitoring
from rlvlm.serving.monitoring import ReplicaMetrics, exported_names
from rlvlm.testing import FakeJudge

DASHBOARD = Path(__file__).parents[2] / "docs" / "monitoring" / "rlvlm.json"
OF_SERVE = {"ray_serve_deployment_replica_healthy"}


def shown() -> set[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    return {name for query in queries for name in re.findall(r"\bray_\w+", query)}


def test_a_counter_and_a_histogram_have_the_names_that_prometheus_gives_them() -> None:
    names = exported_names()
    assert {"ray_rlvlm_judge_answers_total", "ray_rlvlm_judge_queue", "ray_rlvlm_judge_batch_size_bucket"} <= names


def test_the_dashboard_shows_every_figure_and_no_other() -> None:
    assert shown() - OF_SERVE <= exported_names(), "a panel asks for a figure that nobody exports"
    figures = {*monitoring.COUNTERS, *monitoring.GAUGES, *monitoring.HISTOGRAMS}
    assert not [figure for figure in figures if not any(figure in name for name in shown())], "a figure has no panel"


def test_observing_without_ray_does_nothing() -> None:
    figures = ReplicaMetrics()
    figures.request("compare", "", FakeJudge().compare([]), 0.1)
    figures.batch_size.observe(3, {"kind": "compare"})
    figures.state(0)
