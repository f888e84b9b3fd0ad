"""Requests that are sent together go to different replicas."""

import os
from dataclasses import replace

import pytest
from ray import serve
from stub_judge import StubJudge, stub_queries

from rlvlm.core.judging import Query, Verdict
from rlvlm.judges.config import JudgeConfig
from rlvlm.serving.apps import start_judge
from rlvlm.serving.config import PlacementConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class _NamedJudge(StubJudge):
    """Its answers carry the id of the process that gave them."""

    def verdict(self, query: Query) -> Verdict:
        return replace(super().verdict(query), text=str(os.getpid()))


def _make(config: JudgeConfig) -> _NamedJudge:
    return _NamedJudge(latency_s=0.1)


def test_pieces_of_a_row_meet_in_no_replica(local_ray: None) -> None:
    placement = PlacementConfig(num_replicas=4, num_cpus=0.1)
    with start_judge(JudgeConfig(batch_size=2), placement, "spread", _make) as judge:
        # four pieces at once, as an engine sends a row; Serve's own router has two of them meet in 5 of 6 rows
        rows = [judge.compare(stub_queries(8, seed)) for seed in range(6)]
    serve.shutdown()
    assert [len({verdict.text for verdict in row}) for row in rows] == [4] * 6
