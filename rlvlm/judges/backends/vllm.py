"""Chat VLMs on vLLM, an inference engine that batches by itself, keeps what prompts share, and spreads over GPUs.

vLLM pins its own torch and transformers, so this file is used in an environment of its own: `make vllm` builds it and
`serving.environments` gives it to the judge's replica. The engine runs inside the replica's process: it ends with it,
and leaves no process behind that holds a GPU.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.errors import JudgeUnavailable
from rlvlm.judges import prompts
from rlvlm.judges.chat import ChatJudge
from rlvlm.judges.chat_model import TOP_P, Reply
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.prompts import Chat
from rlvlm.judges.thoughts import whole_answer, without_thought
from rlvlm.vlms.files import locate
from rlvlm.vlms.lora import adapter_mark, check_adapter

MAX_PICTURES = 2 * max(prompts.MAX_FRAMES, prompts.MAX_VIDEO_FRAMES) + 3
"""Most pictures in one chat: two clips, or a clip with start and present, and the goal."""
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives and dies with this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every replica of a machine is bound to the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def build(config: JudgeConfig) -> ChatJudge:
    """The judge that `config` describes, with its engine running.

    Raises:
        JudgeUnavailable: vLLM is not installed here, or the weights are missing or cannot be loaded.
    """
    return ChatJudge(config, VllmModel(config))


class VllmModel:
    """A vLLM engine as the network behind a judge."""

    def __init__(self, config: JudgeConfig) -> None:
        """Starts the engine: seconds for a small model, minutes for a big one that is compiled.

        Raises:
            JudgeUnavailable: vLLM is not installed here, or the weights are missing or cannot be loaded.
        """
        self._config = config
        folder, self._revision = locate(config.model, config.revision, config.section)
        self._vllm = _import_vllm(config)
        self._lora, lora_digest = _lora(config)
        try:
            self._engine = self._vllm.LLM(**_engine_settings(config, folder))
            self._tokenizer: Any = self._engine.get_tokenizer()
        except Exception as error:  # noqa: BLE001 - the engine raises whatever its many parts raise
            raise JudgeUnavailable(
                f"vLLM cannot run {config.model}: {_last_line(error)}",
                "look at the replica's log; where memory is short lower judge.engine.memory_share or max_tokens",
            ) from error
        dtype = str(self._engine.llm_engine.model_config.dtype).removeprefix("torch.")
        self._traits = (
            f"dtype={dtype} quantization={config.quantization} vllm={self._vllm.__version__}"
            f" structured={config.engine.structured:d}{lora_digest}"
        )

    @property
    def revision(self) -> str:
        """Hub commit, or a digest of a local folder."""
        return self._revision

    @property
    def traits(self) -> str:
        """Precision, engine and adapter."""
        return self._traits

    def generate(
        self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float, choices: Sequence[str] = ()
    ) -> list[Reply]:
        """The model's reply to each chat: greedy at temperature 0, else sampled from the config's seed.

        Where there are `choices` and `judge.engine.structured` holds, a reply is one of them: the engine masks every
        token that would lead elsewhere.
        """
        from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports] as above

        held = StructuredOutputsParams(choice=list(choices)) if choices and self._config.engine.structured else None
        sampling = (
            {"temperature": temperature, "top_p": TOP_P, "seed": self._config.seed}
            if temperature
            else {"temperature": 0.0}
        )
        texts = self._texts(chats)
        outputs = self._run(
            [self._tokens(text) for text in texts],
            chats,
            self._vllm.SamplingParams(max_tokens=max_new_tokens, structured_outputs=held, **sampling),
        )
        return [_reply(text, output) for text, output in zip(texts, outputs, strict=True)]

    def choice_log_p(self, chats: Sequence[Chat], choices: Sequence[str]) -> NDArray[np.float64]:
        """[B, C] log-probability that the reply begins with each choice's whole token sequence.

        One request per beginning that the choices share, shortest first, so that prefix caching spares the pictures
        and the chat in all but the first.
        """
        prompt_ids = [self._tokens(without_thought(text)) for text in self._texts(chats)]
        ids_of = [self._tokens(choice) for choice in choices]
        beginnings = sorted({tuple(ids[:end]) for ids in ids_of for end in range(len(ids))}, key=len)
        scores = np.zeros((len(chats), len(choices)))
        for beginning in beginnings:
            following = {
                index: ids[len(beginning)]
                for index, ids in enumerate(ids_of)
                if tuple(ids[: len(beginning)]) == beginning and len(ids) > len(beginning)
            }
            ask = self._vllm.SamplingParams(
                temperature=0.0, max_tokens=1, logprob_token_ids=sorted(set(following.values()))
            )
            outputs = self._run([ids + list(beginning) for ids in prompt_ids], chats, ask)
            for row, output in enumerate(outputs):
                log_p = output.outputs[0].logprobs[0]
                for index, token in following.items():
                    scores[row, index] += log_p[token].logprob
        return scores

    def release_memory(self) -> None:
        """Nothing: the engine took its memory at the start and plans with it."""

    def _run(self, prompt_ids: Sequence[list[int]], chats: Sequence[Chat], sampling: Any) -> list[Any]:
        """The `RequestOutput` for each chat, rendered to `prompt_ids`; `sampling` is a `SamplingParams`."""
        requests = []
        for ids, chat in zip(prompt_ids, chats, strict=True):
            request: dict[str, Any] = {"prompt_token_ids": ids}
            if shown := [Image.fromarray(picture) for picture in prompts.pictures(chat)]:
                request["multi_modal_data"] = {"image": shown}
            requests.append(request)
        return self._engine.generate(requests, sampling, lora_request=self._lora, use_tqdm=False)

    def _texts(self, chats: Sequence[Chat]) -> list[str]:
        return [self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _import_vllm(config: JudgeConfig) -> Any:
    """The package, with the settings that it reads on import."""
    os.environ.update({name: os.environ.get(name, value) for name, value in _SETTINGS.items()})
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = f"{config.engine.cache_gib:g}"
    try:
        import vllm
    except ImportError as error:
        raise JudgeUnavailable(
            f"vLLM cannot be imported here: {_last_line(error)}",
            "build its environment with make vllm, or name one with --judge.engine.python; the judge must be served",
        ) from error
    return vllm


def _engine_settings(config: JudgeConfig, folder: Path) -> dict[str, Any]:
    """Our config in vLLM's words."""
    engine = config.engine
    bounds = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
    return {
        "model": str(folder),
        "dtype": config.dtype,
        "quantization": "bitsandbytes" if config.quantization == "nf4" else None,
        "seed": config.seed,
        "max_model_len": engine.max_tokens or None,
        "max_num_seqs": max(config.batch_size, 1),
        "enforce_eager": engine.eager,
        "enable_prefix_caching": engine.prefix_caching,
        "gpu_memory_utilization": engine.memory_share,
        "tensor_parallel_size": engine.tensor_parallel,
        "distributed_executor_backend": "mp" if engine.tensor_parallel > 1 else "uni",
        "limit_mm_per_prompt": {"image": MAX_PICTURES, "video": 0},
        "mm_processor_kwargs": {name: value for name, value in bounds.items() if value} or None,
        "enable_lora": bool(config.adapter or engine.lora),
        "max_lora_rank": engine.max_lora_rank,
        "trust_remote_code": False,
        "disable_log_stats": True,
    }


def _lora(config: JudgeConfig) -> tuple[Any, str]:
    """The adapter as vLLM wants it, and its mark in the stamp; None and nothing without one."""
    named = config.adapter or config.engine.lora
    if not named:
        return None, ""
    folder = Path(named).expanduser()
    check_adapter(folder)
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports] as above

    return LoRARequest("adapter", 1, str(folder.resolve())), adapter_mark(named)


def _reply(chat: str, output: Any) -> Reply:
    """What vLLM wrote behind a rendered chat."""
    written = output.outputs[0]
    text = whole_answer(chat, written.text)
    return Reply(text, text if written.finish_reason == "stop" else text.rpartition("\n")[0])


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
