"""The folders of runs and of a sweep as they would be left, with curves made by hand."""

from dataclasses import replace
from datetime import datetime

import pytest
from filled_run import config, filled, folder, make_records, make_scores  # noqa: F401 - fixtures
from made_sweep import BAD, GOOD, SWEEP, Curves

from rlvlm.runs.files.folder import create_folder
from rlvlm.sweeps.config import SweepConfig
from rlvlm.sweeps.folder import SweepFolder, held_sweep
from rlvlm.sweeps.plan import expand


@pytest.fixture
def make_sweep(tmp_path):
    """Makes a sweep; `curves` has the success rates of each seed, by source, on every task. One short is not done."""

    def make(curves: Curves | None = None, sweep: SweepConfig = SWEEP) -> SweepFolder:
        with held_sweep(tmp_path / "sweep", sweep) as (held, _):
            pass
        for plan in expand(sweep):
            curve = (curves or {"good": GOOD, "bad": BAD})[plan.source][plan.seed]
            if not curve:
                continue
            run = create_folder(replace(plan.config, out=held.run_path(plan)), ["rlvlm"], datetime(2026, 1, 1))
            run.metrics.append([{"env_steps": 1}])
            run.evaluations.append(
                {
                    "step": 1_000 * (number + 1),
                    "success_rate": rate,
                    "episode_return": 100 * rate,
                    "wall_s": 60.0 * (number + 1),
                }
                for number, rate in enumerate(curve)
            )
            asked = 40 if plan.source == "good" else 30
            run.queries.append(
                {"status": "ok", "correct": int(number % 10 > 0), "env_step": 10} for number in range(asked)
            )
            if len(curve) == 4:
                run.write_summary({"exit_reason": "done", "env_steps": 4_000, "wall_s": 240.0, "peak_rss_mb": 900})
        return held

    return make
