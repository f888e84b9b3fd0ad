"""A chat VLM as a judge: questions in, verdicts out, in batches. The pocket judge and the Qwen-VL families run here."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from rlvlm.errors import JudgeUnavailable
from rlvlm.judges import prompts
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.loading import LoadedVLM, load_vlm
from rlvlm.judges.prompts import Chat
from rlvlm.judges.verdicts import parse_label, parse_score, status_of
from rlvlm.types import Clip, Label, Query, Score, Stamp, Status, Verdict

logger = logging.getLogger(__name__)

MIN_LABEL_MASS = 1e-3
"""Direct mode: where all labels together are less likely than this, the model was not answering: invalid."""
TOP_P = 0.9
_LABELS = (Label.LEFT, Label.RIGHT, Label.TIE)
_THINK = "<think>"

Item = TypeVar("Item", Query, Clip)
Answer = TypeVar("Answer", Verdict, Score)


class ChatJudge:
    """A local chat VLM behind the `Judge` protocol.

    An item that cannot be asked, or on which the model breaks, becomes a failed answer and leaves the rest of its
    batch alone; where memory runs out the batch is halved and asked again.
    """

    def __init__(self, config: JudgeConfig, vlm: LoadedVLM | None = None) -> None:
        """Holds the model; without `vlm`, the one that `config.model` names is loaded.

        Raises:
            JudgeUnavailable: the model cannot be loaded.
        """
        vlm = load_vlm(config) if vlm is None else vlm
        self._mode = config.prompt
        self._batch_size = config.batch_size
        self._model = ChatModel(vlm, config)
        self._stamp = Stamp(
            judge=f"{config.backend}:{config.model or config.backend}",
            revision=vlm.revision,
            prompt=prompts.version(config.prompt),
            decoding=_decoding(config, str(vlm.model.dtype).removeprefix("torch.")),
        )

    @property
    def stamp(self) -> Stamp:
        """Where the answers come from."""
        return self._stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order; `latency_s` is the time its batch took.

        Raises:
            JudgeUnavailable: the model broke on every one of them.
        """
        ask = {"direct": self._label_directly, "single_stage": self._label_in_one, "two_stage": self._label_in_two}
        return self._answer_all(queries, ask[self._mode], self._failed_verdict)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order.

        Raises:
            JudgeUnavailable: the model broke on every one of them.
        """
        return self._answer_all(clips, self._score_batch, self._failed_score)

    def _answer_all(
        self, items: Sequence[Item], ask: Callable[[Sequence[Item]], list[Answer]], failed: Callable[[str], Answer]
    ) -> list[Answer]:
        """Asks what can be asked, in batches; every item gets an answer, failed ones too."""
        problems = [_problem(item) for item in items]
        good = [item for item, problem in zip(items, problems, strict=True) if problem is None]
        answers: list[Answer] = []
        while len(answers) < len(good):
            answers += self._ask(good[len(answers) : len(answers) + self._batch_size], ask, failed)
        if answers and all(answer.status is Status.FAILED for answer in answers):
            raise JudgeUnavailable(f"the judge failed on every one of {len(answers)} questions: {answers[0].text}",
                                   "run `rlvlm doctor`; with a big model try --judge.quantization nf4")
        in_order = iter(answers)
        return [next(in_order) if problem is None else failed(problem) for problem in problems]

    def _ask(
        self, batch: Sequence[Item], ask: Callable[[Sequence[Item]], list[Answer]], failed: Callable[[str], Answer]
    ) -> list[Answer]:
        """Answers to one batch; one that breaks is halved until the item to blame is alone."""
        try:
            with torch.inference_mode():
                return ask(batch)
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            reason, is_too_large = f"{type(error).__name__}: {error}", _is_out_of_memory(error)
        if len(batch) == 1:
            logger.warning("the judge failed on a question: %s", reason)
            return [failed(reason)]
        half = (len(batch) + 1) // 2
        if is_too_large:  # later batches start smaller; outside `except`, so that the traceback holds no tensors
            logger.warning("out of memory with %d questions at once; going on with %d", len(batch), half)
            self._batch_size = half
            torch.cuda.empty_cache()
        return self._ask(batch[:half], ask, failed) + self._ask(batch[half:], ask, failed)

    def _label_directly(self, queries: Sequence[Query]) -> list[Verdict]:
        """Verdicts from the probabilities of the label texts, without generating; temperature has no part in them."""
        start = time.perf_counter()
        log_p = self._model.label_log_p([prompts.compare_messages("direct", query) for query in queries])  # [B, 3]
        elapsed = time.perf_counter() - start
        verdicts = []
        for row in log_p:
            left, right, tie = row.softmax(-1).tolist()
            choice = int(row.argmax())
            label = _LABELS[choice] if row.exp().sum() >= MIN_LABEL_MASS else None
            verdicts.append(Verdict(
                status=status_of(label), label=label, stamp=self._stamp, probabilities=(left, right, tie),
                text=prompts.LABEL_TEXTS[choice], latency_s=elapsed,
            ))
        return verdicts

    def _label_in_one(self, queries: Sequence[Query]) -> list[Verdict]:
        """Verdicts from one answer that holds the analysis and the label."""
        start = time.perf_counter()
        answers = self._model.generate([prompts.compare_messages("single_stage", query) for query in queries])
        elapsed = time.perf_counter() - start
        return [_verdict(self._stamp, answer.readable, answer.text, elapsed) for answer in answers]

    def _label_in_two(self, queries: Sequence[Query]) -> list[Verdict]:
        """Verdicts from a report on the pictures and a second, text-only question about the report."""
        start = time.perf_counter()
        reports = self._model.generate([prompts.compare_messages("two_stage", query) for query in queries])
        answers = self._model.generate([
            prompts.label_messages(query.goal, report.text.rpartition("</think>")[2])
            for query, report in zip(queries, reports, strict=True)
        ])
        elapsed = time.perf_counter() - start
        return [
            _verdict(self._stamp, answer.readable, f"{report.text}\n\n{answer.text}", elapsed)
            for report, answer in zip(reports, answers, strict=True)
        ]

    def _score_batch(self, clips: Sequence[Clip]) -> list[Score]:
        """Scores from a generated percentage."""
        start = time.perf_counter()
        answers = self._model.generate([prompts.score_messages(clip) for clip in clips])
        elapsed = time.perf_counter() - start
        values = [parse_score(answer.readable) for answer in answers]
        return [
            Score(status=Status.INVALID if value is None else Status.OK, value=value, stamp=self._stamp,
                  text=answer.text, latency_s=elapsed)
            for value, answer in zip(values, answers, strict=True)
        ]

    def _failed_verdict(self, reason: str) -> Verdict:
        return Verdict(status=Status.FAILED, label=None, stamp=self._stamp, text=reason)

    def _failed_score(self, reason: str) -> Score:
        return Score(status=Status.FAILED, value=None, stamp=self._stamp, text=reason)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model wrote."""

    text: str
    """All of it."""
    readable: str
    """Without the last line where the token limit tore it: a cut `10` would read as 1."""


class ChatModel:
    """The network behind a judge: chats in, texts or label probabilities out."""

    def __init__(self, vlm: LoadedVLM, config: JudgeConfig) -> None:
        self._vlm = vlm
        self._config = config
        self._label_ids = [
            vlm.processor.tokenizer.encode(text, add_special_tokens=False) for text in prompts.LABEL_TEXTS
        ]

    def generate(self, chats: Sequence[Chat]) -> list[Reply]:
        """The model's reply to each chat: greedy at temperature 0, else sampled from the seed of the config."""
        config, model, tokenizer = self._config, self._vlm.model, self._vlm.processor.tokenizer
        texts = self._texts(chats)
        inputs = self._inputs(texts, chats)
        sampling = {"do_sample": False} if config.temperature == 0 else {
            "do_sample": True, "temperature": config.temperature, "top_p": TOP_P, "top_k": 0,
        }
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(config.seed)
            tokens = model.generate(**inputs, max_new_tokens=config.max_new_tokens, **sampling)
        tokens = tokens[:, inputs["input_ids"].shape[1] :]  # [B, N]
        stops = torch.as_tensor(model.generation_config.eos_token_id, device=tokens.device)
        is_whole = torch.isin(tokens, stops).any(-1).tolist()
        answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        opened = [_THINK + answer if _opens_thought(chat) else answer
                  for chat, answer in zip(texts, answers, strict=True)]
        return [Reply(text, text if whole else text.rpartition("\n")[0])
                for text, whole in zip(opened, is_whole, strict=True)]

    def label_log_p(self, chats: Sequence[Chat]) -> torch.Tensor:
        """[B, 3] log-probability that the reply begins with each label's whole token sequence, float64 on the CPU.

        Where only `-1` takes two tokens (the Qwen tokenizers) this is one forward pass: the first of the two is
        appended to the chat; the position before it gives the first token of all labels, its own the second of `-1`.
        """
        texts = [text + "\n</think>\n\n" if _opens_thought(text) else text for text in self._texts(chats)]
        inputs = self._inputs(texts, chats)
        scores = torch.full((len(chats), len(self._label_ids)), -torch.inf, dtype=torch.float64)
        for prefix in _longest([tuple(ids[:-1]) for ids in self._label_ids]):
            logits = self._vlm.model(**_append(inputs, prefix), logits_to_keep=len(prefix) + 1, use_cache=False).logits
            log_p = logits.double().log_softmax(-1).cpu()  # [B, len(prefix) + 1, vocabulary]
            for index, ids in enumerate(self._label_ids):
                if tuple(ids[:-1]) == prefix[: len(ids) - 1]:
                    scores[:, index] = log_p[:, range(len(ids)), ids].sum(-1)
        return scores

    def _texts(self, chats: Sequence[Chat]) -> list[str]:
        return [self._vlm.processor.apply_chat_template(chat) for chat in chats]

    def _inputs(self, texts: Sequence[str], chats: Sequence[Chat]) -> dict[str, torch.Tensor]:
        """The model's inputs [B, N], left-padded, on its device and in its precision."""
        model = self._vlm.model
        inputs = self._vlm.processor(texts, [prompts.pictures(chat) for chat in chats])
        return {
            name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in inputs.items()
        }


def _longest(prefixes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The prefixes that no other one continues, each once and in order."""
    return [p for p in dict.fromkeys(prefixes) if not any(other != p and other[: len(p)] == p for other in prefixes)]


def _append(inputs: dict[str, torch.Tensor], tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """The inputs with `tokens` added at the end of every chat."""
    shape = inputs["input_ids"].shape
    extended = dict(inputs)
    for name, tensor in inputs.items():
        if tensor.shape == shape:
            fill = {"input_ids": list(tokens), "attention_mask": [1] * len(tokens)}.get(name, [0] * len(tokens))
            tail = torch.tensor(fill, dtype=tensor.dtype, device=tensor.device).expand(shape[0], -1)
            extended[name] = torch.cat([tensor, tail], dim=1)
    return extended


def _problem(item: Query | Clip) -> str | None:
    """Why an item cannot be asked; None where it can."""
    for frames in [item.left, item.right] if isinstance(item, Query) else [item.frames]:
        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != "uint8" or 0 in frames.shape:
            return f"pictures must be [L, H, W, 3] uint8, got {frames.shape} {frames.dtype}"
    try:
        prompts.check_goal(item.goal)
    except ValueError as error:
        return str(error)
    return None


def _verdict(stamp: Stamp, readable: str, text: str, latency_s: float) -> Verdict:
    label = parse_label(readable)
    return Verdict(status=status_of(label), label=label, stamp=stamp, text=text, latency_s=latency_s)


def _decoding(config: JudgeConfig, dtype: str) -> str:
    """Everything that changes an answer at fixed weights and prompt."""
    text = f"temperature={config.temperature:g} max_new_tokens={config.max_new_tokens}"
    seed = f" top_p={TOP_P:g} seed={config.seed}" if config.temperature > 0 else ""
    pixels = f"min_pixels={config.min_pixels} max_pixels={config.max_pixels}"
    return f"{text}{seed} {pixels} dtype={dtype} quantization={config.quantization}"


def _opens_thought(chat: str) -> bool:
    """Whether the template lets the answer begin inside a thought."""
    return chat.rstrip().endswith(_THINK)


def _is_out_of_memory(error: Exception) -> bool:
    words = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error).lower() for word in words)
