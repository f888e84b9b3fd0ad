"""`video_path` tricks: none opens a file outside the media root, and every refusal reads the same."""

import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
from http_edge import Edge, movie

from rlvlm.serving import media as files

OUTSIDE, INSIDE = movie([255] * 2), movie([0] * 2)


class Scene:
    """A media root with traps in it, a secret beside it, and a record of every file that is opened."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.edge = Edge(folder)
        self.root, self.folder = self.edge.media, folder
        (folder / "secret.mp4").write_bytes(OUTSIDE)
        (folder / "media-next").mkdir()
        (folder / "media-next" / "secret.mp4").write_bytes(OUTSIDE)
        (self.root / "ok").mkdir()
        (self.root / "ok" / "a.mp4").write_bytes(INSIDE)
        (self.root / "soft.mp4").symlink_to(folder / "secret.mp4")
        (self.root / "soft2.mp4").symlink_to("../secret.mp4")
        (self.root / "loop.mp4").symlink_to("loop.mp4")
        (self.root / "proc.mp4").symlink_to("/proc/self/environ")
        (self.root / "out").symlink_to(folder)
        (self.root / "slash").symlink_to("/")
        os.link(folder / "secret.mp4", self.root / "hard.mp4")
        os.mkfifo(self.root / "pipe.mp4")
        (self.root / "folder.mp4").mkdir()
        self.opened: list[str] = []
        real_open = os.open

        def watched(path, flags, *args, **kwargs):
            descriptor = real_open(path, flags, *args, **kwargs)
            self.opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # where it is, not what lies there now
            return descriptor

        monkeypatch.setattr(files.os, "open", watched)

    def outsiders(self) -> list[str]:
        """Files that were opened and are not in the root."""
        root = str(self.root)
        return [path for path in self.opened if path != root and not path.startswith(root + "/")]


def tricks(scene: Scene, count: int, seed: int) -> list[str]:
    """Names that a caller may try, in random dress."""
    rng = random.Random(seed)
    secret = "secret.mp4"
    outside = f"{scene.folder}/{secret}"
    up = f"../{secret} ok/../../{secret} ./../{secret} ok/./../../{secret} {outside} {scene.root}/../{secret} "
    up += f"{scene.root}-next/{secret} {scene.root}//../{secret} %2e%2e/secret.mp4 ..%2fsecret.mp4 ..\\secret.mp4 "
    up += "..%c0%afsecret.mp4 . .. / // ok gone.mp4"
    linked = f"out/{secret} soft.mp4 soft2.mp4 loop.mp4 hard.mp4 pipe.mp4 folder.mp4 proc.mp4 folder.mp4/x.mp4 "
    linked += f"slash{outside}"
    system = "/etc/passwd /proc/self/environ /proc/self/fd/0 /proc/self/root/etc/passwd /dev/zero /dev/stdin "
    system += f"/dev/mem.mp4 /proc/self/cwd/{secret} /proc/{os.getpid()}/root{outside}"
    schemes = f"file://{outside} file:{outside} concat:{outside} subfile,,start,0,end,9,,:{outside} "
    schemes += f"data:video/mp4;base64,AAAA/{secret}"
    shell = "~/x.mp4 ~root/x.mp4 $HOME/x.mp4 CON.mp4 ok/a.mp4::$DATA * ok/*.mp4 -rf.mp4 ||id.mp4 `id`.mp4 $(id).mp4"
    tails = ["ok/a.mp4/", "ok/a.mp4/.", "ok/a.mp4\0.png", "\0", "ok/a.mp4\n", " ok/a.mp4", "ok/a.mp4 "]
    plain = [*" ".join((up, linked, system, schemes, shell)).split(), *tails, "x" * 300 + ".mp4", "a/" * 100 + "x.mp4"]
    twists = [
        lambda name: name,
        lambda name: name.replace("..", "\uff0e\uff0e"),
        lambda name: name.replace("/", "\u2215"),
        lambda name: name.replace(".", "\u2024"),
        lambda name: name.replace("/", "//"),
        lambda name: "./" + name,
        lambda name: name.replace("s", "\u017f"),
        lambda name: name + "\0",
        lambda name: name.replace("e", "e\u0301"),
        lambda name: name.upper(),
        lambda name: f"ok/../{name}",
        lambda name: name.replace("..", ".. "),
        lambda name: "../" * rng.randint(1, 12) + name,
        lambda name: f"{scene.root}/{name}",
        lambda name: name + "?x=1.mp4",
        lambda name: name.replace("/", "\\"),
        lambda name: "\u202e" + name,
        lambda name: name + "#.mp4",
    ]
    names = list(plain)
    while len(names) < count:
        name = rng.choice(plain)
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(twists)(name)
        names.append(name[:1_024])
    rng.shuffle(names)
    return names[:count]


@pytest.fixture
def scene(tmp_path, monkeypatch):
    return Scene(tmp_path, monkeypatch)


@pytest.mark.parametrize("count", [150, pytest.param(1_000, marks=pytest.mark.full)])
def test_no_trick_leads_out(scene, count):
    answers, times = {}, []
    for name in tricks(scene, count, seed=7):
        if not name or name in ("ok/a.mp4", f"{scene.root}/ok/a.mp4"):
            continue
        start = time.perf_counter()
        answer = scene.edge.post("/score", {"task_text": "open it", "video_path": name})
        times.append(time.perf_counter() - start)
        answers.setdefault((answer.status_code, answer.text), []).append(name)
    assert scene.outsiders() == []
    assert [status for status, _ in answers] == [400], answers
    fine = scene.edge.post("/score", {"task_text": "open it", "video_path": "ok/a.mp4"}).json()
    assert fine["status"] == "ok" and fine["score"] < 0.1


@pytest.mark.parametrize("seconds", [0.5, pytest.param(20.0, marks=pytest.mark.full)])
def test_a_swap_at_the_right_moment_leads_nowhere(scene, seconds):
    """A folder and a file are swapped for links to the secret while they are asked for."""
    done = threading.Event()
    (scene.root / "swap").mkdir()
    (scene.root / "swap" / "secret.mp4").write_bytes(INSIDE)

    def swap() -> None:
        while not done.is_set():
            os.rename(scene.root / "swap", scene.root / "kept")
            os.symlink(scene.folder, scene.root / "swap")
            os.unlink(scene.root / "swap")
            os.rename(scene.root / "kept", scene.root / "swap")
            shutil.copy(scene.folder / "secret.mp4", scene.folder / "draft.mp4")
            os.symlink(scene.folder / "secret.mp4", scene.root / "next.mp4")
            os.replace(scene.root / "next.mp4", scene.root / "file.mp4")
            (scene.root / "next.mp4").write_bytes(INSIDE)
            os.replace(scene.root / "next.mp4", scene.root / "file.mp4")

    swapper = threading.Thread(target=swap)
    swapper.start()
    num_read = 0
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end or num_read == 0:
            for name in ("swap/secret.mp4", "file.mp4"):
                answer = scene.edge.post("/score", {"task_text": "open it", "video_path": name})
                if answer.status_code == 200:
                    num_read += 1
                    assert answer.json()["score"] < 0.1, "the secret was read"
    finally:
        done.set()
        swapper.join()
    assert scene.outsiders() == []
