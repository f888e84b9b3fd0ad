"""What a run of preferences writes down of each question and its answer."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from rlvlm.labels.records import Truth
from rlvlm.labels.store import LabelStore
from rlvlm.preferences.records import QueryRecord, Record, ScoreRecord
from rlvlm.runs.artifacts.samples import sample_rows
from rlvlm.runs.artifacts.scored import progress_rows
from rlvlm.runs.folder.rows import query_row, score_row
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.runs.pipeline import Draw
from rlvlm.runs.processes.memory import release_free_memory

SAMPLE_PX = 200
"""Side of the images kept for the judge's page."""


class PreferenceRecorder:
    """Rows of the query and score logs, examples for the judge's page, and the truth beside kept answers.

    Args:
        folder: of the run.
        labels: where the judge's answers are kept.
        draw: makes the images of the examples.
        goal: what the judge is told.
    """

    def __init__(self, folder: RunFolder, labels: LabelStore, draw: Draw, goal: str) -> None:
        self._folder = folder
        self._labels = labels
        self._draw = lambda snapshots: draw(snapshots, SAMPLE_PX)
        self._goal = goal

    def keep(self, records: Iterable[Record]) -> None:
        """Writes down what the algorithm's `drain_records` gave."""
        drained = list(records)
        scores = [record for record in drained if isinstance(record, ScoreRecord)]
        if scores:
            self._folder.scores.append(map(score_row, scores))
            self._folder.samples.append(progress_rows(scores, self._draw, self._goal))
        queries = [record for record in drained if isinstance(record, QueryRecord)]
        self._labels.add_truths(truths_of(queries))
        self._folder.queries.append(map(query_row, queries))
        for _, session in groupby(queries, key=lambda record: record.session):
            self._folder.samples.append(sample_rows(list(session), self._draw))
        if queries:
            release_free_memory()


def truths_of(records: Iterable[QueryRecord]) -> Iterator[Truth]:
    """What the simulator knows about the queries whose answers are kept in a store.

    A judge gets images and a goal alone. The loop puts the truth beside its answer in a `QueryRecord`, for metrics;
    from there it goes into the store as a line of its own, named by the question that the answer carries.
    """
    for record in records:
        if record.verdict.question:
            yield Truth(
                question=record.verdict.question,
                progress=(record.progress_left, record.progress_right),
                returns=(record.return_left, record.return_right),
            )
