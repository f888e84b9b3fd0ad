"""Label files of the reference: read without being run, and turned into a store."""

import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from rlvlm.cli import main
from rlvlm.core.judging import Label
from rlvlm.labels.store import LabelStore, open_store
from rlvlm.plugins.pickles import pickles
from rlvlm.plugins.pickles.pickles import RefusedPickle, read_pickled_arrays
from rlvlm.plugins.pickles.reference import import_reference, read_reference


def make_session(num: int = 6, seed: int = 0) -> list[np.ndarray]:
    """A session as the reference pickles it; even labels are right, odd ones wrong."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num, 10, 24, 3), np.uint8)
    rewards = [rng.random((num, 1, 1)) for _ in range(2)]
    truth = (rewards[0] < rewards[1]).reshape(num, 1).astype(np.int64)
    labels = np.where(np.arange(num)[:, None] % 2 == 0, truth, 1 - truth)
    sides = [rng.random((num, 1, 43)) for _ in range(2)]
    return [images, truth, labels, *sides, *rewards]


COUNTS = {"labels": 6, "correct": 3, "wrong": 3, "disagrees": 0}


def write(file: Path, session: list) -> Path:
    file.write_bytes(pickle.dumps(session, pickle.HIGHEST_PROTOCOL))
    return file


def test_a_session_becomes_labels_with_images_and_truth(tmp_path):
    session = make_session()
    file = write(tmp_path / "a.pkl", session)
    for files in ([file], [file, file]):  # the same again adds nothing
        counts = import_reference(files, LabelStore(tmp_path / "s"), goal="open the drawer", judge="gemini-pro")
        assert counts == {name: len(files) * num for name, num in COUNTS.items()}
    opened = open_store(tmp_path / "s")
    assert len(opened) == 6
    truths = opened.truths()
    for number, item in enumerate(opened.answers()):
        assert item.answer.stamp.judge == "imported:gemini-pro" and item.question.goal == "open the drawer"
        assert item.answer.label is (Label.RIGHT if session[2][number] else Label.LEFT)
        np.testing.assert_array_equal(opened.image(item.question.left[0]), session[0][number][:, :12])
        np.testing.assert_array_equal(opened.image(item.question.right[0]), session[0][number][:, 12:])
        truth = truths[item.question.id]
        assert truth.progress is None
        assert truth.values == pytest.approx((session[5][number].sum(), session[6][number].sum()))


def test_segments_are_summed_and_contradictions_counted(tmp_path):
    session = make_session()
    session[5] = np.concatenate([session[5], session[5]], axis=1)  # two steps: twice the return
    session[6] = np.concatenate([session[6], session[6]], axis=1)
    session[1] = 1 - session[1]
    read = read_reference(write(tmp_path / "a.pkl", session))
    np.testing.assert_allclose(read.returns[:, 0], session[5].sum((1, 2)), rtol=1e-6)
    counts = import_reference([tmp_path / "a.pkl"], LabelStore(tmp_path / "s"), goal="open it", judge="x")
    assert counts["disagrees"] == 6


def broken() -> dict[str, list]:
    good = make_session()
    odd_width = [good[0][:, :, :-1], *good[1:]]
    return {
        "six arrays": good[:6],
        "eight arrays": [*good, good[0]],
        "no images": [good[0][..., 0], *good[1:]],
        "float images": [good[0].astype(np.float32), *good[1:]],
        "odd width": odd_width,
        "fewer labels": [*good[:2], good[2][:-1], *good[3:]],
        "label 2": [*good[:2], good[2] + 2, *good[3:]],
        "labels in two columns": [*good[:2], np.zeros((6, 2)), *good[3:]],
        "label nan": [*good[:2], good[2] * np.nan, *good[3:]],
        "reward inf": [*good[:6], good[6] * np.inf],
        "fewer rewards": [*good[:5], good[5][:-1], good[6]],
    }


@pytest.mark.parametrize("name", broken())
def test_a_file_that_contradicts_itself_is_refused(tmp_path, name):
    file = write(tmp_path / "a.pkl", broken()[name])
    with pytest.raises(RefusedPickle):
        import_reference([file], LabelStore(tmp_path / "s"), goal="open it", judge="x")
    assert not (tmp_path / "s").exists()


ARRAYS = [
    np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    np.array([[0], [1]]),
    np.array([[-1.5], [2.0]], np.float32),
    np.zeros((0, 4)),
    np.array(3.0),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.array([1, 2], ">i4"),
    np.array([True, False]),
]


def test_an_array_worked_by_hand():
    by_hand = (
        b"\x80\x05]("
        b"\x8c\x12numpy.core.numeric\x8c\x0b_frombuffer\x93"
        b"(\x96\x02\x00\x00\x00\x00\x00\x00\x00\x07\x09"  # bytearray of two
        b"\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02u1\x89\x88\x87R"
        b"(K\x03\x8c\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"K\x02\x85\x8c\x01CtRe."
    )
    (array,) = read_pickled_arrays(by_hand)
    assert array.dtype == np.uint8 and array.tolist() == [7, 9]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_numpy_pickles_round_trip(tmp_path, protocol):
    file = tmp_path / "labels.pkl"
    file.write_bytes(pickle.dumps(ARRAYS, protocol))
    for mine, theirs in zip(read_pickled_arrays(file), ARRAYS, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape


def test_files_written_before_numpy_2_are_read():
    old = pickle.dumps(ARRAYS, 3).replace(b"cnumpy._core.", b"cnumpy.core.")
    np.testing.assert_array_equal(read_pickled_arrays(old)[0], ARRAYS[0])
    framed = pickle.dumps(ARRAYS, 4).replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray")
    framed = framed[:3] + (len(framed) - 11).to_bytes(8, "little") + framed[11:]  # the length of its only frame
    np.testing.assert_array_equal(read_pickled_arrays(framed)[0], ARRAYS[0])


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda evil: evil,
        lambda evil: [*ARRAYS, evil],
        lambda evil: [[evil]],
        lambda evil: [np.array([evil], object)],
        lambda evil: {"a": evil},
    ],
)
def test_nothing_is_run(tmp_path, protocol, wrap):
    data = pickle.dumps(wrap(Evil(tmp_path / "canary")), protocol)
    with pytest.raises(RefusedPickle):
        read_pickled_arrays(data)
    assert not (tmp_path / "canary").exists()
    pickle.loads(data)
    assert (tmp_path / "canary").exists()  # the file was a real one


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1},
        np.array([object()], object),
        [np.array(["a"])],
        [np.array([1 + 2j])],
        [np.zeros(2, "f4,i4")],
        [np.datetime64("2020")],
        3,
        None,
        [ARRAYS],
        [b"x"],
        [np.float64(1.0)],
        np.zeros(3),
    ],
)
def test_other_values_are_refused(value):
    for protocol in (2, 5):
        with pytest.raises(RefusedPickle, match="the file is not read"):
            read_pickled_arrays(pickle.dumps(value, protocol))


def test_lengths_that_lie_cost_no_memory():
    good = pickle.dumps([np.zeros(8, np.uint8)], 4)
    long = b"\xff" * 7 + b"\x00"
    for lie in (b"\x8e" + long, b"\x8e" + b"\xff" * 8, b"B\xff\xff\xff\x7f", b"\x96" + long):
        with pytest.raises(RefusedPickle):
            read_pickled_arrays(b"\x80\x05" + lie + b"abc.")
    shapes = good.replace(b"K\x08\x85", b"K\xff\x85")
    assert shapes != good
    with pytest.raises(RefusedPickle, match="has not 8 bytes"):
        read_pickled_arrays(shapes)
    laughs = b"\x80\x04]" + b"\x94(h\x00h\x00e" + b"".join(b"\x94(h%ch%ce" % (n, n) for n in range(1, 60)) + b"."
    with pytest.raises(RefusedPickle):
        read_pickled_arrays(laughs)
    with pytest.raises(RefusedPickle, match="instructions"):
        read_pickled_arrays(b"\x80\x04" + b"N" * (pickles.MAX_OPCODES + 1) + b".")
    with pytest.raises(RefusedPickle, match="place 2,147,483,647 of its memo"):
        read_pickled_arrays(b"\x80\x02]r\xff\xff\xff\x7f.")
    # bytes that an array has taken and that a list's instruction then makes longer
    array = pickle.dumps([np.zeros(8, np.uint8)], 5)
    assert b"\x96" in array and array.endswith(b"\x94a.")
    place = array[: array.index(b"\x96")].count(b"\x94")
    with pytest.raises(RefusedPickle, match="BufferError"):
        read_pickled_arrays(array[:2] + array[11:-1] + b"h%cK\x01a." % place)
    # pairs of pairs of pairs: nobody may hash them, or print them
    pairs = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
    with pytest.raises(RefusedPickle, match="plain numbers"):
        read_pickled_arrays(b"\x80\x02" + pairs + b"cnumpy\ndtype\nh\x3c\x85R.")
    # eight bytes for each further copy of a text of 10 kB
    text = b"X" + (10_000).to_bytes(4, "little") + b"a" * 10_000
    copies = text + b"q\x00X\x06\x00\x00\x00latin1q\x01c_codecs\nencode\nq\x02" + b"h\x02h\x00h\x01\x86R" * 100
    with pytest.raises(RefusedPickle, match="more text than the file has"):
        read_pickled_arrays(b"\x80\x02]" + copies + b".")


def test_no_garbage_gets_past_or_breaks_the_reader():
    """20,000 mutations of a good file: arrays or a refusal, never another error."""
    good = pickle.dumps([np.arange(4, dtype=np.uint8)], 4)
    rng = random.Random(0)
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert all(isinstance(array, np.ndarray) for array in read_pickled_arrays(bytes(data)))
        except RefusedPickle:
            pass


@pytest.mark.parametrize("kind", ["folder", "pipe", "nothing", "empty", "device", "link"])
def test_only_a_regular_file_is_read(tmp_path, kind):
    file = tmp_path / "labels.pkl"
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "empty":
        file.touch()
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "link":
        (tmp_path / "outside").write_bytes(pickle.dumps(ARRAYS))
        file.symlink_to(tmp_path / "outside")
    with pytest.raises(RefusedPickle):
        read_pickled_arrays(file)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "MAX_FILE_BYTES", 10)
    (tmp_path / "a").write_bytes(pickle.dumps(ARRAYS))
    with pytest.raises(RefusedPickle, match="more than 10 bytes"):
        read_pickled_arrays(tmp_path / "a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--store s --goal g", "no file to import"),
        ("none.pkl --store s --goal g", "cannot be opened"),
        ("a.txt --store s --goal g", "no pickle"),
        ("a.txt --store s --goal <b>", "plain words"),
    ],
)
def test_the_command_names_objects_that_it_cannot_import(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("labels")
    assert main(["labels", "import", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_the_command_imports_a_folder_of_sessions(tmp_path, capsys):
    write(tmp_path / "a.pkl", make_session())
    assert main(["labels", "import", str(tmp_path), "--store", str(tmp_path / "s"), "--goal", "open the drawer"]) == 0
    assert "6 labels from 1 files" in capsys.readouterr().out
    assert main(["labels", "show", str(tmp_path / "s")]) == 0 and "imported:unknown" in capsys.readouterr().out
