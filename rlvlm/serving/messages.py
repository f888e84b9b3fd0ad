"""Typed requests and answers: unknown fields are errors, and so are values of another type."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from rlvlm.core.judging import Label, Status
from rlvlm.judges.config import check_temperature
from rlvlm.judges.prompts import MAX_GOAL_CHARS
from rlvlm.serving.config import MAX_IMAGES

MAX_TEXT_CHARS = 16_000
"""Maximum length of a text part of a chat, characters."""

Goal = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GOAL_CHARS)]
Picture = Annotated[
    str,
    StringConstraints(min_length=1),
    Field(
        description="A PNG, JPEG or WebP still in base64, bare or as a `data:image/...;base64,` URI. Never an address.",
        json_schema_extra={"format": "byte"},
    ),
]
Pictures = Annotated[
    list[Picture],
    Field(min_length=1, max_length=MAX_IMAGES, description="/v1/models says how many images a request may have here."),
]
JudgeName = Annotated[str, StringConstraints(max_length=100)]
Words = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]


class WireModel(BaseModel):
    """Base of all requests and answers; answers are filled from the judge's results by field name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, from_attributes=True)


class PreferenceQuestion(WireModel):
    """The question which of two clips is nearer to the goal."""

    goal: Goal
    left: Pictures
    right: Pictures
    goal_picture: Picture | None = None


class PreferenceRequest(PreferenceQuestion):
    """A request for one comparison."""

    backend: JudgeName | None = Field(None, description="Name of the judge; the server's first if absent.")


class PreferenceBatchRequest(WireModel):
    """A request for several comparisons, answered in order; limits apply to all their images together."""

    queries: list[PreferenceQuestion] = Field(min_length=1, max_length=MAX_IMAGES // 2)
    backend: JudgeName | None = None


class ScoreQuestion(WireModel):
    """The question how much of the goal is reached at the end of a clip."""

    goal: Goal
    frames: Pictures
    goal_picture: Picture | None = None


class ScoreRequest(ScoreQuestion):
    """A request to score one clip."""

    backend: JudgeName | None = None


class ScoreBatchRequest(WireModel):
    """A request to score several clips, answered in order; limits apply to all their images together."""

    clips: list[ScoreQuestion] = Field(min_length=1, max_length=MAX_IMAGES)
    backend: JudgeName | None = None


class Probabilities(WireModel):
    """Probabilities of the three labels; they sum to 1."""

    left: float
    right: float
    tie: float


class StampAnswer(WireModel):
    """Identity and settings of the judge that answered."""

    judge: str
    revision: str
    prompt: str
    decoding: str


class PreferenceAnswer(WireModel):
    """A verdict. `label` is left or right when `status` is ok, tie when it is no_preference, else null."""

    status: Status
    label: Label | None
    # a judge returns them by position
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
    """Verdicts, one per query, in order."""

    answers: list[PreferenceAnswer]


class ScoreAnswer(WireModel):
    """A score in [0, 1]; null unless `status` is ok."""

    status: Status
    value: float | None
    text: str
    latency_s: float
    stamp: StampAnswer


class ScoreBatchAnswer(WireModel):
    """Scores, one per clip, in order."""

    answers: list[ScoreAnswer]


class TextPart(WireModel):
    """Text of a turn."""

    type: Literal["text"]
    text: Words


class ImagePart(WireModel):
    """Image of a turn."""

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
    """The model's reply."""

    text: str
    backend: str
    latency_s: float


class ImageUrl(BaseModel):
    """Image in OpenAI's form; only data: URIs are read, nothing is fetched."""

    url: Picture


class ImageUrlPart(BaseModel):
    """Image of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class UserMessage(BaseModel):
    """Message of a chat completion; only the last of a user is read."""

    role: str
    content: (
        Words
        | Annotated[
            list[Annotated[TextPart | ImageUrlPart, Field(discriminator="type")]], Field(max_length=2 * MAX_IMAGES + 2)
        ]
        | None
    ) = None


class ChatCompletionRequest(BaseModel):
    """A question to a judge in OpenAI's form. Further fields are allowed; those that ask for another form of answer are
    refused, and those of sampling are ignored.
    """

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, StringConstraints(max_length=200)] = Field(
        description="NAME#percent, NAME#trend, NAME#grade or NAME#json."
    )
    messages: list[UserMessage] = Field(min_length=1, max_length=16)
    goal: Goal | None = Field(None, description="In place of the text of the last user message.")
    stream: bool | None = None
    n: int | None = None


class BackendOptions(WireModel):
    """Allowed content of `backend_kwargs`."""

    score_mode: Literal["auto", "percentage", "unit"] = "auto"
    """Accepted for compatibility: all three are read alike, as in the reference; a number above 1 is a percentage."""
    prompt_template: Words | None = None
    """Prompt that replaces the judge's own; `{task}` or `{task_instruction}` is the task."""
    system_prompt: Words | None = None
    user_prompt: Words | None = None
    """Prompt that replaces the judge's own, with the first image before the clip and the last after it."""


class VideoScoreRequest(WireModel):
    """A video to score (the reference systems' route): a file name below the media root, or its frames."""

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
    """The reference's fields, and what it left out. `score` is null unless `status` is ok, never made up."""

    score: float | None
    model_output: str
    backend: str
    status: Status
    frames_used: int
    """Number of frames shown to the judge: it may use fewer than `nframes`."""
    latency_s: float


class ActRequest(WireModel):
    """Observation of a policy in a turn."""

    image: Picture
    prompt: Words = Field(description="The words of the turn, as the policy was trained with them.")
    greedy: bool = Field(True, description="The likeliest token each time; false samples.")
    seed: int | None = Field(None, ge=0, lt=2**63, description="Of sampling; the answer says which was taken.")
    policy: JudgeName | None = Field(None, description="Name of the policy; the server's first if absent.")


class ActAnswer(WireModel):
    """Action of a policy. `action` is null if its reply names none of its actions, never made up."""

    text: str
    action: str | None
    log_prob: float
    """Log-probability of the whole reply, nats."""
    value: float
    """Value that its critic predicts from here on."""
    is_complete: bool
    """Whether the reply ended by itself; False if it was cut at the maximum length."""
    seed: int
    policy: str
    latency_s: float


class HealthAnswer(WireModel):
    """Health of the server; without a token only `status`, which says that it listens."""

    status: Literal["ok"]
    default_backend: str | None = None
    loaded_backends: list[str] | None = None
    """Judges and policies that answer now."""
    deploying_backends: list[str] | None = None
    """Judges and policies that do not answer: still loading, being replaced, or broken."""


class ServerFacts(WireModel):
    """Version, limits and judges of the server, for rlvlm's own client."""

    version: str
    max_images: int
    """Maximum number of images in a request."""
    body_bytes: int
    """Maximum size of a request's body."""
    judges: dict[str, StampAnswer]
    """Judges that answer now, the default first."""


class ModelCard(WireModel):
    """A judge with its form of answer, as `model` of a chat completion names it."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "rlvlm"


class ModelList(WireModel):
    """Models for `/v1/chat/completions`, in OpenAI's form."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    rlvlm: ServerFacts


class ErrorDetail(WireModel):
    """OpenAI's fields: code for programs, message for people, type and parameter; and the fix."""

    code: str
    message: str
    type: str
    param: str | None
    fix: str


class ErrorAnswer(WireModel):
    """Body of every answer with a status other than 200."""

    error: ErrorDetail
