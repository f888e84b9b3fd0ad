"""The figures for Prometheus, and the dashboard over them."""

import json
import re
from pathlib import Path

from rlvlm.core import metrics
from rlvlm.serving.monitoring import COUNTERS, GAUGES, HISTOGRAMS, ReplicaMetrics
from rlvlm.testing import FakeJudge

DASHBOARD = Path(__file__).parents[2] / "docs" / "monitoring" / "rlvlm.json"
OF_SERVE = {"ray_serve_deployment_replica_healthy"}


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def shown() -> set[str]:
    return {name for query in queries() for name in re.findall(r"\bray_\w+", query)}


def test_the_dashboard_shows_every_figure_and_no_other():
    exported = {f"ray_{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    exported |= {f"ray_{name}_total" for name in COUNTERS} | {f"ray_{name}" for name in GAUGES}
    assert "ray_rlvlm_judge_answers_total" in exported and "ray_rlvlm_judge_queue" in exported
    assert shown() - OF_SERVE <= exported, "a panel asks for a figure that nobody exports"
    figures = {*COUNTERS, *GAUGES, *HISTOGRAMS}
    assert not [figure for figure in figures if not any(figure in name for name in shown())], "a figure has no panel"


def test_panels_of_training_ask_for_figures_that_runs_have():
    named = {value for value in vars(metrics).values() if isinstance(value, str)}
    asked = {figure for each in re.findall(r'figure=~?"([^"]+)"', " ".join(queries())) for figure in each.split("|")}
    assert len(asked) > 9 and asked <= named


def test_observing_without_ray_does_nothing():
    figures = ReplicaMetrics()
    figures.request("compare", "", FakeJudge().compare([]), 0.1)
    figures.batch_size.observe(3, {"kind": "compare"})
    figures.state(0)
