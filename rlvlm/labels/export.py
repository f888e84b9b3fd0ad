"""The one table of judges' answers, a Parquet file with a row for each and its truth: for DuckDB, pandas, colleagues.

Label stores are exported as it; benches, reports and scored data write it too, by `judge_bench.table`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlvlm.core.disk import replacing
from rlvlm.core.judging import Label, Status, Verdict
from rlvlm.labels.records import PERSON_PREFIX, StoredAnswer, Truth, answer_key, truth_about
from rlvlm.labels.store import LabelStore

ROWS_AT_ONCE = 10_000
"""Rows in memory, and per row group of the file."""
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("question", pa.string()),
        ("kind", pa.string()),
        ("goal", pa.string()),
        ("action", pa.string()),
        ("left", pa.list_(pa.string())),
        ("right", pa.list_(pa.string())),
        ("goal_picture", pa.list_(pa.string())),
        ("judge", pa.string()),
        ("revision", pa.string()),
        ("prompt", pa.string()),
        ("decoding", pa.string()),
        ("status", pa.string()),
        ("label", pa.string()),
        ("value", pa.float64()),
        ("p_left", pa.float64()),
        ("p_right", pa.float64()),
        ("p_tie", pa.float64()),
        ("text", pa.string()),
        ("latency_s", pa.float64()),
        ("tokens_in", pa.int64()),
        ("tokens_out", pa.int64()),
        ("cost_usd", pa.float64()),
        ("at", pa.timestamp("us", "UTC")),
        ("run", pa.string()),
        ("task", pa.string()),
        ("seed", pa.int64()),
        ("progress_left", pa.float64()),
        ("progress_right", pa.float64()),
        ("return_left", pa.float64()),
        ("return_right", pa.float64()),
        ("correct", pa.bool_()),
        ("tokens", pa.float64()),
        ("item", pa.int64()),
        ("swapped", pa.bool_()),
        ("case", pa.string()),
        ("success", pa.bool_()),
        ("source", pa.int64()),
        ("track", pa.int64()),
        ("colours", pa.list_(pa.float64())),
        ("left_episode", pa.int64()),
        ("left_frame", pa.int64()),
        ("right_episode", pa.int64()),
        ("right_frame", pa.int64()),
    ]
)
"""Columns of the file. Sides are in the order shown, images are digests, as in the store, and `correct` is null unless
label and truth are decided. From `item` on they are of benches and scored data alone, and null in a store: `item` to
`track` as in `judge_bench.items`; `colours` are means of each side's last image, whose episode and frame follow."""


def write_parquet(file: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> int:
    """Writes rows in constant memory, and returns their number. The file appears whole or not at all.

    Args:
        file: file to write; an existing one is replaced.
        schema: names and types of the columns; missing values become null.
        rows: values by column name. Parquet's text is UTF-8, which a model's text need not be: `text` is converted.

    Raises:
        OSError: the disk cannot be written.
    """
    count, left = 0, iter(rows)
    with replacing(file) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        while part := list(islice(left, ROWS_AT_ONCE)):
            for place, row in enumerate(part):
                if "text" in row:  # a model's lone surrogate has no encoding in UTF-8
                    part[place] = {**row, "text": row["text"].encode(errors="replace").decode()}
            writer.write_table(pa.Table.from_pylist(part, schema))
            count += len(part)
    return count


def export_parquet(store: LabelStore, file: Path, *, with_names: bool = False) -> int:
    """Writes every answer of the store, failed ones too; returns and raises as `write_parquet` does.

    Args:
        store: label store to read.
        file: file to write; an existing one is replaced.
        with_names: whether people keep their names; otherwise they are numbered in the order of their first answers.
    """
    # truths fit into memory and may be on any line, so they are read first; answers are streamed
    truths = store.truths()
    people: dict[str, str] = {}

    def nameless(item: StoredAnswer) -> StoredAnswer:
        stamp = item.answer.stamp
        if with_names or not stamp.judge.startswith(PERSON_PREFIX):
            return item
        pseudonym = people.setdefault(stamp.judge, f"{PERSON_PREFIX}person-{len(people) + 1}")
        stamp = replace(stamp, judge=pseudonym)
        # the key is a hash of the name too, which could be found by trying names
        key = answer_key(item.question.id, stamp)
        return replace(item, key=key, answer=replace(item.answer, stamp=stamp))

    answers = map(nameless, store.answers())
    return write_parquet(file, SCHEMA, (_row(item, truth_about(item.question, truths)) for item in answers))


def _row(item: StoredAnswer, truth: Truth | None) -> dict[str, Any]:
    answer, question, usage = item.answer, item.question, item.answer.usage
    is_verdict = isinstance(answer, Verdict)
    p_left, p_right, p_tie = (answer.probabilities if is_verdict else None) or (None, None, None)
    progress = (truth.progress if truth else None) or (None, None)
    returns = (truth.returns if truth else None) or (None, None)
    # accuracy is a share of decided labels: neither an undecided judge nor an undecided truth is right or wrong
    is_comparable = truth is not None and truth.better is not Label.TIE and answer.status is Status.OK
    return {
        **asdict(question),
        **asdict(answer.stamp),
        **asdict(item.origin),
        **(asdict(usage) if usage else {}),
        "tokens": usage.tokens_in + usage.tokens_out if usage else None,
        "key": item.key,
        "question": question.id,
        "status": str(answer.status),
        "label": str(answer.label) if is_verdict and answer.label else None,
        "value": None if is_verdict else answer.value,
        "p_left": p_left,
        "p_right": p_right,
        "p_tie": p_tie,
        "text": answer.text,
        "latency_s": answer.latency_s,
        "at": datetime.fromtimestamp(item.when, UTC),
        "progress_left": progress[0],
        "progress_right": progress[1],
        "return_left": returns[0],
        "return_right": returns[1],
        "correct": answer.label is truth.better if is_verdict and truth and is_comparable else None,
    }
