"""Configuration of a judge; imports nothing heavy so that the command line starts at once."""

import difflib
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, get_args

from rlvlm.core.checks import PositiveInt, Share, check_bounds
from rlvlm.core.errors import UnsupportedQuestion
from rlvlm.core.guests import JudgeBackend, guest_of, with_guests, with_sections
from rlvlm.core.leads import CodeRef, FilePath, ModelName
from rlvlm.core.references import is_reference
from rlvlm.vlms.config import ApiConfig, EngineConfig, VLMConfig

logger = logging.getLogger(__name__)

BACKENDS: Mapping[str, JudgeBackend] = {
    "pocket": JudgeBackend(build="rlvlm.judges.build:pocket_judge", needs_train=True),
    "transformers": JudgeBackend(build="rlvlm.judges.build:chat_judge", wants_weights=True, needs_train=True),
    "vllm": JudgeBackend(
        build="rlvlm.judges.build:vllm_judge", wants_weights=True, batches_itself=True, needs_train=True
    ),
    "openai": JudgeBackend(build="rlvlm.judges.build:remote_judge", is_remote=True, batches_itself=True),
    "gemini": JudgeBackend(build="rlvlm.judges.build:remote_judge", is_remote=True, batches_itself=True),
    "cached": JudgeBackend(build="rlvlm.judges.build:store_judge"),
}
"""Backends of the core; `backends` has the guests' too."""
_OWN = JudgeBackend(build="rlvlm.judges.own:build")
"""A user's own judge, `module:NAME`."""


@functools.cache
def backends() -> Mapping[str, JudgeBackend]:
    """Returns the backends by name, those of guests included."""
    return with_guests("judges", BACKENDS)


Mode = Literal["two_stage", "single_stage", "direct"]
"""Forms of a comparison."""
Faulty = Literal["refuse", "ok"]
"""What becomes of a judge with a fault that a preflight finds."""
ScoreMode = Literal[
    "progress", "rating", "success", "video", "utility", "statement", "statement_raw", "rubric", "delta"
]
"""Forms of the score of one clip."""
RANDOM = "random"
"""Model name that stands for untrained weights."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Range of a temperature other than 0; below it the scaled log-probabilities overflow a model's number range."""
_WORDED = ("statement", "statement_raw", "rubric", "delta", "video")
"""Forms of score whose sentences may be replaced by a published model's own."""
SHOW_NO_GOAL = ("statement", "statement_raw", "rubric", "delta")
"""Forms of score, from published models, that have no place for an image of the goal."""
_IMPLIED: set[str] = set()
"""Hub names for which the implied backend was already logged."""
POCKET_FIX = "reinstall rlvlm, or make them anew as rlvlm/pocket/judge/CARD.md says"
"""Advice for missing weights of the pocket judge."""
_MAX_POCKET_BYTES = 200_000_000
"""Size of weights above which a folder does not hold a small model such as those that ship."""


def check_temperature(temperature: float) -> float:
    """Returns the temperature.

    Raises:
        ValueError: it is neither 0 nor in the range that models can sample with.
    """
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        rule = f"0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        raise ValueError(f"temperature must be {rule}, got {temperature:g}")
    return temperature


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarityConfig:
    """Conversion of the similarity of image and goal into a score: backends that compare them."""

    baseline: str = ""
    """Text for the scene without the goal, e.g. `a drawer`. With it only change along the line from this text to the
    goal counts, weighted by `alpha`; empty compares image and goal alone."""
    alpha: Share = 0.5
    """Weight of the projection onto that line, in [0, 1]: 0 is plain similarity, 1 the line alone."""
    tie_band: Share = 0.0
    """Largest difference between two scores that counts as no preference, in [0, 1]."""
    template: str = "{goal}"
    """Sentence for the text encoder, with one slot, e.g. `an image of {goal}`; describe a state rather than a task."""
    head: Literal["match", "contrast"] = "match"
    """Head of blip2 that compares. match: probability of a match; contrast: cosine of image and text, as in the
    paper's baseline."""

    def __post_init__(self) -> None:
        check_bounds(self, "judge.similarity")
        if self.template.count("{goal}") != 1 or self.template.replace("{goal}", "").count("{"):
            raise ValueError(f"judge.similarity.template needs one slot {{goal}}, got {self.template!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedConfig:
    """Stored answers that are replayed: backend cached."""

    store: FilePath = ""
    """Folder of the label store to read."""
    judge: str = ""
    """Part of the name of the judge whose answers to use; may be empty if the store has only one."""
    prompt: str = ""
    """Part of the name of that judge's prompt; may be empty if the store has only one."""


@dataclass(frozen=True, kw_only=True, slots=True)
@with_sections("judge")
class JudgeConfig(VLMConfig):
    """Model that judges, and its prompts."""

    section: ClassVar[str] = "judge"
    """Section of these settings on the command line."""

    backend: CodeRef = "pocket"
    """pocket: the small Qwen3-VL that ships with rlvlm; transformers: any chat VLM; vllm: the same, faster, in its
    own environment; openai, gemini: over HTTP; cached: answers from disk; a name that a guest adds, such as human,
    which `rlvlm doctor` lists; my_file:FUNCTION: your own judge. If only judge.model is given, as a hub name or the
    folder of a large model, it is transformers."""
    model: ModelName = ""
    """Hub name or local folder of the weights, or the API's name of the model. For the pocket backend: empty for the
    judge of pairs, `scorer` for the one that scores turns and clips of envs that act, `video` for the one trained on
    27 tasks of LIBERO, or a folder of the same form. `random` gives some backends random weights, as an uninformed
    control."""
    prompt: Mode = "direct"
    """two_stage: describe, then label (as in the paper); single_stage: both in one answer; direct: the label's
    probabilities from one forward pass, no text."""
    score: ScoreMode = "progress"
    """Form of the score of one clip. progress: one number in percent; rating: 1 to 5; success: probability of yes
    from one forward pass; video: percent after written reasoning, from first image, clip and current image; utility:
    one step's usefulness, from the image before it, the action and the image after it, by the probabilities of five
    ratings; statement: probability of True after the statement that the clip shows the goal, and statement_raw:
    without the model's chat template (TOPReward); rubric: 1 to 5 by a rubric on the final state (RoboReward); delta:
    signed percentages between neighbouring images, added up (VLAC)."""
    wording: FilePath = ""
    """JSON file with a published model's own sentences for such a score, or for robometer or rynnvalue, under their
    names in `judges.prompts.SENTENCES`. Empty: ours."""
    both_orders: bool = False
    """Ask each query in both orders, at twice the cost; answers that disagree count as no preference."""
    image_px: PositiveInt = 300
    """Side length of the square images drawn for the judge, in pixels (300 in the paper)."""
    temperature: float = 0.0
    """Sampling temperature: 0 is greedy, 0.01 to 2 samples with top-p 0.9."""
    max_new_tokens: PositiveInt = 256
    """Longest answer, in tokens."""
    batch_size: PositiveInt = 16
    """Queries per forward pass, >= 1; for vllm, chats computed at once."""
    untrained: Literal["refuse", "ok"] = "refuse"
    """Behaviour on a task that the pocket judge was not trained on, where its answers are confident nonsense.
    refuse: do not start the run; ok: start it."""
    faulty: Faulty = "refuse"
    """Reaction if the preflight of a run or of `rlvlm score` finds that the judge's answers say nothing, or that a
    policy can exploit them. refuse: do not start; ok: name the faults and start."""
    store: FilePath = ""
    """Folder of the label store in which answers are kept and looked up; runs may share one. Empty keeps a run's
    answers in its own folder."""
    api: ApiConfig = field(default_factory=ApiConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    similarity: SimilarityConfig = field(default_factory=SimilarityConfig)
    cached: CachedConfig = field(default_factory=CachedConfig)

    def __post_init__(self) -> None:
        VLMConfig.__post_init__(self)  # not super(): a class with slots is made twice, and super() knows the first
        # the default backend with another model: the pocket judge's abilities would refuse what that model can do
        if self.backend == "pocket" and _is_general(self.model):
            object.__setattr__(self, "backend", "transformers")
        if self.backend not in backends() and not self.is_own:
            raise ValueError(
                f"judge.backend is one of {', '.join(backends())}, or my_file:FUNCTION, got {self.backend!r}"
                f"{guest_of('judges', self.backend) or f'; {_meant_backend(self.backend)}'}"
            )
        if (self.wants_weights or self.is_remote) and not self.model:
            raise ValueError(
                f"judge.backend {self.backend} needs judge.model: a hub name, a folder with the weights, "
                "or what the API calls the model"
            )
        if self.is_random and not self.declared.has_random_weights:
            random = [name for name, backend in backends().items() if backend.has_random_weights]
            raise ValueError(
                f"judge.model {RANDOM} is for the backends {' and '.join(random) or 'of guests'}, got {self.backend}; "
                "name a model"
            )
        if self.backend == "cached" and not self.cached.store:
            raise ValueError("judge.backend cached needs judge.cached.store: the folder of a label store")
        # settings without effect would mislead
        if self.both_orders and self.is_human:
            raise ValueError(
                "judge.both_orders has no effect on people, whose page draws the sides at random; leave it out, or ask "
                "several with judge.human.agreement"
            )
        if self.wording and not self.declared.sentences and self.score not in _WORDED:
            worded = [f"the backend {name}" for name, backend in backends().items() if backend.sentences]
            raise ValueError(
                f"judge.wording has no effect on judge.score {self.score}, only on {', '.join([*_WORDED, *worded])}"
            )
        if self.is_remote and self.score == "statement_raw":
            raise ValueError(
                "judge.score statement_raw leaves the chat template out, and a server puts it around every question; "
                "ask with statement, or run the model here (transformers, vllm)"
            )
        check_temperature(self.temperature)

    @property
    def declared(self) -> JudgeBackend:
        """What has to be known of the backend before it is loaded."""
        return backends().get(self.backend, _OWN)

    @property
    def is_own(self) -> bool:
        """Whether the judge is the user's own function, `module:NAME`."""
        return is_reference(self.backend)

    @property
    def refuses_faulty(self) -> bool:
        """Whether a fault that a preflight finds is an error: not where the user starts with a judge that knows nothing
        of the task.
        """
        return self.faulty == "refuse" and self.untrained == "refuse"

    @property
    def is_human(self) -> bool:
        """Whether people answer, which takes minutes or days and needs no model."""
        return self.declared.is_human

    @property
    def ships_weights(self) -> bool:
        """Whether the judge's model ships with rlvlm."""
        return self.backend == "pocket"

    @property
    def knows_few_tasks(self) -> bool:
        """Whether the judge knows only the tasks on its model card, unlike a general model."""
        return self.ships_weights and not self.model

    @property
    def wants_weights(self) -> bool:
        """Whether `model` is a folder of weights or a hub name."""
        return self.declared.wants_weights

    @property
    def is_remote(self) -> bool:
        """Whether the judge answers over an API: it needs no local memory, and each question may cost money."""
        return self.declared.is_remote

    @property
    def reads_states(self) -> bool:
        """Whether the judge compares images with a sentence about a state and takes no instruction."""
        return self.declared.reads_states

    @property
    def is_random(self) -> bool:
        """Whether the weights are random, so that the answers mean nothing."""
        return self.model == RANDOM

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the model runs outside the torch of the process that asks: behind an API or in an engine."""
        return self.is_remote or self.batches_itself

    @property
    def batches_itself(self) -> bool:
        """Whether the engine takes questions as they come; others answer one batch at a time."""
        return self.declared.batches_itself

    @property
    def max_at_once(self) -> int:
        """Maximum number of questions that such an engine is asked at once."""
        # an API's own limit; our engine prepares the next questions meanwhile
        return self.api.concurrency if self.is_remote else 2 * self.batch_size

    @property
    def python(self) -> str:
        """Python interpreter of the environment that the replica needs; empty for rlvlm's own."""
        return self.engine.interpreter if self.backend == "vllm" else ""


def _is_general(model: str) -> bool:
    """Returns whether `judge.model` without a backend names a general chat model: a hub name or a large folder."""
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        # by size and not by name: a folder made by `rlvlm distill` is a pocket judge too
        return sum(file.stat().st_size for file in folder.glob("*.safetensors")) > _MAX_POCKET_BYTES
    is_hub_name = model.count("/") == 1 and not model.startswith((".", "~", "/")) and not model.endswith("/")
    if is_hub_name and model not in _IMPLIED:  # logged once: a config is built many times
        _IMPLIED.add(model)
        logger.warning("judge.model %s is a hub name, so judge.backend is transformers", model)
    return is_hub_name


def _meant_backend(name: str) -> str:
    """Returns advice about the backend that a user who wrote `name` may have meant."""
    near = difflib.get_close_matches(name.lower(), backends(), n=1)
    if near:
        return f"did you mean {near[0]}?"
    if any(word in name.lower() for word in ("gpt", "claude", "grok", "deepseek", "ollama", "azure")):
        return "for a model behind an API: --judge.backend openai --judge.model NAME --judge.api.base-url URL"
    if name.endswith(".py"):
        return f"name the function in it too: {Path(name).stem}:make_judge"
    return "for any chat model: --judge.backend transformers --judge.model Qwen/Qwen3-VL-8B-Instruct"


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """Forms of question that a model's training covers; by default those of a general chat model."""

    compare: frozenset[Mode] = frozenset(get_args(Mode))
    """Values of `JudgeConfig.prompt`; empty for a model that only scores."""
    score: frozenset[ScoreMode] = frozenset(get_args(ScoreMode))
    """Values of `JudgeConfig.score`."""
    goal_pictures: bool = True
    """Whether the model accepts an image of the goal."""

    def check(self, config: JudgeConfig) -> None:
        """Checks that the model can be asked as `config` says.

        Raises:
            UnsupportedQuestion: its training does not cover one of the two forms.
        """
        for field_name, wanted, known in (("prompt", config.prompt, self.compare), ("score", config.score, self.score)):
            if known and wanted not in known:  # a kind that it does not support at all is refused when it is asked
                raise UnsupportedQuestion(
                    f"this judge cannot be asked with judge.{field_name} {wanted}, it knows {', '.join(sorted(known))}",
                    f"use --judge.{field_name} {sorted(known)[0]}, or a general model with "
                    "--judge.backend transformers",
                )
