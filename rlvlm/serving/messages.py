"""What callers send and get, typed: unknown fields are errors, and so are values of another type."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from rlvlm.core.judging import Label, Status
from rlvlm.judges.config import check_temperature
from rlvlm.judges.prompts import MAX_GOAL_CHARS
from rlvlm.serving.media import MAX_IMAGES

MAX_TEXT_CHARS = 16_000
"""Longest text part of a chat."""

Goal = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GOAL_CHARS)]
Picture = Annotated[
    str,
    StringConstraints(min_length=1),
    Field(
        description="A PNG, JPEG or WebP still in base64, bare or as a `data:image/...;base64,` URI. Never an address.",
        json_schema_extra={"format": "byte"},
    ),
]
Pictures = Annotated[list[Picture], Field(min_length=1, max_length=MAX_IMAGES)]
JudgeName = Annotated[str, StringConstraints(max_length=100)]
Words = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]


class WireModel(BaseModel):
    """Base of everything on the wire; answers are made of what the judge gave by the names of its fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, from_attributes=True)


class PreferenceQuestion(WireModel):
    """Which of two clips is nearer to the goal?"""

    goal: Goal
    left: Pictures
    right: Pictures
    goal_picture: Picture | None = None


class PreferenceRequest(PreferenceQuestion):
    """One comparison."""

    backend: JudgeName | None = Field(None, description="Name of the judge; the server's first if absent.")


class PreferenceBatchRequest(WireModel):
    """Several comparisons, answered in order; all their images count together."""

    queries: list[PreferenceQuestion] = Field(min_length=1, max_length=MAX_IMAGES // 2)
    backend: JudgeName | None = None


class ScoreQuestion(WireModel):
    """How much of the goal is reached at the end of a clip?"""

    goal: Goal
    frames: Pictures
    goal_picture: Picture | None = None


class ScoreRequest(ScoreQuestion):
    """One clip."""

    backend: JudgeName | None = None


class ScoreBatchRequest(WireModel):
    """Several clips, answered in order; all their images count together."""

    clips: list[ScoreQuestion] = Field(min_length=1, max_length=MAX_IMAGES)
    backend: JudgeName | None = None


class Probabilities(WireModel):
    """Probabilities of the three labels; they sum to 1."""

    left: float
    right: float
    tie: float


class StampAnswer(WireModel):
    """Which judge answered, and how it was asked."""

    judge: str
    revision: str
    prompt: str
    decoding: str


class PreferenceAnswer(WireModel):
    """A verdict. `label` is left or right when `status` is ok, tie when it is no_preference, else null."""

    status: Status
    label: Label | None
    # a judge gives them by place
    probabilities: Annotated[
        Probabilities | None,
        BeforeValidator(
            lambda odds: dict(zip(("left", "right", "tie"), odds, strict=True)) if isinstance(odds, tuple) else odds
        ),
    ]
    text: str
    latency_s: float
    stamp: StampAnswer


class PreferenceBatchAnswer(WireModel):
    """One verdict per query, in order."""

    answers: list[PreferenceAnswer]


class ScoreAnswer(WireModel):
    """A score in [0, 1]; null unless `status` is ok."""

    status: Status
    value: float | None
    text: str
    latency_s: float
    stamp: StampAnswer


class ScoreBatchAnswer(WireModel):
    """One score per clip, in order."""

    answers: list[ScoreAnswer]


class TextPart(WireModel):
    """Words of a turn."""

    type: Literal["text"]
    text: Words


class ImagePart(WireModel):
    """An image of a turn."""

    type: Literal["image"]
    image: Picture


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatTurn(WireModel):
    """One turn of a chat, in the Qwen format."""

    role: Literal["system", "user", "assistant"]
    content: Words | Annotated[list[Part], Field(min_length=1, max_length=2 * MAX_IMAGES + 2)]


class GenerateRequest(WireModel):
    """A chat to be continued (the reference systems' route)."""

    messages: list[ChatTurn] = Field(min_length=1, max_length=16)
    max_tokens: int = Field(256, ge=1, description="Longest reply; the server has a ceiling of its own.")
    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(
        0.0, ge=0.0, le=2.0, strict=False, description="0 (greedy), or 0.01 to 2."
    )
    backend: JudgeName | None = None


class GenerateAnswer(WireModel):
    """What the model wrote."""

    text: str
    backend: str
    latency_s: float


class BackendOptions(WireModel):
    """What `backend_kwargs` may hold."""

    score_mode: Literal["auto", "percentage", "unit"] = "auto"
    """All three read alike, as in the reference: a number above 1 is a percentage."""
    prompt_template: Words | None = None
    """Asks in these words in place of the judge's own; `{task}` or `{task_instruction}` is the task."""
    system_prompt: Words | None = None
    user_prompt: Words | None = None
    """Asks in these words, with the first image before the clip and the last behind it."""


class VideoScoreRequest(WireModel):
    """A video to be scored (the reference systems' route): a name below the media root, or its frames."""

    task_text: Goal
    video_path: Annotated[str, StringConstraints(min_length=1, max_length=1_024)] | None = None
    frames: Pictures | None = Field(None, description="Instead of video_path: the frames, in order of time.")
    nframes: int = Field(16, ge=1, le=128, description="Frames looked at, evenly spread; 64 at most are decoded.")
    max_pixels: int = Field(200_704, ge=784, le=2_048 * 784, description="Frames with more are made smaller.")
    backend: JudgeName | None = None
    backend_kwargs: BackendOptions | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.video_path is None) == (self.frames is None):
            raise ValueError("give either video_path or frames")
        return self


class VideoScoreAnswer(WireModel):
    """The reference's fields, and what it left out. `score` is null unless `status` is ok: nothing is made up."""

    score: float | None
    model_output: str
    backend: str
    status: Status
    frames_used: int
    """Frames that the judge was shown: it may take fewer than `nframes`."""
    latency_s: float


class ActRequest(WireModel):
    """What a policy sees in a turn."""

    image: Picture
    prompt: Words = Field(description="The words of the turn, as the policy was trained with them.")
    greedy: bool = Field(True, description="The likeliest token each time; false samples.")
    seed: int | None = Field(None, ge=0, lt=2**63, description="Of sampling; the answer says which was taken.")
    policy: JudgeName | None = Field(None, description="Name of the policy; the server's first if absent.")


class ActAnswer(WireModel):
    """What it does. `action` is null where its reply names none of its actions: nothing is made up."""

    text: str
    action: str | None
    log_prob: float
    """Log-probability of the whole reply, nats."""
    value: float
    """What its critic expects from here on."""
    is_complete: bool
    """False where the reply was cut at its longest."""
    seed: int
    policy: str
    latency_s: float


class HealthAnswer(WireModel):
    """Without a token only `status`, which says that the gateway listens."""

    status: Literal["ok"]
    default_backend: str | None = None
    loaded_backends: list[str] | None = None
    """Those that answer now."""
    deploying_backends: list[str] | None = None
    """Those that do not: still loading, being replaced, or broken."""


class ErrorDetail(WireModel):
    """What went wrong, for programs, for people, and what to do."""

    code: str
    message: str
    fix: str


class ErrorAnswer(WireModel):
    """The body of every answer that is not 200."""

    error: ErrorDetail
