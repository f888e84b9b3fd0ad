"""The label store: what is written comes back, whoever writes, and harm costs no more than what was harmed."""

import json
import multiprocessing
import os
import random
import time
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Usage, Verdict
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels import segments, store
from rlvlm.labels.export import SCHEMA, export_parquet
from rlvlm.labels.images import image_digest
from rlvlm.labels.records import Origin, Question, Truth, answer_key, describe, from_record, to_record
from rlvlm.labels.segments import CorruptLine, decode_line, encode_line
from rlvlm.labels.store import LabelStore, is_store, open_store
from rlvlm.testing import FakeJudge

STAMP = Stamp(judge="test", revision="1", prompt="direct/1", decoding="temperature=0")
ORIGIN = Origin(run="one", task="drawer_open", seed=3)


def make_question(number: int) -> Question:
    digests = [image_digest(np.array([number, side])) for side in (0, 1)]
    return Question(kind="compare", goal="open it", left=(digests[0],), right=(digests[1],))


def make_verdict(number: int, question: Question, stamp: Stamp = STAMP) -> Verdict:
    """A verdict that could be no other's."""
    share = number / 1_000_003
    return Verdict(
        status=Status.OK,
        label=Label.RIGHT,
        stamp=stamp,
        probabilities=(share, 1 - share, 0.0),
        text=f"answer {number}",
        latency_s=0.1 + number,
        question=question.id,
    )


def fill(folder: Path, numbers, origin: Origin = ORIGIN) -> LabelStore:
    filled = LabelStore(folder, origin)
    questions = [make_question(number) for number in numbers]
    filled.add_answers(
        [(question, make_verdict(number, question)) for number, question in zip(numbers, questions, strict=True)]
    )
    return filled


def key_of(number: int) -> str:
    return answer_key(make_question(number).id, STAMP)


def test_an_answer_is_found_by_question_and_stamp(tmp_path):
    before = time.time()
    for _ in range(3):  # what is there twice counts once
        fill(tmp_path / "s", range(3))
    other = open_store(tmp_path / "s")
    assert len(list(other.answers())) == 3
    assert other.find(key_of(1)) == make_verdict(1, make_question(1)) and len(other) == 3
    assert other.find(key_of(7)) is None
    item = next(other.answers())
    assert (item.question, item.origin, item.key) == (make_question(0), ORIGIN, key_of(0))
    assert before <= item.when <= time.time()


FULL = Usage(tokens_in=900, tokens_out=12, cost_usd=0.01)
ANSWERS = [
    Verdict(status=Status.OK, label=Label.LEFT, stamp=STAMP, probabilities=(0.7, 0.2, 0.1), text="0", usage=FULL),
    Verdict(status=Status.NO_PREFERENCE, label=Label.TIE, stamp=STAMP, text="\ud800 \x00 \n ü"),
    Verdict(status=Status.INVALID, label=None, stamp=STAMP, text="<script>", latency_s=1e-9),
    Verdict(status=Status.FAILED, label=None, stamp=STAMP),
    Score(status=Status.OK, value=1 / 3, stamp=STAMP, usage=Usage(tokens_in=1, tokens_out=0)),
    Score(status=Status.INVALID, value=None, stamp=STAMP, text="?"),
    # a judge of one's own often gives NumPy's numbers
    Score(status=Status.OK, value=np.float32(0.25), stamp=STAMP),  # pyright: ignore[reportArgumentType]
    Score(status=Status.OK, value=np.float64(0.3), stamp=STAMP),
    Verdict(
        status=Status.OK,
        label=Label.LEFT,
        stamp=STAMP,
        probabilities=(np.float32(0.5), np.float32(0.25), np.float32(0.25)),  # pyright: ignore[reportArgumentType]
    ),
]


def test_every_answer_comes_back_equal(tmp_path):
    for number, answer in enumerate(ANSWERS):
        folder = tmp_path / str(number)
        filled = LabelStore(folder)
        filled.add_answers([(make_question(1), answer)])
        items = list(filled.answers())
        assert [item.answer for item in items] == [answer]
        assert from_record(json.loads(json.dumps(to_record(items[0])))) == items[0]
        assert LabelStore(folder).find(key_of(1)) is None  # nothing is known before a refresh
        assert (open_store(folder).find(key_of(1)) is None) == (answer.status is Status.FAILED)


def test_questions_differ_by_their_images():
    frames = [np.full((2, 4, 4, 3), level, np.uint8) for level in (0, 9)]
    items = [
        Query(goal="a", left=frames[0], right=frames[1]),
        Query(goal="b", left=frames[0], right=frames[1]),
        Query(goal="a", left=frames[1], right=frames[0]),
        Query(goal="a", left=frames[0], right=frames[1][:1]),
        Query(goal="a", left=frames[0], right=frames[1], goal_picture=frames[1][:1]),
        Clip(goal="a", frames=frames[0]),
        Clip(goal="a", frames=frames[0], goal_picture=frames[1][:1]),
    ]
    described = [describe(item) for item in items]
    assert len({question.id for question, _ in described}) == len(items)
    assert described[0][0].swapped == described[2][0] and len(described[0][1]) == 4
    odd = Query(goal="a", left=np.array(3), right=frames[0].astype(float))  # type: ignore[arg-type]
    assert len(describe(odd)[0].id) == 64
    stamps = [STAMP, *(replace(STAMP, **{part: "x"}) for part in ("judge", "revision", "prompt", "decoding"))]
    assert len({answer_key(described[0][0].id, stamp) for stamp in stamps}) == 5


def test_the_truth_is_a_line_of_its_own(tmp_path):
    filled = fill(tmp_path / "s", [1])
    question = make_question(1).id
    filled.add_truths([Truth(question=question, returns=(1.0, 2.0))])
    filled.add_truths([Truth(question=question, progress=(0.1, 0.2), returns=(1.0, 2.0))])
    filled.add_truths([Truth(question=question, progress=(0.8, 0.9))])
    (truth,) = filled.truths().values()
    assert truth.progress == truth.values == (0.1, 0.2) and truth.origin == ORIGIN
    assert "progress" not in next((tmp_path / "s" / "lines").iterdir()).read_text().splitlines()[0]
    assert filled.count_lines() == {"verdict": 1, "truth": 3}


def segment_of(folder: Path) -> Path:
    (file,) = (folder / "lines").iterdir()
    return file


def test_a_torn_tail_costs_its_line_alone_at_every_byte(tmp_path):
    fill(tmp_path / "s", range(3))
    file = segment_of(tmp_path / "s")
    whole = file.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for cut in random.Random(1).sample(range(len(whole)), 60):
        file.write_bytes(whole[:cut])
        assert len(open_store(tmp_path / "s")) == sum(end <= cut for end in ends)
    file.write_bytes(whole[:-7])
    fill(tmp_path / "s", [9])  # the next writer has a segment of its own, so the torn one stays harmless
    assert len(open_store(tmp_path / "s")) == 3


def test_a_flipped_byte_costs_its_line_alone(tmp_path):
    fill(tmp_path / "s", range(6))
    file = segment_of(tmp_path / "s")
    whole = file.read_bytes()
    rng = random.Random(2)
    for place in rng.sample(range(len(whole)), 60):
        harmed = bytearray(whole)
        harmed[place] ^= 1 << rng.randrange(8)
        file.write_bytes(harmed)
        opened = open_store(tmp_path / "s")
        found = [opened.find(key_of(number)) for number in range(6)]
        right = [make_verdict(number, make_question(number)) for number in range(6)]
        assert all(one in (None, other) for one, other in zip(found, right, strict=True))
        lost = found.count(None)
        assert lost <= 2 and (lost == 1 or harmed[place] == 10 or whole[place] == 10)


@pytest.mark.parametrize("indexed_from", [1, 1_000])
def test_a_line_that_changes_under_a_reader_is_not_believed(tmp_path, monkeypatch, indexed_from):
    monkeypatch.setattr(store, "_INDEXED_FROM", indexed_from)
    fill(tmp_path / "s", [1])
    opened = open_store(tmp_path / "s")
    file = segment_of(tmp_path / "s")
    file.write_bytes(file.read_bytes().replace(b'"right"', b'"wrong"'))
    assert opened.find(key_of(1)) is None and opened.num_damaged == 1 and len(opened) == 0


def test_a_forged_line_with_a_right_checksum_is_not_believed(tmp_path):
    fill(tmp_path / "s", [1])
    item = next(LabelStore(tmp_path / "s").answers())
    record = to_record(item)
    forged = [
        record | {"answer": record["answer"] | {"label": "left", "status": "no_preference"}},
        record | {"question": record["question"] | {"goal": "another"}},
        record | {"question": record["question"] | {"left": ["../../../etc/passwd"]}},
        record | {"answer": record["answer"] | {"probabilities": ["a", 1, 2]}},
        record | {"answer": record["answer"] | {"latency_s": True}},
        record | {"kind": "order"},
        {"kind": "truth"},
        {"kind": "truth", "question": "x"},
        {},
        {"key": 3},
    ]
    bodies = [b"", b"[]", b"3", b"{", b'"x"', b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"9" * 5_000]
    lines = [encode_line(each) for each in forged] + [b"%08x %s\n" % (zlib.crc32(body), body) for body in bodies]
    for number, line in enumerate(lines):
        folder = tmp_path / str(number)
        LabelStore(folder).keep_images([])
        (folder / "lines").mkdir()
        (folder / "lines" / "x.jsonl").write_bytes(line)
        opened = open_store(folder)
        assert opened.find(item.key) is None and list(opened.answers()) == [] and opened.truths() == {}


def test_a_folder_that_is_no_store_or_has_another_schema_is_refused_by_name(tmp_path):
    unsaid = ('{"what": "rlvlm label store"}', "[]", "{", "[" * 9_000, '{"what": "something", "schema": 1}')
    unsaid = (*unsaid, '{"what": "rlvlm label store", "schema": true}')
    newer = ('{"what": "rlvlm label store", "schema": 2}', "schema 2; this rlvlm reads schemas up to 1")
    for mark, message in (newer, *((mark, "does not say") for mark in unsaid)):
        (tmp_path / "store.json").write_text(mark)
        with pytest.raises(UsageError, match=message):
            LabelStore(tmp_path)
    (tmp_path / "store.json").rename(tmp_path / "thesis.txt")
    with pytest.raises(UsageError, match="not empty"):
        LabelStore(tmp_path)
    with pytest.raises(UsageError, match="no label store"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no label store"):
        LabelStore(tmp_path / "thesis.txt")


def test_a_store_without_answers_leaves_no_trace(tmp_path):
    LabelStore(tmp_path / "s").refresh()
    LabelStore(tmp_path / "s").add_answers([])
    assert not (tmp_path / "s").exists() and not is_store(tmp_path / "s")


def write_and_look(folder: Path, writer: int, num_rounds: int, per_round: int, total: int) -> None:
    """One run among several: adds answers in rounds and checks all that it sees of the others'."""
    mine = LabelStore(folder, Origin(run=f"run {writer}"))
    rng = random.Random(writer)
    for _ in range(num_rounds):
        numbers = [rng.randrange(total) for _ in range(per_round)]  # overlaps with what others write
        questions = [make_question(number) for number in numbers]
        mine.add_answers([(q, make_verdict(n, q)) for n, q in zip(numbers, questions, strict=True)])
        mine.refresh()
        for number in rng.sample(range(total), 20):
            found = mine.find(key_of(number))
            assert found is None or found == make_verdict(number, make_question(number))
    assert mine.num_damaged == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_writers", "num_rounds", "per_round", "total"),
    [(4, 8, 25, 400), pytest.param(8, 100, 100, 20_000, marks=pytest.mark.full)],
)
def test_many_processes_write_and_read_at_once_and_one_is_killed(tmp_path, num_writers, num_rounds, per_round, total):
    folder = tmp_path / "s"
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=write_and_look, args=(folder, writer, num_rounds, per_round, total))
        for writer in range(num_writers)
    ]
    for child in children:
        child.start()
    victim = children[0]
    time.sleep(0.3)
    victim.kill()
    for child in children:
        child.join(300)
    assert [child.exitcode for child in children[1:]] == [0] * (num_writers - 1)
    written = set()
    for writer in range(1, num_writers):
        rng = random.Random(writer)
        for _ in range(num_rounds):
            written |= {rng.randrange(total) for _ in range(per_round)}
            rng.sample(range(total), 20)
    opened = open_store(folder)
    assert all(opened.find(key_of(number)) == make_verdict(number, make_question(number)) for number in written)
    assert opened.num_damaged == 0


def test_answers_of_one_second_are_read_in_the_order_in_which_they_were_written(tmp_path):
    for number in range(20):
        fill(tmp_path / "s", [number])
    [last] = sorted((tmp_path / "s" / "lines").iterdir())[-1:]
    last.rename(last.with_name("20991231T235959-0123456789abcdef.jsonl"))  # an older rlvlm's, on a clock that was ahead
    fill(tmp_path / "s", [20])
    fill(tmp_path / "s", [21])
    assert [item.key for item in open_store(tmp_path / "s").answers()] == [key_of(number) for number in range(22)]


@pytest.mark.parametrize("indexed_from", [1, 1_000])
def test_one_answer_counts_whenever_the_store_is_read(tmp_path, monkeypatch, indexed_from):
    """The first writer answers last: who has read the second's answer meanwhile agrees with who comes afterwards."""
    monkeypatch.setattr(store, "_INDEXED_FROM", indexed_from)
    question = make_question(0)
    first = fill(tmp_path / "s", [1])
    fill(tmp_path / "s", [2]).add_answers([(question, make_verdict(2, question))])
    reader = open_store(tmp_path / "s")
    first.add_answers([(question, make_verdict(1, question))])
    reader.refresh()
    assert reader.find(key_of(0)) == open_store(tmp_path / "s").find(key_of(0)) == make_verdict(1, question)
    [known] = [item.answer for item in reader.answers() if item.key == key_of(0)]
    assert known == make_verdict(1, question)


def test_a_forked_writer_begins_a_segment_of_its_own(tmp_path):
    filled = fill(tmp_path / "s", [1])
    child = os.fork()
    if child == 0:
        filled.add_answers([(make_question(2), make_verdict(2, make_question(2)))])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    filled.add_answers([(make_question(3), make_verdict(3, make_question(3)))])
    assert len(list((tmp_path / "s" / "lines").iterdir())) == 2 and len(open_store(tmp_path / "s")) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("num_labels", "most_s"), [(5_000, None), pytest.param(100_000, 10, marks=pytest.mark.full)])
def test_memory_holds_places_not_answers_and_opening_takes_seconds(tmp_path, num_labels, most_s):
    folder = tmp_path / "s"
    for start in range(0, num_labels, 10_000):
        fill(folder, range(start, min(start + 10_000, num_labels)))
    started = time.perf_counter()
    open_store(folder)
    elapsed_s = time.perf_counter() - started
    tracemalloc.start()
    opened = open_store(folder)
    held = tracemalloc.get_traced_memory()[0] / num_labels
    tracemalloc.stop()
    assert len(opened) == num_labels
    assert held < 500, "bytes per label; a line has about 900"
    assert most_s is None or elapsed_s < most_s


def test_a_large_store_is_opened_by_its_index_and_a_damaged_one_costs_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_INDEXED_FROM", 8)
    folder, index = tmp_path / "s", tmp_path / "s" / "index.bin"

    def found(opened: LabelStore, count: int) -> bool:
        return len(opened) == count and all(
            opened.find(key_of(number)) == make_verdict(number, make_question(number)) for number in range(count)
        )

    fill(folder, range(20))
    assert found(open_store(folder), 20) and index.exists()
    whole = index.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(segments, "decode_line", lambda line: pytest.fail("a line was read"))
        opened = open_store(folder)
    assert found(opened, 20)
    fill(folder, range(20, 25))
    opened.refresh()
    assert found(opened, 25) and found(open_store(folder), 25)
    other = whole.replace(json.dumps([*(folder / "lines").iterdir()][0].name).encode(), b'"../store.json"')
    for damaged in (b"", whole[:-5], whole[:40], other, os.urandom(500), (2**60).to_bytes(8, "little") + whole[8:]):
        index.write_bytes(damaged)
        assert found(open_store(folder), 25)
    # numbers that lead nowhere, behind a right header
    begin = 8 + int.from_bytes(whole[:8], "little")
    index.write_bytes(whole[:begin] + os.urandom(len(whole) - begin))
    assert all(open_store(folder).find(key_of(number)) in (None, make_verdict(number, make_question(number)))
               for number in range(25))  # fmt: skip


def test_marking_a_folder_that_another_is_marking(tmp_path):
    (tmp_path / ".store.json.0123.partial").touch()
    fill(tmp_path, [1])
    assert store.is_store(tmp_path)


def test_a_line_worked_by_hand():
    assert encode_line({"a": 1}) == b'%08x {"a":1}\n' % zlib.crc32(b'{"a":1}') == b'561bacaf {"a":1}\n'
    assert decode_line(b'561bacaf {"a":1}') == {"a": 1}
    with pytest.raises(CorruptLine):
        decode_line(b'561bacaf {"a":2}')


def test_a_number_that_json_has_not_is_refused_when_written():
    with pytest.raises(ValueError):
        encode_line({"p": float("nan")})
    assert json.loads(encode_line({"p": None})[9:]) == {"p": None}


@pytest.mark.slow
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
