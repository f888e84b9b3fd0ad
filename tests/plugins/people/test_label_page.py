"""The page on which people answer: a real server over HTTP, and the desk behind it."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Clip, Label, Query, Status, Verdict
from rlvlm.labels.records import describe
from rlvlm.labels.store import LabelStore
from rlvlm.plugins.people.config import PageConfig
from rlvlm.plugins.people.page import Desk, label_page
from rlvlm.plugins.people.queue import PeopleQueue, is_swapped


def put_up(folder: Path, count: int, goal: str = "open it", **asked: Any) -> PeopleQueue:
    """Asks about `count` pairs; the brighter side of each is nearer to the goal."""
    store = LabelStore(folder)
    frames = np.random.default_rng(0).integers(0, 256, (count, 2, 1, 4, 4, 3), np.uint8)
    described = [describe(Query(goal=goal, left=left, right=right)) for left, right in frames]
    store.keep_images([image for _, images in described for image in images])
    queue = PeopleQueue(store)
    queue.ask([question for question, _ in described], **asked)
    return queue


@contextmanager
def served(folder: Path, *people: str, undo_s: float = 60.0) -> Iterator[list[httpx.Client]]:
    """A browser for each person, who has opened their link."""
    links: list[str] = []
    config = PageConfig(people=people or ("anna",), port=0, token_file=str(folder / "token"))
    with label_page(LabelStore(folder / "store"), config, links.append, undo_s):
        clients = []
        for link in links:
            address = urlsplit(link.rpartition(" ")[2])
            client = httpx.Client(base_url=f"http://{address.netloc}", follow_redirects=True)
            assert client.get(f"/?{address.query}").status_code == 200
            clients.append(client)
        yield clients
        for client in clients:
            client.close()


def post(client: httpx.Client, path: str, page: str = "one", **body: Any) -> dict[str, Any]:
    reply = client.post(path, json={"client": page, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def answer_of(shown: dict[str, Any], choice: Any) -> dict[str, Any]:
    return {"question": shown["question"], "ticket": shown["ticket"], "choice": choice, "seconds": 1.5}


def answer(client: httpx.Client, shown: dict[str, Any], choice: Any, page: str = "one") -> dict[str, Any]:
    return post(client, "/answer", page, **answer_of(shown, choice))


@pytest.mark.slow
def test_only_a_link_with_the_token_lets_a_browser_in_and_no_other_site(tmp_path):
    put_up(tmp_path / "store", 1, goal='open <it> & "more"')
    with served(tmp_path, "anna") as [anna]:
        token = (tmp_path / "token").read_text().strip()
        cookies = anna.get("/", params={"token": token}, follow_redirects=False)
        assert cookies.status_code == 303 and cookies.headers["location"] == "/"
        assert all(
            "HttpOnly" in value and "SameSite=strict" in value for value in cookies.headers.get_list("set-cookie")
        )
        page = anna.get("/")
        assert token not in page.text and "answering as anna" in page.text
        assert "script-src 'nonce-" in page.headers["content-security-policy"] and "unsafe" not in str(page.headers)
        assert post(anna, "/next")["shown"]["goal"] == 'open <it> & "more"', (
            "data, which the script never parses as HTML"
        )
        digest = post(anna, "/next")["shown"]["sides"][0][0]
        assert anna.get(f"/image/{digest}").headers["content-type"] == "image/png"
        assert anna.get(f"/image/{'0' * 64}").status_code == 404 == anna.get("/image/..%2f..%2fstore.json").status_code
        stranger = httpx.Client(base_url=anna.base_url)
        for path in ("/", "/?token=wrong", f"/image/{digest}", "/?token="):
            denied = stranger.get(path)
            assert denied.status_code == 403 and "needs its link" in denied.text and "set-cookie" not in denied.headers
        assert stranger.post("/next", json={}).status_code == 403
        header = {"authorization": f"Bearer {token}"}
        assert stranger.post("/state", json={}, headers=header).json()["waiting"] == 1, "for scripts"
        for odd, status in (
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "same-site"}, 403),
            ({"host": "evil.example"}, 400),
            ({"content-type": "text/plain"}, 415),
            ({"origin": str(anna.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}, 200),
            ({"origin": f"http://127.0.0.1:{anna.base_url.port + 1}"}, 403),
            ({"origin": f"https://{anna.base_url.netloc.decode()}"}, 200),  # TLS ends at a proxy
            ({"origin": "https://label.example", "sec-fetch-site": "same-origin"}, 200),  # which may rename the host
        ):
            assert (
                anna.post("/next", content=b"{}", headers={"content-type": "application/json", **odd}).status_code
                == status
            )
        assert anna.get("/", params={"token": token, "name": "<b>"}).status_code == 403
        assert (
            anna.post("/next", content=b" " * 20_000, headers={"content-type": "application/json"}).status_code == 413
        )


@pytest.mark.slow
def test_answers_count_once_can_be_taken_back_and_outlive_the_server(tmp_path):
    put_up(tmp_path / "store", 3)
    with served(tmp_path) as [anna]:
        with pytest.raises(UsageError, match="open already"), served(tmp_path):
            pass
        first = post(anna, "/next")["shown"]
        assert post(anna, "/next")["shown"]["question"] == first["question"], "the page was loaded anew"
        reply = answer(anna, first, "left")
        assert reply["counts"] and reply["state"]["answered"] == 1 and reply["state"]["waiting"] == 2
        assert not answer(anna, first, "left")["counts"]
        stranger = answer_of(post(anna, "/next")["shown"], "left")["ticket"]
        odds: list[dict[str, Any]] = [{"choice": 3}, {"choice": []}, {"question": "0" * 64}, {"question": {}}]
        odds += [{"ticket": ticket} for ticket in ("", "x", [], f"r{first['ticket'][1:]}", "r" + "0" * 16, stranger)]
        odds += [{"seconds": seconds} for seconds in ("long", 10**400, None)]
        for odd in odds:
            bad = {"question": first["question"], "ticket": first["ticket"], "choice": "left", "seconds": 1, **odd}
            assert anna.post("/answer", json={"client": "one", **bad}).status_code == 422
        json_header = {"content-type": "application/json"}
        assert anna.post("/answer", content="[" * 10_000, headers=json_header).status_code == 422
        assert anna.post("/answer", json=[1]).status_code == 422
        back = post(anna, "/undo")
        assert back["undone"] and back["state"]["answered"] == 0
        again = back["shown"]
        assert (again["question"], again["sides"]) == (first["question"], first["sides"]) and again["ticket"] != first[
            "ticket"
        ]
        answer(anna, again, "right")
        assert post(anna, "/undo", page="another window")["undone"] is False
    label = Label.LEFT if is_swapped(again["ticket"]) else Label.RIGHT  # as it was asked, not as it was shown
    [kept] = LabelStore(tmp_path / "store").answers()
    assert isinstance(kept.answer, Verdict) and kept.answer.label is label and kept.answer.stamp.judge == "human:anna"
    assert kept.answer.latency_s == 1.5
    with served(tmp_path, undo_s=0) as [anna]:  # the same token, so that an open page goes on
        shown = post(anna, "/next")["shown"]
        late = {"question": shown["question"], "ticket": shown["ticket"], "choice": "skip", "seconds": 2}
    with served(tmp_path, undo_s=0) as [anna]:  # the answer that the page kept while the server was down
        assert post(anna, "/answer", **late)["counts"]
        deadline = time.monotonic() + 5
        while len(list(LabelStore(tmp_path / "store").answers())) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert post(anna, "/undo")["undone"] is False, "it counts already"
    statuses = [item.answer.status for item in LabelStore(tmp_path / "store").answers()]
    assert statuses == [Status.OK, Status.INVALID]


@pytest.mark.slow
def test_two_people_never_get_one_question_unless_agreement_is_wanted(tmp_path):
    put_up(tmp_path / "store", 2)
    with served(tmp_path, "anna", "ben") as [anna, ben]:
        one, two = post(anna, "/next", page="a")["shown"], post(ben, "/next", page="b")["shown"]
        assert one["question"] != two["question"]
        assert post(anna, "/next", page="second window")["shown"] is None
        answer(anna, one, "equal", page="a")
        assert answer(ben, two, "equal", page="b")["shown"] is None
        assert post(ben, "/state")["answered"] == 1
    queue = put_up(tmp_path / "store", 3, agreement=2)  # the third is new
    with served(tmp_path, "anna", "ben") as [anna, ben]:
        one, two = post(anna, "/next", page="a")["shown"], post(ben, "/next", page="b")["shown"]
        assert one["question"] == two["question"]
        assert answer(anna, one, "skip", page="a")["shown"] is None and post(ben, "/state")["waiting"] == 1
        answer(ben, two, "skip", page="b")
    queue.refresh()
    assert queue.waiting() == 0 and queue.people() == ["anna", "ben"]


def test_a_page_says_whether_the_run_lives_and_what_cannot_be_shown(tmp_path):
    queue = put_up(tmp_path / "store", 2)
    with served(tmp_path) as [anna]:
        assert post(anna, "/state")["run"] == "none"
        run = queue.attend()
        assert post(anna, "/state")["run"] == "alive"
        run.close()
        assert post(anna, "/state")["run"] == "gone" and post(anna, "/next")["shown"] is not None
    lost, _ = queue.asked.values()
    (tmp_path / "store" / "pictures" / lost.question.left[0][:2] / f"{lost.question.left[0]}.png").unlink()
    with served(tmp_path) as [anna]:
        reply = answer(anna, post(anna, "/next")["shown"], "left")
        assert reply["shown"] is None and reply["state"]["lost"] == 1


def person(desk: Desk, count: int, wrong: float = 0.0, seed: int = 0) -> list[str]:
    """Someone who answers `count` times, each time by chance wrong; returns the tickets."""
    rng, tickets = random.Random(seed), []
    while len(tickets) < count and (shown := desk.next("anna", "page")):
        left, right = shown["sides"]
        choice = "left" if (left < right) != (rng.random() < wrong) else "right"
        desk.answer("anna", "page", {**shown, "choice": choice, "seconds": 1})
        tickets.append(shown["ticket"])
    return tickets


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_some_pairs_come_again_swapped_so_that_a_person_s_error_is_known(tmp_path, wrong):
    desk = Desk(put_up(tmp_path, 120), rng=random.Random(1))
    tickets = person(desk, 200, wrong)
    repeats = [ticket for ticket in tickets if ticket.startswith("r")]
    assert 0.04 < len(repeats) / len(tickets) <= 0.1
    assert len(tickets) < 200 and desk.next("anna", "page") is None, "an end, where nothing else waits"
    state = desk.state("anna", "page")
    assert state["answered"] == 120 and state["waiting"] == 0 and state["repeats"] == len(repeats)
    assert (state["different"] > 0) == (wrong > 0)
    shown = [is_swapped(ticket) for ticket in tickets if ticket.startswith("q")]
    assert 40 < sum(shown) < 80, "left and right are drawn"
    for asked in desk.queue.asked.values():
        both = [is_swapped(ticket) for ticket in asked.said]
        assert len(both) == len(set(both)), "a repeat is shown the other way round"


def test_pairs_of_a_bench_do_not_come_again_and_equal_pairs_are_marked(tmp_path):
    desk = Desk(put_up(tmp_path / "bench", 40, each_order=True))
    assert not [ticket for ticket in person(desk, 200) if ticket.startswith("r")]
    desk = Desk(put_up(tmp_path / "equal", 20))
    said = []
    for number in range(16):
        shown = desk.next("anna", "page")
        assert shown is not None
        desk.answer("anna", "page", {**shown, "choice": "left" if number < 5 else "equal", "seconds": 1})
        said.append(desk.state("anna", "page")["teaches_little"])
    assert not any(said[:10]) and said[-1]


def test_a_window_that_is_closed_gives_its_question_back(tmp_path, monkeypatch):
    desk = Desk(put_up(tmp_path, 1))
    monkeypatch.setattr("rlvlm.plugins.people.page.LEASE_S", 0.2)
    assert desk.next("anna", "closed") and desk.next("ben", "open") is None
    time.sleep(0.25)
    assert desk.next("ben", "open")


def test_clips_are_rated(tmp_path):
    store = LabelStore(tmp_path / "store")
    question, images = describe(Clip(goal="open it", frames=np.zeros((3, 4, 4, 3), np.uint8), action="pull"))
    store.keep_images(images)
    PeopleQueue(store).ask([question])
    with served(tmp_path) as [anna]:
        shown = post(anna, "/next")["shown"]
        assert (shown["kind"], len(shown["sides"]), len(shown["sides"][0]), shown["action"]) == ("score", 1, 3, "pull")
        answer(anna, shown, 5)
    [kept] = LabelStore(tmp_path / "store").answers()
    assert not isinstance(kept.answer, Verdict) and kept.answer.value == 1.0


def test_answers_under_forged_tickets_are_not_kept(tmp_path):
    """Repeats of one's own making would lower the share of a person's errors; so would another's ticket."""
    desk = Desk(put_up(tmp_path, 3))
    shown = desk.next("anna", "page")
    assert shown is not None and desk.answer("anna", "page", answer_of(shown, "left"))
    forged = [f"r{random.Random(number).getrandbits(64):016x}" for number in range(50)]
    forged += [f"r{shown['ticket'][1:]}", shown["ticket"][:-1] + f"{int(shown['ticket'][-1], 16) ^ 1:x}"]
    for ticket in forged:
        with pytest.raises(ValueError, match="not shown to you"):
            desk.answer("anna", "page", answer_of({**shown, "ticket": ticket}, "left"))
    with pytest.raises(ValueError, match="not shown to you"):
        desk.answer("ben", "page", answer_of(shown, "left"))
    assert desk.state("anna", "page")["repeats"] == 0 and sum(len(a.said) for a in desk.queue.asked.values()) == 1
