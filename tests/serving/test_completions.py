"""`/v1/chat/completions` and `/v1/models`: asked by OpenAI's own client, and read by the parsers of others."""

import json
import re

import numpy as np
import openai
import pytest
from http_edge import Edge, FakeClient, png, text

from rlvlm.core.judging import Score, Status, Verdict
from rlvlm.testing import FakeJudge


def uri(level: int, side: int = 32) -> str:
    return f"data:image/png;base64,{text(png(level, (side, side)))}"


def message(*levels: int, said: str | None = "open the drawer") -> list[dict]:
    images = [{"type": "image_url", "image_url": {"url": uri(level), "detail": "low"}} for level in levels]
    return [{"role": "user", "content": [*images, *([{"type": "text", "text": said}] if said else [])]}]


class Silent(FakeClient):
    """A judge all of whose answers have one status."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status

    async def score(self, clips):
        return [Score(status=self.status, value=None, stamp=self.judge.stamp, text="hm") for _ in clips]

    async def compare(self, queries):
        return [Verdict(status=self.status, label=None, stamp=self.judge.stamp, text="hm") for _ in queries]


@pytest.fixture(scope="module")
def edge(tmp_path_factory):
    return Edge(tmp_path_factory.mktemp("edge"), judges=("fake", "other"), aliases={"short": "other"})


def ask(edge: Edge, model: str, messages: list[dict], **more):
    return edge.post("/v1/chat/completions", {"model": model, "messages": messages, **more})


def reply(edge: Edge, model: str, messages: list[dict], **more) -> str:
    answer = ask(edge, model, messages, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_a_judge_answers_in_the_words_that_the_model_names(edge):
    # by hand: the fake judge scores the last image's brightness and prefers the lighter one; 51 / 255 is a fifth
    assert reply(edge, "fake#percent", message(0, 51)) == reply(edge, "fake", message(51)) == "20"
    assert [reply(edge, "short#grade", message(level)) for level in (51, 204)] == ["GRADE: failure", "GRADE: success"]
    pairs = [(10, 90, 200), (200, 90, 10), (9, 9)]
    assert [reply(edge, "fake#trend", message(*levels)) for levels in pairs] == ["positive", "negative", "unclear"]
    said = json.loads(reply(edge, "other#json", message(51)))
    assert (said["status"], said["value"], said["judge"]["judge"]) == ("ok", 0.2, FakeJudge().stamp.judge)


def test_the_goal_is_a_line_of_a_longer_prompt_or_a_field_of_the_body(edge):
    graded = "You are grading one trial.\n\nTask instruction: close the box\n\nRubric:\nnone\n\nreply with one line"
    system = [{"role": "system", "content": "You are a judge."}]
    for messages, more, goal in (
        (system + message(51, said=graded), {}, "close the box"),
        (message(51, said="Task: lift the can\n\n"), {}, "lift the can"),
        (message(51, said=None), {"goal": "push it"}, "push it"),
        (
            message(9, said="before") + [{"role": "assistant", "content": "no"}] + message(51, said="and now"),
            {},
            "and now",
        ),
    ):
        assert reply(edge, "fake#percent", messages, **more, temperature=0.7, max_tokens=8) == "20"
        assert edge.judge.clips[0].goal == goal


def test_openais_client_asks_and_gets_clear_errors(edge):
    with edge.listening() as url, openai.OpenAI(base_url=f"{url}/v1", api_key=edge.token, max_retries=0) as client:
        models = [model.id for model in client.models.list()]
        assert models == [
            f"{name}#{form}" for name in ("fake", "other") for form in ("percent", "trend", "grade", "json")
        ]
        said = client.chat.completions.create(model="fake#percent", messages=message(51), temperature=0)  # pyright: ignore
        assert said.choices[0].message.content == "20" and said.choices[0].finish_reason == "stop"
        assert said.model_extra is not None and said.model_extra["rlvlm"]["status"] == "ok"
        for more, error, code in (
            ({"stream": True}, openai.BadRequestError, "unsupported_parameter"),
            ({"n": 2}, openai.BadRequestError, "unsupported_parameter"),
            (
                {"tools": [{"type": "function", "function": {"name": "f"}}]},
                openai.BadRequestError,
                "unsupported_parameter",
            ),
            ({"model": "nobody#percent"}, openai.NotFoundError, "model_not_found"),
            ({"model": "fake#verse"}, openai.NotFoundError, "model_not_found"),
            ({"messages": message(said="no image")}, openai.UnprocessableEntityError, "pictures"),
            ({"messages": message(51, said=None)}, openai.UnprocessableEntityError, "goal"),
        ):
            with pytest.raises(error) as caught:
                client.chat.completions.create(**({"model": "fake#percent", "messages": message(51)} | more))
            assert caught.value.code == code and caught.value.type == "invalid_request_error"
        assert "other#json" in str(caught.value) or "goal" in str(caught.value)
    with edge.listening() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x" * 40) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


@pytest.mark.parametrize(("status", "code"), [(Status.INVALID, 502), (Status.FAILED, 503)])
def test_a_missing_answer_is_an_error_or_unclear_and_never_a_number(tmp_path, status, code):
    edge = Edge(tmp_path, judge=Silent(status))
    for form in ("percent", "grade"):
        answer = ask(edge, f"fake#{form}", message(9))
        assert answer.status_code == code and not re.search(r"\d|GRADE", answer.json()["error"]["message"])
    trend = ask(edge, "fake#trend", message(9, 200))
    assert (
        trend.status_code == 503 if status is Status.FAILED else reply(edge, "fake#trend", message(9, 200)) == "unclear"
    )
    assert json.loads(reply(edge, "fake#json", message(9)))["status"] == status
    assert json.loads(reply(edge, "fake#json", message(9)))["value"] is None


def test_the_number_of_images_in_a_request_is_a_setting(tmp_path):
    for count, status in ((16, 422), (256, 200)):
        edge = Edge(tmp_path / str(count), max_images=count)
        clips = [{"goal": "open it", "frames": [text(png(level, (8, 8)))] * 8} for level in range(32)]
        answer = edge.post("/v1/score/batch", {"clips": clips})
        assert answer.status_code == status and (
            status == 200 or f"at most {count} images here, got 256" in answer.text
        )
        assert edge.client.get("/v1/models").json()["rlvlm"]["max_images"] == count
    assert [clip["value"] for clip in answer.json()["answers"]] == list(np.arange(32) / 255)
