"""The parts of a remote judge that need no server: odds, key, budget, settings, waits."""

import email.utils
import errno
import fcntl
import json
import math
import multiprocessing
import os
import pickle
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.judging import Usage
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.dialogues import LABEL_TOKENS, YES_AND_NO, token_masses
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.serving.config import PlacementConfig
from rlvlm.vlms.chats import Refused, TransientError
from rlvlm.vlms.config import ApiConfig
from rlvlm.vlms.engines.budget import Budget, BudgetSpent, Spent
from rlvlm.vlms.engines.remote_failures import failure_of, pause_of, reset_s, retry_after_s
from rlvlm.vlms.engines.secret import Secret, read_key
from rlvlm.vlms.stills import to_png


def test_choices_have_the_probability_of_their_first_tokens():
    # By hand: 0 has 0.5 + 0.1, 1 has 0.2, what begins with a minus 0.1 + 0.04; 0.02 are left, and all are listed.
    tokens = [("0", 0.5), (" 0", 0.1), ("1", 0.2), ("-", 0.1), ("-1", 0.04), ("The", 0.04)]
    assert token_masses(tokens, LABEL_TOKENS) == (pytest.approx([0.6, 0.2, 0.14]), 0.0)
    # No is not listed: it has at most what the last token has, and at most what is left
    assert token_masses([("Yes", 0.5), ("It", 0.3), ("The", 0.06)], YES_AND_NO) == ([0.5, 0.0], 0.06)
    assert token_masses([("Yes", 0.5), ("It", 0.48)], YES_AND_NO) == ([0.5, 0.0], pytest.approx(0.02))
    for odd in ([], [("0", float("nan"))], [("1", 7.0)], [("The", 0.0)]):
        assert token_masses(odd, LABEL_TOKENS) is None


def test_an_image_survives_the_wire_to_the_bit():
    from io import BytesIO

    from PIL import Image

    image = np.random.default_rng(0).integers(0, 256, (7, 9, 3), np.uint8)
    np.testing.assert_array_equal(np.asarray(Image.open(BytesIO(to_png(image)))), image)


def test_a_servers_wish_to_be_left_alone_is_read():
    read: dict[str, float | None] = {"3": 3.0, "0.5": 0.5, "soon": None, "-1": None, "inf": None, "nan": None}
    read |= {"Fri, 31 Dec 999999999999 23:59:59 GMT": None, "Fri, 31 Dec 9999 99:99:99 +99999999999": None}
    assert {text: retry_after_s({"retry-after": text}) for text in read} == read
    assert retry_after_s({}) is None and retry_after_s({"retry-after-ms": "250"}) == 0.25
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert retry_after_s({"retry-after": date}) == pytest.approx(100, abs=60)


def test_the_end_of_a_quota_is_read_in_every_form_that_servers_write():
    soon = time.time() + 90
    read: dict[str, float | None] = {"90": 90, "1m30s": 90, "1h2m3.5s": 3723.5, "250ms": 0.25, "soon": None, "": None}
    read |= {f"{soon:.0f}": 90, f"{soon * 1e3:.0f}": 90, f"{soon - 300:.0f}": 0.0}  # since 1970; past
    read |= {datetime.fromtimestamp(soon, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"): 90}  # Anthropic
    for text, seconds in read.items():
        known = reset_s({"x-ratelimit-reset": text})
        assert known == (None if seconds is None else pytest.approx(seconds, abs=2)), text
    # of OpenAI's two quotas that of tokens is spent; nothing says which of Groq's is, so the first to come
    both = {"x-ratelimit-reset-requests": "2h", "x-ratelimit-reset-tokens": "8s", "x-ratelimit-remaining-tokens": "0"}
    assert reset_s(both) == 8 and reset_s({**both, "x-ratelimit-remaining-tokens": "12"}) == 8
    assert reset_s({**both, "x-ratelimit-remaining-requests": "0"}) == 7200
    spent = {"anthropic-ratelimit-tokens-reset": "2s", "anthropic-ratelimit-tokens-remaining": "0"}
    assert reset_s(spent) == 2 and reset_s({"x-ratelimit-limit": "20"}) is None


def test_when_to_ask_again_stands_in_many_places_of_an_error():
    inner = {"metadata": {"headers": {"X-RateLimit-Reset": "30"}}}
    info = {"details": [{"@type": "google.rpc.RetryInfo", "retryDelay": "43s"}]}
    day = {"details": [*info["details"], {"violations": [{"quotaId": "GenerateRequestsPerDayPerProjectPerModel"}]}]}
    assert pause_of(429, {}, inner) == 30 and pause_of(429, {"retry-after": "5"}, inner) == 5
    assert pause_of(500, {"x-ratelimit-reset": "30"}, {}) is None  # an outage has nothing to do with the quota
    assert pause_of(429, {}, info) == 43 and pause_of(429, {}, day) == math.inf
    assert pause_of(429, {}, {"message": "Limit of 50 requests per day"}) == math.inf
    assert pause_of(429, {"Retry-After": "8"}, {"message": "Limit of 50 requests per day"}) == 8  # a rolling day


REFUSALS = (
    # status, a server's words, what is raised, and a word of its fix
    (400, "At most 1 image(s) may be provided in one request.", Refused, "limit-mm-per-prompt"),
    (400, "Too many images in request: 12 > 10", Refused, "limit-mm-per-prompt"),
    (400, "At most 0 image(s) may be provided in one request.", ModelUnavailable, "judge.model"),
    (400, "unknown variant `image_url`, expected `text`", ModelUnavailable, "judge.model"),
    (404, "No endpoints found that support image input", ModelUnavailable, "judge.model"),
    (400, "m does not support image input", ModelUnavailable, "judge.model"),
    (400, "m is not a multimodal model", ModelUnavailable, "judge.model"),
    (400, "We do not support images larger than 8000 px", Refused, ""),
    (400, "messages.0.content.1.image.source.base64: image exceeds 5 MB maximum", Refused, "image-px"),
    (400, "This model's maximum context length is 4096 tokens", Refused, "max-new-tokens"),
    (400, "prompt is too long: 208310 tokens > 200000 maximum", Refused, "max-new-tokens"),
    (413, "<html><title>413 Request Entity Too Large</title></html>", Refused, "image-px"),
    (400, "<!DOCTYPE html><title>Welcome to nginx!</title>", Refused, "/v1"),
    (403, "<!DOCTYPE html><title>Just a moment...</title>", ModelUnavailable, "/v1"),
    (404, "<html><title>404</title></html>", ModelUnavailable, "base-url"),
    (403, "Your team has used all available credits or reached its spending limit", ModelUnavailable, "top it up"),
    (400, "Your credit balance is too low to access the API", ModelUnavailable, "top it up"),
    (403, "requires moderation and your input was flagged", Refused, ""),
    (403, "Forbidden", ModelUnavailable, "key-env"),
    (429, "You exceeded your current quota, check your plan and billing details", TransientError, "concurrency"),
    (502, "<html><title>502 Bad Gateway</title></html>", TransientError, "status"),
)


@pytest.mark.parametrize(("status", "words", "kind", "fix"), REFUSALS)
def test_a_refusal_has_the_fix_for_its_reason(status, words, kind, fix):
    failure: Any = failure_of(status, words)
    assert type(failure) is kind and fix in failure.fix and bool(fix) == bool(failure.fix), failure
    assert f"HTTP {status}" in str(failure) and "<" not in str(failure)


def test_every_status_has_its_meaning():
    meant = {Refused: (400, 413, 307), ModelUnavailable: (401, 403, 404, 402)}
    meant |= {TransientError: (408, 409, 429, 500, 503, 529)}
    for kind, statuses in meant.items():
        assert {type(failure_of(status, "x")) for status in statuses} == {kind}


# --- the key ----------------------------------------------------------------------------------------------------------


def test_a_secret_is_shown_only_on_request():
    secret = Secret("sk-1")
    assert secret.reveal() == "sk-1" and repr(secret) == str(secret) == f"{secret}" == "[key]"
    assert secret.scrub("a sk-1 b sk-1") == "a [key] b [key]" and Secret("").scrub("abc") == "abc"
    assert bool(secret) and not Secret("")
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_a_key_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "key"
    file.write_text("sk-secret")
    for mode in (0o644, 0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(ModelUnavailable, match=f"mode {mode:o}") as caught:
            read_key(ApiConfig(key_file=str(file)), usual=(), is_needed=True)
        assert caught.value.fix == f"chmod 600 {file}" and "sk-secret" not in str(caught.value)
    file.chmod(0o600)
    assert read_key(ApiConfig(key_file=str(file)), usual=(), is_needed=True).reveal() == "sk-secret"


def test_a_file_that_holds_no_key_is_refused_without_showing_it(tmp_path):
    file = tmp_path / "key"
    for content in (b"", b"  \n", b"two words", b"k\x00ey", b"\xff\xfe", b"x" * 5_000):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(ModelUnavailable, match="does not hold a key"):
            read_key(ApiConfig(key_file=str(file)), usual=(), is_needed=True)
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        read_key(ApiConfig(key_file=str(tmp_path / "none")), usual=(), is_needed=True)


def test_keys_come_from_the_named_place_alone(monkeypatch):
    monkeypatch.setenv("USUAL", "one")
    monkeypatch.setenv("MINE", " two\n")
    assert read_key(ApiConfig(), usual=("ABSENT", "USUAL"), is_needed=True).reveal() == "one"
    assert read_key(ApiConfig(key_env="MINE"), usual=("USUAL",), is_needed=True).reveal() == "two"
    assert not read_key(ApiConfig(base_url="http://localhost:1/v1"), usual=("USUAL",), is_needed=False)
    with pytest.raises(ModelUnavailable, match="NOT_THERE is not set"):
        read_key(ApiConfig(key_env="NOT_THERE"), usual=("USUAL",), is_needed=False)


def test_a_key_in_the_wrong_setting_is_refused_and_not_repeated():
    urls = ("https://sk-abc@host/v1", "https://host/v1?key=sk-abc", "sk-abc", "file:///sk-abc")
    urls += ("http://host:sk-abc/v1", "http://host:99999/v1", "http://[::1/v1")
    keys = (("key_env", "sk-abc"), ("key_file", "sk-abc"), ("key_file", "AIzaabc"))
    for name, value in (*keys, *(("base_url", url) for url in urls)):
        with pytest.raises(ValueError, match="judge.api") as caught:
            ApiConfig(**{name: value})
        assert "sk-abc" not in str(caught.value) and "AIzaabc" not in str(caught.value)


# --- budget -----------------------------------------------------------------------------------------------------------


def test_a_request_is_reserved_at_its_worst_and_settled_at_its_true_price():
    # By hand: 2 USD a million in, 10 out. Worst 1,000 + 100 tokens: 0.003 USD. True 500 + 10: 0.0011 USD.
    budget = Budget(ApiConfig(usd_per_million_input=2, usd_per_million_output=10, max_cost_usd=0.0045))
    reserved = budget.reserve(1_000, 100)
    assert reserved == pytest.approx(0.003)
    with pytest.raises(BudgetSpent, match="0.0030 of 0.0045 are spent"):
        budget.reserve(1_000, 100)
    budget.settle(reserved, Usage(tokens_in=500, tokens_out=10, cost_usd=budget.price(500, 10)))
    assert budget.spent.cost_usd == pytest.approx(0.0011) and budget.spent.requests == 1
    lost = budget.reserve(1_000, 100)
    budget.settle(lost, None)  # no answer came: it may have been charged
    assert budget.spent == Spent(requests=2, cost_usd=pytest.approx(0.0041))


def test_without_prices_requests_are_counted_and_cost_nothing():
    budget = Budget(ApiConfig(max_requests=2))
    assert budget.price(1, 1) is None and [budget.reserve(1, 1), budget.reserve(1, 1)] == [0.0, 0.0]
    with pytest.raises(BudgetSpent, match="2 requests"):
        budget.reserve(1, 1)


def _reserve_many(ledger: str, num: int) -> None:
    budget = Budget(ApiConfig(ledger=ledger, usd_per_million_input=1.0))
    for _ in range(num):
        budget.settle(budget.reserve(100, 0), Usage(tokens_in=50, tokens_out=0, cost_usd=5e-5))


def test_a_ledger_counts_for_several_processes_at_once(tmp_path):
    ledger = str(tmp_path / "ledger")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_reserve_many, args=(ledger, 200)) for _ in range(3)]
    [process.start() for process in processes]
    [process.join() for process in processes]
    spent = Budget(ApiConfig(ledger=ledger)).spent
    assert spent.requests == 600 and spent.cost_usd == pytest.approx(600 * 5e-5)
    assert len(Path(ledger).read_text().splitlines()) == 1


def test_a_ledger_that_cannot_be_locked_is_refused_by_its_file_system(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ModelUnavailable, match="cannot be locked .flock: .*file system is .* at /") as caught:
        Budget(ApiConfig(ledger=str(tmp_path / "ledger"))).reserve(1, 1)
    assert "another disk: judge.api.ledger" in caught.value.fix


def test_a_damaged_ledger_is_not_taken_for_an_empty_one(tmp_path):
    ledger = tmp_path / "ledger"
    for content in ("{", "[1]", json.dumps({"requests": "many"})):
        ledger.write_text(content)
        with pytest.raises(ModelUnavailable, match="ledger .* cannot be read"):
            Budget(ApiConfig(ledger=str(ledger))).reserve(1, 1)
    with pytest.raises(ModelUnavailable, match="cannot be opened"):
        Budget(ApiConfig(ledger=str(ledger / "below"))).reserve(1, 1)
    assert os.listdir(tmp_path) == ["ledger"]


def test_a_batch_may_not_take_longer_than_its_caller_waits():
    # By hand: 16 questions, 4 at a time, 100 s each may take 400 s.
    judge = JudgeConfig(backend="openai", model="m", api=ApiConfig(concurrency=4))
    StepsRun(task="tiny", judge=JudgeConfig(backend="openai", model="m"))
    StepsRun(task="tiny", judge=judge, serve=PlacementConfig(timeout_s=401))
    with pytest.raises(ValueError, match="may take 400 s, serve.timeout_s is 120"):
        StepsRun(task="tiny", judge=judge)
