"""Remote judges against a real server on the loopback address, well and badly behaved."""

import json
import logging
import math
import pickle
import random
import stat
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from api_server import CUT, ApiServer, Call, Response, completion, error

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Clip, Label, Query, Status, Usage
from rlvlm.judges.build import build_judge
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.dialogues import CUT as CUT_OFF
from rlvlm.judges.dialogues import EMPTY, REFUSAL
from rlvlm.judges.judge import Generator
from rlvlm.labels.store import LabelStore
from rlvlm.runs.settings.tree import to_yaml
from rlvlm.testing import check_judge
from rlvlm.vlms.config import ApiConfig

KEY = "canary-7f3a9c5e1b"


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch):
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    keys = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "GEMINI_API_KEY", "GOOGLE_API_KEY")
    for name in (*proxies, *map(str.lower, proxies), *keys):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RLVLM_TEST_KEY", KEY)
    monkeypatch.setattr("rlvlm.vlms.engines.remote.FIRST_PAUSE_S", 0.02)


def judge(url: str, api: dict[str, Any] | None = None, **changes: Any):
    settings = ApiConfig(**{"base_url": url, "key_env": "RLVLM_TEST_KEY", **(api or {})})
    return build_judge(JudgeConfig(**{"backend": "openai", "model": "m", "api": settings, **changes}))


def grey(shade: int, num: int = 1) -> np.ndarray:
    return np.full((num, 8, 8, 3), shade, np.uint8)


def query(left: int = 10, right: int = 200) -> Query:
    return Query(goal="open the drawer", left=grey(left), right=grey(right))


def flaky(server: ApiServer, response: Response, *, at: int) -> ApiServer:
    """Lets only the pair whose left side has the shade `at` meet the response."""

    def answer(call: Call) -> Response:
        is_hit = bool(call.images) and call.images[0].mean() == at
        return response if is_hit else server.truth(call)

    server.respond = lambda call: (server.calls.append(call), answer(call))[1]
    return server


# --- asked well -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["direct", "single_stage", "two_stage"])
def test_a_query_reaches_the_server_and_its_label_comes_back(prompt):
    # By hand: the server prefers the brighter of two images, and counts 100 tokens in and 5 out per request.
    server = ApiServer()
    with server.running() as url:
        verdicts = judge(url, prompt=prompt).compare([query(10, 200), query(200, 10)])
    assert [v.label for v in verdicts] == [Label.RIGHT, Label.LEFT]
    num_requests = 2 if prompt == "two_stage" else 1
    assert [v.usage for v in verdicts] == [Usage(tokens_in=100 * num_requests, tokens_out=5 * num_requests)] * 2
    assert len(server.calls) == 2 * num_requests
    assert sorted(p.mean() for p in server.calls[0].images) == [10, 200]
    if prompt == "direct":  # 0.9 and 0.06 of what is no other word
        assert verdicts[0].probabilities == pytest.approx((0.0625, 0.9375, 0.0))


@pytest.mark.parametrize("form", ["progress", "rating", "success", "video"])
def test_a_clip_is_scored_in_every_form(form):
    server = ApiServer()
    with server.running() as url:
        scores = judge(url, score=form).score([Clip(goal="open it", frames=grey(s, 3)) for s in (0, 128, 255)])
    assert [score.value for score in scores] == pytest.approx([0.0, 0.5, 1.0], abs=0.01)


def test_it_keeps_the_contract_and_can_write():
    server = ApiServer()
    with server.running() as url:
        one = judge(url)
        check_judge(one)
        assert isinstance(one, Generator)
        parts = [{"type": "text", "text": "How bright?"}, {"type": "image", "image": grey(255)[0]}]
        turn = {"role": "user", "content": parts}
        system = {"role": "system", "content": "Answer shortly."}
        assert one.generate([[system, turn], [turn]], max_new_tokens=7, temperature=0.5) == ["100", "100"]
        body = server.calls[-2].body
        with pytest.raises(UnsupportedQuestion, match="turn 1"):
            one.generate([[{"role": "robber", "content": "hi"}]], max_new_tokens=1, temperature=0.0)
    assert "Answer shortly." in str(body) or "Answer shortly." in str(server.calls[-1].body)
    assert one.stamp.judge.startswith("openai:m@127.0.0.1")


def test_no_more_requests_are_under_way_than_allowed():
    server = ApiServer()
    server.script = [lambda call: replace(server.truth(call), delay_s=0.05)] * 12
    with server.running() as url:
        judge(url, {"concurrency": 3}).compare([query()] * 12)
    assert 1 < server.max_at_once <= 3


def test_parameters_that_a_server_rejects_are_renamed_or_dropped_once():
    refusal = error(400, "logprobs are not supported with this model", param="logprobs")
    server = ApiServer(refusal)
    with server.running() as url:
        one = judge(url)
        first, second = (one.compare([query()])[0] for _ in range(2))
    assert (first.label, first.probabilities, second.label) == (Label.RIGHT, None, Label.RIGHT)
    assert ["logprobs" in call.body for call in server.calls] == [True, False, False]
    server = ApiServer(error(400, "Requested sample logprobs of 20, which is greater than max allowed: 5"))
    with server.running() as url:
        assert judge(url).compare([query()])[0].probabilities is not None
    assert [call.body["top_logprobs"] for call in server.calls] == [20, 5]
    server = ApiServer(error(400, "Unsupported parameter: 'max_tokens'", param="max_tokens"))
    with server.running() as url:
        assert judge(url).compare([query()])[0].label is Label.RIGHT
    assert "max_tokens" in server.calls[0].body and "max_completion_tokens" in server.calls[1].body


BOTH = "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
NO_SEED = '{"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}'


@pytest.mark.parametrize(
    ("refusal", "gone"),
    [
        (error(400, BOTH), {"top_p"}),
        (Response({"error": {"code": 400, "message": "x", "metadata": {"raw": BOTH}}}), {"top_p"}),
        (Response(NO_SEED, status=422), {"seed"}),
        (error(400, "`temperature` is not supported with this model", param="temperature"), {"temperature"}),
    ],
)
def test_parameters_that_an_error_names_are_dropped_with_one_warning(refusal, gone, caplog):
    server = ApiServer(refusal)
    with server.running() as url:
        one = judge(url, {"retries": 0}, temperature=1.0)
        assert [one.compare([query()])[0].label for _ in range(2)] == [Label.RIGHT] * 2
    first, *rest = [set(call.body) for call in server.calls]
    assert len(rest) == 2 and all(first - body == gone for body in rest)
    assert [record.getMessage().partition(";")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        f"m does not take {gone.copy().pop()}"
    ]


def test_a_temperature_that_the_model_does_not_take_is_never_dropped_in_silence():
    server = ApiServer(*[error(400, "Only 1 is supported", param="temperature")] * 9)
    with server.running() as url, pytest.raises(JudgeUnavailable, match="does not take this temperature") as caught:
        judge(url, {"retries": 0}).compare([query()])
    assert "--judge.temperature 1" in caught.value.fix


def test_a_limit_that_is_too_large_is_reported_and_not_sent_under_another_name():
    words = "'max_tokens' or 'max_completion_tokens' is too large: 256. The maximum context length is 128 tokens"
    server = ApiServer(*[error(400, words)] * 9)
    with server.running() as url, pytest.raises(JudgeUnavailable, match="is too large"):
        judge(url).compare([query()])
    assert len(server.calls) == 1


def said(text: Any, *tokens: str, odds: dict[str, float] | None = None, at: int = 0, **choice: Any) -> Response:
    """A reply whose log-probabilities list these tokens; those that could have stood at one place are `odds`."""
    entries = [{"token": token, "logprob": 0.0, "bytes": list(token.encode()), "top_logprobs": []} for token in tokens]
    if odds:
        top = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in odds.items()]
        entries[at]["top_logprobs"] = top
    body = completion(text)
    body["choices"][0] |= {"logprobs": {"content": entries}, **choice}
    return Response(body)


RIGHT, LEFT = {"1": 0.9, "0": 0.1}, {"0": 0.9, "1": 0.1}


@pytest.mark.parametrize(
    ("response", "label", "is_known"),
    [
        # the server lists the thought that it does not show, and the first token of it is a 1
        (said("0", "1", ". left?", "</think>", "\n\n", "0", "<|im_end|>", odds=RIGHT), Label.LEFT, False),
        (said("0", "1", ". left?", "</think>", "\n\n", "0", "<|im_end|>", odds=LEFT, at=4), Label.LEFT, True),
        (said("\n\n0", "hm", "</think>", "\n\n0", odds=LEFT, at=2), Label.LEFT, True),
        # the thought stands in the content, and the template had opened it
        (said("1. left?</think>\n0", "1", ". left?", "</think>", "\n", "0", odds=RIGHT), Label.LEFT, False),
        (said("0", "1", odds=RIGHT), Label.LEFT, False),  # nothing fits: the text is read
        (said("0", "10", odds=RIGHT), Label.LEFT, False),
        (said("-1", "-", odds={"-": 0.9}), Label.TIE, True),  # the first tokens alone
        (said("é 1", "\ufffd", "1", odds=RIGHT), None, False),
        (said("0", "0", odds=RIGHT), None, True),  # greedy, and yet not the likeliest: one of them is wrong
        (said("0.\nFinal answer: 1", "0", ".\nFinal", " answer:", " 1", odds=LEFT), None, True),
    ],
)
def test_probabilities_count_where_the_answer_begins_and_never_against_its_text(response, label, is_known):
    server = ApiServer(response)
    with server.running() as url:
        verdict = judge(url).compare([query()])[0]
    assert (verdict.label, verdict.probabilities is not None) == (label, is_known), verdict
    assert verdict.status is Status.of(label)


def test_a_score_is_not_taken_from_a_thought_and_a_drawn_text_may_differ_from_the_likeliest():
    server = ApiServer(
        said("No", "Yes", " or", "</think>", "No", odds={"Yes": 1.0}), said("No", "No", odds={"Yes": 1.0})
    )
    clip = Clip(goal="open it", frames=grey(0))
    with server.running() as url:
        one = judge(url, score="success")
        assert one.score([clip])[0].value == 0.0
        assert one.score([clip])[0].status is Status.INVALID
        server.script = [said("0", "0", odds=RIGHT)]
        assert judge(url, temperature=1.0).compare([query()])[0].label is Label.RIGHT


# --- answers that are none --------------------------------------------------------------------------------------------


def test_an_unreadable_label_is_invalid_and_never_a_tie():
    server = ApiServer()
    server.script = [
        server.say(""),
        server.say(None),
        server.say("I cannot tell, maybe 1"),
        server.say("", finish="length"),
        server.say("Analysis.\n1", finish="length"),
    ]
    with server.running() as url:
        one = judge(url, prompt="single_stage")
        verdicts = [one.compare([query()])[0] for _ in range(5)]
    assert {v.status for v in verdicts} == {Status.INVALID}
    assert [v.text for v in verdicts] == [EMPTY, EMPTY, "I cannot tell, maybe 1", CUT_OFF, "Analysis.\n1"]


@pytest.mark.parametrize("prompt", ["direct", "single_stage", "two_stage"])
def test_a_refusal_is_invalid_even_if_it_holds_a_label(prompt):
    server = ApiServer()
    server.script = [server.say(None, refusal="-1", odds={"-": 0.99})]
    with server.running() as url:
        verdict = judge(url, prompt=prompt).compare([query()])[0]
    assert (verdict.status, verdict.label, verdict.text) == (Status.INVALID, None, REFUSAL + "-1")
    assert len(server.calls) == 1


def test_a_blocked_question_fails_alone():
    server = ApiServer()
    blocked = (server.say(text, finish=why) for text in ("", "1") for why in ("content_filter", "SAFETY"))
    question = error(400, "triggering content management policy", code="content_filter")
    for response in (*blocked, question):
        with flaky(server, response, at=66).running() as url:
            verdicts = judge(url).compare([query(), query(66, 200), query(200, 10)])
        assert [v.status for v in verdicts] == [Status.OK, Status.FAILED, Status.OK]
        assert "blocked" in verdicts[1].text


# --- faults -----------------------------------------------------------------------------------------------------------


FAULTS = [
    Response({"error": {"message": "boom"}}, status=500),
    Response("bad gateway", status=502, content_type="text/html"),
    Response('{"choices": [', status=200),
    Response("<html>hello</html>", content_type="text/html"),
    *map(Response, ({}, [], "null", {"choices": []}, {"choices": "none"}, {"choices": [{}]}, "[" * 200_000, "\xff")),
    Response({"choices": [{"message": {"content": 5}}]}),
    Response({"choices": [{"message": {"content": [{"type": "text", "text": 5}]}, "finish_reason": "stop"}]}),
    Response({"choices": [{"message": {"content": ""}}]}),
    *(Response(completion(text, finish=why)) for text in ("", "1") for why in ("error", "network_error", "abort")),
    Response({"error": {"message": "Provider returned error", "metadata": {"raw": "boom"}}}),
    Response({"error": "boom"}),
    Response({"choices": [{"error": {"code": 502, "message": "boom"}, "message": {"content": "1"}}]}),
    error(429, "slow down", headers={"Retry-After": "Fri, 31 Dec 999999999999 23:59:59 GMT"}),
    Response(status=CUT),
]


@pytest.mark.slow
def test_a_passing_fault_is_asked_away():
    server = ApiServer()
    with server.running() as url:
        one = judge(url)
        for fault in FAULTS:
            server.script, before = [fault, fault], len(server.calls)
            assert one.compare([query()])[0].label is Label.RIGHT, fault
            assert len(server.calls) == before + 3, fault


def test_a_server_that_stays_broken_is_given_up_after_the_tries_that_were_allowed():
    server = ApiServer(*[error(503, "overloaded")] * 50)
    with server.running() as url, pytest.raises(JudgeUnavailable, match="every one of 2.*503.*overloaded"):
        judge(url, {"retries": 2}).compare([query(), query()])
    assert len(server.calls) == 6
    with pytest.raises(JudgeUnavailable, match="cannot be reached"):
        judge("http://127.0.0.1:9/v1", {"retries": 1}).compare([query()])


def test_a_spent_day_is_asked_once_and_a_minutes_limit_is_waited_for():
    # as OpenRouter says it, in milliseconds since 1970: in the header, and in the body for the provider behind it
    def limited(until_s: float) -> Response:
        reset = {"X-RateLimit-Reset": f"{until_s * 1e3:.0f}", "X-RateLimit-Remaining": "0"}
        return error(429, "Rate limit exceeded", metadata={"headers": reset})

    server, over = ApiServer(limited(time.time() + 0.8)), time.monotonic() + 0.75
    with server.running() as url:
        assert judge(url).compare([query()])[0].label is Label.RIGHT
        assert server.calls[1].at >= over
        server.script = [limited(time.time() + 15 * 3600)] * 9
        with pytest.raises(JudgeUnavailable, match="again in 15.0 hours") as caught:
            judge(url, {"concurrency": 1}).compare([query()] * 4)
    assert len(server.calls) == 3 and "rlvlm resume" in caught.value.fix


def test_an_unrequested_stream_is_read():
    entry = {"token": "1", "logprob": math.log(0.8), "bytes": None}
    top = [entry, {"token": "0", "logprob": math.log(0.2), "bytes": None}]
    chunks = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "1"}, "logprobs": {"content": [{**entry, "top_logprobs": top}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}},
    ]
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    whole = Response(lines + "data: [DONE]\n\n", content_type="text/event-stream")
    torn = Response(lines[: lines.index("stop")], content_type="text/event-stream")
    server = ApiServer(torn, whole)
    with server.running() as url:
        verdict = judge(url).compare([query()])[0]
    assert (verdict.label, verdict.usage) == (Label.RIGHT, Usage(tokens_in=100, tokens_out=5))
    assert verdict.probabilities == pytest.approx((0.2, 0.8, 0.0))
    assert [call.body["stream"] for call in server.calls] == [False, False]


def test_a_bad_request_fails_alone_and_is_not_repeated():
    server = flaky(ApiServer(), error(400, "image is too small"), at=66)
    with server.running() as url:
        verdicts = judge(url, prompt="single_stage").compare([query(), query(66, 1), query(200, 10)])
    assert [v.label for v in verdicts] == [Label.RIGHT, None, Label.LEFT]
    assert verdicts[1].status is Status.FAILED and "too small" in verdicts[1].text and len(server.calls) == 3


def test_retry_after_holds_back_this_request_and_all_others():
    busy = error(429, "slow down", headers={"Retry-After": "0.6"})
    server = ApiServer(busy, lambda call: replace(server.truth(call), delay_s=0.2))
    with server.running() as url:  # the second request is under way already; the third must wait as the first does
        verdicts = judge(url, {"concurrency": 2}).compare([query()] * 4)
    assert [v.label for v in verdicts] == [Label.RIGHT] * 4
    first, _, *rest = [call.at for call in server.calls]
    assert len(rest) == 3 and min(rest) - first >= 0.6


def gemini_error(status: int, message: str, **extra: Any) -> Response:
    """As Gemini's compatible endpoint writes it: in a list."""
    return Response([{"error": {"code": status, "message": message, "status": "X", **extra}}], status=status)


def test_gemini_is_asked_through_its_compatible_endpoint_and_its_errors_are_understood():
    info = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "0.5s"}]
    no_odds = gemini_error(400, 'Invalid JSON payload received. Unknown name "logprobs": Cannot find field.')
    server = ApiServer(no_odds, gemini_error(429, "quota", details=info))
    with server.running() as url:
        one = judge(url, backend="gemini")
        verdict = one.compare([query()])[0]
        assert (verdict.label, verdict.probabilities) == (Label.RIGHT, None)
        assert server.calls[2].at - server.calls[1].at >= 0.5
        assert server.calls[0].path.endswith("/chat/completions") and one.stamp.judge.startswith("gemini:m@")
        server.script = [gemini_error(400, "API key not valid. Please pass a valid API key.")]
        with pytest.raises(JudgeUnavailable, match="does not accept the key"):
            one.compare([query()])


def test_a_wait_beyond_the_deadline_is_not_begun():
    server = ApiServer(*[error(429, "come back tomorrow", headers={"Retry-After": "86400"})] * 9)
    start = time.monotonic()
    with server.running() as url, pytest.raises(JudgeUnavailable, match="tomorrow"):
        judge(url, {"deadline_s": 60.0}).compare([query()] * 4)
    assert time.monotonic() - start < 60.0 and len(server.calls) <= 4


def test_a_slow_server_costs_no_more_than_the_deadline():
    server = ApiServer(*[Response({}, delay_s=20.0)] * 9)
    with server.running() as url:
        one, start = judge(url, {"timeout_s": 0.3, "deadline_s": 0.8}), time.monotonic()
        with pytest.raises(JudgeUnavailable, match=r"no answer within 0\.\d s"):
            one.compare([query()])
        assert 0.3 <= time.monotonic() - start < 20.0, "sooner than it would have answered once"
    assert len(server.calls) <= 3


def test_a_final_error_is_not_retried():
    for status, extra, words in (
        (401, {}, "does not accept the key"),
        (403, {}, "does not accept the key"),
        (404, {}, "no such model"),
        (402, {}, "nothing left"),
        (429, {"code": "insufficient_quota"}, "nothing left"),
        (200, {"code": 402}, "nothing left .*402: no"),  # gateways answer so
        (200, {"code": "401"}, "does not accept the key"),
    ):
        server = ApiServer(*[error(status, "no", **extra)] * 99)
        with server.running() as url, pytest.raises(JudgeUnavailable, match=words):
            judge(url, {"concurrency": 4}).compare([query()] * 60)
        assert len(server.calls) <= 4


def throttled(server: ApiServer, per_s: float) -> ApiServer:
    """A server that answers so many requests a second and refuses the rest, telling when to come back."""
    lock, free_at = threading.Lock(), [0.0]

    def respond(call: Call) -> Response:
        with lock:
            server.calls.append(call)
            wait_s = free_at[0] - time.monotonic()
            if wait_s > 0:
                return error(429, "quota", headers={"Retry-After": f"{wait_s:.3f}"})
            free_at[0] = time.monotonic() + 1 / per_s
        return server.truth(call)

    server.respond = respond
    return server


@pytest.mark.slow
@pytest.mark.parametrize("num", [20, pytest.param(1_500, marks=pytest.mark.full)])
def test_a_quota_slows_a_run_down_and_loses_nothing(num):
    rng = random.Random(0)
    queries = [query(*rng.sample(range(256), 2)) for _ in range(num)]
    server = throttled(ApiServer(), per_s=20.0)
    with server.running() as url:
        one = judge(url, {"concurrency": 4, "retries": 50, "deadline_s": 60.0})
        verdicts = one.compare(queries)
    wanted = [Label.RIGHT if q.right.mean() > q.left.mean() else Label.LEFT for q in queries]
    assert [v.label for v in verdicts] == wanted
    assert len(server.calls) <= 6 * num, "nobody hammers a server that asked for patience"


# --- budget -----------------------------------------------------------------------------------------------------------


def test_the_cap_on_requests_holds_and_paid_answers_are_kept():
    server = ApiServer()
    with server.running() as url:
        one = judge(url, {"max_requests": 5})
        verdicts = one.compare([query()] * 8)
        assert [v.status for v in verdicts].count(Status.OK) == 5
        assert [v.status for v in verdicts].count(Status.FAILED) == 3
        with pytest.raises(JudgeUnavailable, match="budget of 5 requests is spent"):
            one.compare([query()])
    assert len(server.calls) == 5
    server = ApiServer(*[error(500, "boom")] * 50)
    with server.running() as url, pytest.raises(JudgeUnavailable):
        judge(url, {"max_requests": 3, "retries": 9}).compare([query()])
    assert len(server.calls) == 3, "tries count too"


def test_spending_never_passes_its_cap_and_every_answer_has_its_price():
    # By hand: 1,000 tokens in at 10 USD and 50 out at 30 USD a million make 0.0115 USD.
    server = ApiServer()
    server.truth = lambda call: server.say("1", usage=(1_000, 50))
    prices = {"usd_per_million_input": 10.0, "usd_per_million_output": 30.0}
    with server.running() as url:
        one = judge(url, {**prices, "max_cost_usd": 0.5, "concurrency": 2})
        done = 0
        with pytest.raises(JudgeUnavailable, match="may cost .* of 0.5 are spent"):
            while True:
                verdicts = one.compare([query()] * 20)
                done += sum(v.status is Status.OK for v in verdicts)
                paid = [v.usage.cost_usd for v in verdicts if v.usage]
                assert all(cost == pytest.approx(0.0115) for cost in paid)
    true_cost = len(server.calls) * 0.0115
    assert done == len(server.calls) and 0.45 < true_cost <= 0.5
    server.truth = lambda call: server.say("1", usage=None)
    with (
        server.running() as url,
        pytest.raises(JudgeUnavailable, match="spent at most: 2 answers came without a usage"),
    ):
        one = judge(url, {**prices, "max_cost_usd": 0.5, "concurrency": 1})
        [one.compare([query()]) for _ in range(3)]


@pytest.mark.parametrize("both_orders", [False, True])
def test_answers_are_kept_while_others_of_their_batch_are_out(tmp_path, both_orders):
    hangs, server = threading.Event(), ApiServer()
    truth = server.truth
    server.truth = lambda call: (hangs.wait(120) if call.images[0].mean() == 66 else None, truth(call))[1]
    with server.running() as url:
        one = CachedJudge(judge(url, both_orders=both_orders), LabelStore(tmp_path / "store"))
        thread = threading.Thread(target=one.compare, args=([query(66, 5), query(1, 2), query(3, 2), query(7, 7)],))
        thread.start()
        kept, begun = LabelStore(tmp_path / "store"), time.monotonic()
        while len(kept) < 3 and time.monotonic() - begun < 100:
            time.sleep(0.02)
            kept.refresh()
        assert len(kept) == 3 and thread.is_alive(), "a kill now would have lost them"
        assert all(kept.has_images(item.question) for item in kept.answers())
        hangs.set()
        thread.join()
    kept.refresh()
    assert len(kept) == 4 and kept.count_lines()["verdict"] == 4


def test_thoughts_are_paid_for_wherever_a_server_counts_them():
    # By hand: 600 in at 1 USD a million, 2 written and 4,000 thought at 10: 0.0006 + 0.04002 USD.
    total = {"prompt_tokens": 600, "completion_tokens": 2, "total_tokens": 4_602}  # Gemini
    apart = {"prompt_tokens": 600, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 4_000}}
    within = {
        "prompt_tokens": 600,
        "completion_tokens": 4_002,
        "completion_tokens_details": {"reasoning_tokens": 4_000},
    }
    prices = {"usd_per_million_input": 1.0, "usd_per_million_output": 10.0, "max_cost_usd": 0.1}
    for usage in (total, apart, within):
        server = ApiServer(*[Response({**completion("1"), "usage": usage})] * 9)
        with server.running() as url:
            one = judge(url, prices, max_new_tokens=5_000)
            for _ in range(2):  # a third may cost 0.05
                paid = one.compare([query()])[0].usage
                assert paid is not None and paid.cost_usd == pytest.approx(0.04062), usage
            with pytest.raises(JudgeUnavailable, match="0.0812 of 0.1 are spent"):
                one.compare([query()])


def test_a_ledger_holds_the_cap_across_judges_and_restarts(tmp_path):
    server = ApiServer()
    api = {"max_requests": 10, "ledger": str(tmp_path / "run" / "ledger.json")}
    with server.running() as url:
        for _ in range(3):  # two replicas at a time, each started anew
            judges = [judge(url, api) for _ in range(2)]
            threads = [threading.Thread(target=_compare_calmly, args=(one, 3)) for one in judges]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
    assert len(server.calls) == 10
    assert stat.S_IMODE((tmp_path / "run" / "ledger.json").stat().st_mode) == 0o600


def _compare_calmly(one: Any, num: int) -> None:
    try:
        one.compare([query()] * num)
    except JudgeUnavailable as failure:
        assert "budget" in str(failure)


# --- the key ----------------------------------------------------------------------------------------------------------


def our_frames(failure: BaseException) -> str:
    """The traceback as a crash report would hold it, with the locals of every frame but this file's."""
    trace = traceback.TracebackException.from_exception(failure, capture_locals=True)
    frames = [frame for frame in trace.stack if frame.filename != __file__]
    assert len(frames) > 2
    return "".join(traceback.StackSummary.from_list(frames).format()) + str([frame.locals for frame in frames])


def test_the_key_is_sent_and_shows_nowhere(caplog, tmp_path):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)

    def echo(call: Call) -> Response:
        return error(500, f"you sent {call.headers} {KEY}", headers={"X-Echo": KEY})

    parrot = ApiServer()
    parrot.script = [echo, parrot.say(f"Your key is {KEY}.\n1")]
    seen: list[Any] = []
    with caplog.at_level(logging.DEBUG), parrot.running() as url:
        one = judge(url, {"key_file": str(file)}, prompt="single_stage")
        seen += [one, one.stamp, vars(one), *one.compare([query()])]
        for fault in ([echo] * 9, [error(401, f"wrong key {KEY}")], [error(400, f"bad {KEY}")]):
            parrot.script = list(fault)
            with pytest.raises(JudgeUnavailable) as caught:
                one.compare([query()])
            seen += [caught.value, caught.value.fix, vars(caught.value), our_frames(caught.value)]
            seen.append(pickle.dumps(caught.value).decode("latin-1"))
    seen += [to_yaml(one._config), caplog.text, *[record.__dict__ for record in caplog.records]]
    sent = parrot.calls[0].headers
    assert sent["authorization"] == f"Bearer {KEY}"
    assert caplog.records and "[key]" in str(seen[3].text)
    assert not [item for item in seen if KEY in str(item) or KEY in repr(item)]
    with pytest.raises(TypeError):
        pickle.dumps(one)


def test_a_providers_key_is_not_sent_to_another_server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server = ApiServer()
    with server.running() as url:
        judge(url, {"key_env": ""}).compare([query()])
    assert KEY not in str(server.calls[0].headers)


def test_a_key_does_not_follow_a_redirect():
    thief, server = ApiServer(), ApiServer()
    with thief.running() as elsewhere, server.running() as url:
        server.script = [Response({}, status=307, headers={"Location": elsewhere})] * 9
        with pytest.raises(JudgeUnavailable):
            judge(url, {"retries": 1}).compare([query()])
    assert thief.calls == [] and server.calls


# --- on the way there -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proxy", ["socks5://me:secret@127.0.0.1:1", "socks://me:secret@127.0.0.1:1", "http://a:b"])
def test_a_proxy_that_cannot_be_used_is_named_and_does_no_harm_where_it_is_not_on_the_way(proxy, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setenv("NO_PROXY", "localhost,10.0.0.0/8,127.0.0.0/8")  # a network, as clusters write it
    server = ApiServer()
    with server.running() as url:
        assert judge(url).compare([query()])[0].label is Label.RIGHT
    words = f"cannot be reached through the proxy {proxy.replace('me:secret@', '')} of the environment"
    with pytest.raises(JudgeUnavailable, match=words) as caught:
        judge("https://example.invalid/v1")
    assert "secret" not in str(caught.value) and "NO_PROXY" in caught.value.fix


def test_a_dead_proxy_is_named(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:9")
    with pytest.raises(JudgeUnavailable, match="cannot be reached through the proxy http://127.0.0.1:9 of") as caught:
        judge("http://example.invalid/v1", {"retries": 0}).compare([query()])
    assert "secret" not in str(caught.value)


def test_a_file_of_certificates_that_is_gone_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
    with pytest.raises(JudgeUnavailable, match="gone.pem") as caught:
        judge("https://example.invalid/v1")
    assert "SSL_CERT_FILE" in caught.value.fix


# --- what comes with it -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_importing_opens_no_connection_and_loads_no_client():
    program = """
import socket, sys
def refuse(*a, **k): raise AssertionError(f"a connection was opened: {a}")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
import rlvlm.runs.settings.config, rlvlm.cli, rlvlm.vlms.engines.remote
assert "openai" not in sys.modules, "the client loads only when somebody is asked"
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("imported"), done.stderr[-2000:]


@pytest.mark.parametrize("backend", ["pocket", "openai", "gemini"])
def test_building_opens_no_connection(backend, monkeypatch):
    def refuse(*args: Any, **_: Any) -> None:
        raise AssertionError(f"a connection was opened: {args}")

    for name in ("OPENAI_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.setenv(name, KEY)
    for place in ("socket.socket.connect", "socket.socket.connect_ex", "socket.getaddrinfo"):
        monkeypatch.setattr(place, refuse)
    build_judge(JudgeConfig(backend=backend, model="" if backend == "pocket" else "m"))
