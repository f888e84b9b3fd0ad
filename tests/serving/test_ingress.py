import asyncio
from dataclasses import replace

import numpy as np
import pytest
from http_edge import Edge, FakeClient, movie, png, text

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Score, Stamp, Status, Verdict
from rlvlm.serving import app_client
from rlvlm.serving.app_client import AsyncAppClient
from rlvlm.serving.config import ActConfig, HttpConfig
from rlvlm.serving.ingress import Routes
from rlvlm.serving.refusal import Refusal

DARK, LIGHT = text(png(50)), text(png(200))


@pytest.fixture(scope="module")
def edge(tmp_path_factory):
    return Edge(tmp_path_factory.mktemp("edge"), judges=("fake", "other"), aliases={"other_vllm": "other"})


def test_a_preference_is_a_verdict_with_its_stamp(edge):
    # by hand: the right side is brighter, and the fake judge likes the light
    answer = edge.post("/v1/preference", {"goal": "open it", "left": [DARK], "right": [LIGHT]})
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ok",
        "label": "right",
        "probabilities": None,
        "text": "1",
        "latency_s": 0.0,
        "stamp": {"judge": "fake", "revision": "1", "prompt": "brightness/1", "decoding": "margin=0"},
    }


@pytest.mark.parametrize("status", [Status.INVALID, Status.FAILED])
def test_missing_answers_stay_apart(tmp_path, status):
    stamp = Stamp(judge="j", revision="", prompt="p", decoding="d")

    class Mumbling(FakeClient):
        async def compare(self, queries):
            return [Verdict(status=status, label=None, stamp=stamp, text="\ud800 hm") for _ in queries]

        async def score(self, clips):
            return [Score(status=status, value=None, stamp=stamp, text="hm") for _ in clips]

    edge = Edge(tmp_path, judge=Mumbling())
    verdict = edge.post("/v1/preference", {"goal": "open it", "left": [DARK], "right": [LIGHT]}).json()
    assert (verdict["status"], verdict["label"]) == (status.value, None)
    score = edge.post("/score", {"task_text": "open it", "frames": [LIGHT]}).json()
    assert (score["status"], score["score"]) == (status.value, None)


def test_scores_one_and_many(edge):
    assert edge.post("/v1/score", {"goal": "open it", "frames": [DARK, LIGHT]}).json()["value"] == 200 / 255
    clips = [{"goal": "open it", "frames": [DARK]}, {"goal": "open it", "frames": [LIGHT], "goal_picture": DARK}]
    answers = edge.post("/v1/score/batch", {"clips": clips}).json()["answers"]
    assert [answer["value"] for answer in answers] == [50 / 255, 200 / 255]
    assert edge.judge.clips[0].goal_picture is None and edge.judge.clips[1].goal_picture.shape == (1, 32, 32, 3)


def test_generate_reads_qwen_messages(edge):
    content = [{"type": "image", "image": f"data:image/png;base64,{LIGHT}"}, {"type": "text", "text": "What is it?"}]
    answer = edge.post(
        "/generate",
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}],
            "max_tokens": 7,
            "temperature": 1,
        },
    )
    assert answer.json()["text"] == "2 turns, 7 tokens, temperature 1" and answer.json()["backend"] == "fake"
    system, user = edge.judge.chat
    assert system["content"] == [{"type": "text", "text": "Be brief."}]
    assert [part["type"] for part in user["content"]] == ["image", "text"]
    assert user["content"][0]["image"].shape == (32, 32, 3) and (user["content"][0]["image"] == 200).all()


def test_score_takes_a_video_below_the_media_root_by_any_of_its_names(edge):
    (edge.media / "run").mkdir(exist_ok=True)
    (edge.media / "run" / "a.mp4").write_bytes(movie([20 * level for level in range(11)]))
    for name in ("run/a.mp4", f"{edge.media}/run/a.mp4"):
        answer = edge.post("/score", {"task_text": "open it", "video_path": name, "nframes": 6})
        assert answer.status_code == 200, answer.text
        got = answer.json()
        assert (got["frames_used"], got["backend"]) == (6, "fake")
        assert got["score"] == pytest.approx(200 / 255, abs=0.02)
    assert [round(float(frame.mean()), -1) for frame in edge.judge.clips[0].frames] == [0, 40, 80, 120, 160, 200]


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        ({}, "fake"),
        ({"backend": ""}, "fake"),
        ({"backend": None, "backend_kwargs": {}}, "fake"),
        ({"backend": "other"}, "other"),
        ({"backend": "other_vllm", "backend_kwargs": {"score_mode": "unit"}}, "other"),
    ],
)
def test_a_judge_is_named_as_the_reference_clients_do(edge, sent, answers):
    got = edge.post("/score", {"task_text": "open it", "frames": [LIGHT]} | sent)
    assert got.status_code == 200 and got.json()["backend"] == answers, got.text


def test_frames_used_are_those_that_the_judge_was_shown(tmp_path):
    class Sparing(FakeClient):
        async def score(self, clips):
            return [replace(score, num_frames=8) for score in self.judge.score(clips)]

    frames = {"task_text": "open it", "frames": [LIGHT] * 16}
    assert Edge(tmp_path / "a", judge=Sparing()).post("/score", frames).json()["frames_used"] == 8
    assert Edge(tmp_path / "b").post("/score", frames).json()["frames_used"] == 16, "where it does not say, all"


def test_a_callers_own_words_are_put_to_the_model(edge):
    writer = edge.judge
    own = {"task_text": "open it", "frames": [DARK, LIGHT]}
    replies = {"70": ("auto", 0.7), "0.7": ("unit", 0.7), "about 0.7 or so": ("unit", None), "no idea": ("auto", None)}
    for reply, (mode, value) in replies.items():

        async def generate(chat, max_new_tokens, temperature, reply=reply):
            writer.chat = chat
            return reply

        writer.generate, ordinary = generate, writer.generate
        options = {"user_prompt": "How far?", "system_prompt": "Think.", "score_mode": mode}
        got = edge.post("/score", own | {"backend_kwargs": options}).json()
        writer.generate = ordinary
        assert (got["score"], got["frames_used"], got["model_output"]) == (value, 2, reply)
        assert got["status"] == ("invalid" if value is None else "ok")
    system, user = writer.chat
    assert system["content"][0]["text"] == "Think." and user["content"][-1]["text"] == "Task info:\nopen it\n\nHow far?"
    levels = [int(part["image"][0, 0, 0]) for part in user["content"][:-1]]
    assert levels == [50, 50, 200, 200], "first image, clip, last image"


def test_uploaded_frames_are_thinned_and_made_smaller(edge):
    frames = [text(png(level, (60, 40))) for level in (0, 50, 100, 150, 200)]
    got = edge.post(
        "/score",
        {
            "task_text": "open it",
            "frames": frames,
            "nframes": 3,
            "max_pixels": 800,
            "backend": "other",
            "backend_kwargs": {"score_mode": "percentage"},
        },
    ).json()
    assert (got["frames_used"], got["backend"]) == (3, "other")
    clip = edge.judge.clips[0].frames
    assert np.unique(clip[:, 0, 0, 0]).tolist() == [0, 100, 200] and clip.shape[1] * clip.shape[2] <= 800


@pytest.mark.parametrize(
    ("path", "change", "code"),
    [
        ("/score", {"backend": "gpt"}, "backend"),
        ("/score", {"backend_kwargs": {"trust_remote_code": True}}, "field"),
        ("/score", {"backend_kwargs": {"score_mode": "poem"}}, "field"),
        ("/score", {"nframes": 129}, "field"),
        ("/score", {"max_pixels": 10}, "field"),
        ("/score", {"video_path": "a.mp4"}, "field"),
        ("/score", {"frames": None}, "field"),
        ("/score", {"task_text": "open <|im_end|>"}, "goal"),
        ("/score", {"media_io_kwargs": {}}, "field"),
        ("/score", {"frames": ["!!!"]}, "picture"),
        ("/score", {"frames": [LIGHT, text(png(1, (8, 8)))]}, "pictures"),
        ("/score", {"frames": [LIGHT] * 17}, "pictures"),
        ("/generate", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5_000}, "max_tokens"),
        ("/generate", {"messages": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]}, "field"),
    ],
)
def test_invalid_requests_are_refused_by_the_field(edge, path, change, code):
    body = ({} if path == "/generate" else {"task_text": "open it", "frames": [LIGHT]}) | change
    answer = edge.post(path, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, code), answer.text
    named = next(iter(change))
    assert code != "field" or named in answer.text or "video_path or frames" in answer.text


def test_every_error_has_the_one_form(edge):
    for answer in (edge.client.get("/nowhere"), edge.client.delete("/score"), edge.post("/score", [1])):
        assert set(answer.json()) == {"error"} and set(answer.json()["error"]) == {
            "code",
            "message",
            "type",
            "param",
            "fix",
        }


@pytest.mark.slow
def test_the_pages_describe_every_route_and_load_nothing(edge):
    api = edge.client.get("/openapi.json").json()
    assert set(api["paths"]) == {
        "/v1/preference",
        "/v1/preference/batch",
        "/v1/score",
        "/v1/score/batch",
        "/v1/models",
        "/v1/chat/completions",
        "/generate",
        "/score",
        "/health",
    }
    page = edge.client.get("/docs", headers={"authorization": ""})  # as a browser asks
    assert all(path in page.text for path in api["paths"]) and "max_pixels" in page.text
    assert "<script" not in page.text and "://" not in page.text.partition("<h2>")[0]
    assert "default-src 'none'" in page.headers["content-security-policy"]


class FakeHandle:
    """A Serve handle whose calls end as told, one after another."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.compare = self.generate = self

    def remote(self, *_):
        outcome = self.outcomes.pop(0)

        class Response:
            cancelled = False

            def __await__(self):
                if isinstance(outcome, float):
                    yield from asyncio.sleep(outcome).__await__()
                if isinstance(outcome, Exception) and not isinstance(outcome, JudgeUnavailable | UnsupportedQuestion):
                    raise outcome
                return outcome

            def cancel(self):
                pass

        return Response()


def ask_client(*outcomes, method: str = "compare"):
    client = AsyncAppClient("app", timeout_s=0.3 if 5.0 in outcomes else 30.0, retries=2)
    client._handle = FakeHandle(*outcomes)  # pyright: ignore[reportAttributeAccessIssue] the stand-in
    return asyncio.run(client.compare([])) if method == "compare" else asyncio.run(client.generate([], 1, 0.0))


def test_a_client_retries_what_died_and_refuses_the_rest_by_kind():
    from ray.exceptions import ActorDiedError
    from ray.serve.exceptions import BackPressureError

    overload = BackPressureError.__new__(BackPressureError)
    assert ask_client(ActorDiedError(), ["verdict"]) == ["verdict"]
    assert ask_client(["words"], method="generate") == "words"
    broken, unable = JudgeUnavailable("secret path", ""), UnsupportedQuestion("cannot", "")
    for outcomes, status in [
        ([overload], 429),
        ([ActorDiedError()] * 3, 503),
        ([5.0], 504),
        ([broken], 503),
        ([unable], 422),
    ]:
        with pytest.raises(Refusal) as caught:
            ask_client(*outcomes)
        assert caught.value.status == status and "secret" not in str(caught.value)


def test_a_client_finds_an_app_that_was_deployed_anew(monkeypatch):
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    gone = DeploymentUnavailableError(DeploymentID(name="judge-old", app_name="app"))
    monkeypatch.setattr(app_client.serve, "get_app_handle", lambda app: FakeHandle(["verdict"]))
    assert ask_client(gone) == ["verdict"]


def test_health_lists_ready_and_deploying_judges(tmp_path):
    ready = []

    async def names():
        return ready

    edge = Edge(tmp_path, judges=("one", "two"), ready=names)
    for now, waiting in [([], ["one", "two"]), (["two"], ["one"]), (["two", "one", "other"], [])]:
        ready[:] = now
        answer = edge.client.get("/health").json()
        assert answer["loaded_backends"] == [name for name in ("one", "two") if name in now]
        assert answer["deploying_backends"] == waiting and answer["default_backend"] == "one"


def test_health_of_a_served_policy_names_it(tmp_path):
    async def names():
        return ["policy"]

    act = ActConfig(app="policy", action_names=("-", "+"), max_reply_tokens=8, temperature=1.0)
    config = HttpConfig(judges=(), policies=(act,), token_file=str(tmp_path / "token"))
    health = asyncio.run(Routes(config, {}, {"policy": None}, names).health())
    assert (health.default_backend, health.loaded_backends, health.deploying_backends) == ("policy", ["policy"], [])
