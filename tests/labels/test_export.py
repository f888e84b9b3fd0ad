import duckdb
import numpy as np

from rlvlm.core.judging import Clip, Query
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.export import SCHEMA, export_parquet
from rlvlm.labels.records import Origin, Truth
from rlvlm.labels.store import LabelStore, open_store
from rlvlm.testing import FakeJudge


def test_duckdb_reads_accuracy_out_of_a_store(tmp_path):
    store = LabelStore(tmp_path / "s", Origin(run="r", task="t", seed=4))
    frames = [np.full((1, 4, 4, 3), level, np.uint8) for level in range(6)]
    pairs = [(0, 1), (3, 2), (4, 5)]
    cached = CachedJudge(FakeJudge(), store)
    verdicts = cached.compare([Query(goal="brighten it", left=frames[a], right=frames[b]) for a, b in pairs])
    cached.compare([Query(goal="brighten it", left=frames[1], right=frames[0])])
    cached.score([Clip(goal="brighten it", frames=frames[5])])
    store.add_truths(
        [
            Truth(question=verdicts[0].question, progress=(0.0, 1.0)),
            Truth(question=verdicts[1].question, returns=(1.0, 2.0)),
        ]
    )
    file = tmp_path / "out" / "labels.parquet"
    assert export_parquet(open_store(tmp_path / "s"), file) == 5
    query = f"select kind, count(*), sum(correct::int), count(correct) from '{file}' group by kind order by kind"
    # the first pair is right, in both orders; the second is wrong; of the third nobody knows
    assert duckdb.sql(query).fetchall() == [("compare", 4, 2, 3), ("score", 1, None, 0)]
    (score,) = duckdb.sql(f"select run, seed, value from '{file}' where kind = 'score'").fetchall()
    assert score[:2] == ("r", 4) and abs(score[2] - 5 / 255) < 1e-6
    names = [row[0] for row in duckdb.sql(f"describe select * from '{file}'").fetchall()]
    assert names == SCHEMA.names
    assert [each.name for each in file.parent.iterdir()] == ["labels.parquet"]


def test_an_empty_store_is_an_empty_table(tmp_path):
    LabelStore(tmp_path / "s").keep_images([])
    assert export_parquet(open_store(tmp_path / "s"), tmp_path / "x.parquet") == 0
    assert duckdb.sql(f"select count(*) from '{tmp_path / 'x.parquet'}'").fetchall() == [(0,)]
