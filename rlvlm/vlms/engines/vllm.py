"""Chat VLMs on vLLM, an inference engine that batches by itself, keeps what prompts share, and spreads over GPUs.

vLLM pins its own torch and transformers, so this file is used in an environment of its own: `make vllm` builds it and
`serving` gives it to the replica. The engine runs inside the replica's process: it ends with it,
and leaves no process behind that holds a GPU.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.errors import ModelUnavailable
from rlvlm.vlms.chats import TOP_P, Chat, Reply, pictures_of, whole_answer, without_thought
from rlvlm.vlms.config import EngineConfig, VLMConfig
from rlvlm.vlms.files import locate
from rlvlm.vlms.lora import adapter_mark, check_adapter

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives and dies with this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every replica of a machine is bound to the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VllmEngine:
    """A vLLM engine, started: that takes seconds for a small model, minutes for a big one that is compiled.

    Args:
        config: names model, adapter, precision and seed.
        settings: of the engine itself.
        batch_size: chats at once.
        max_pictures: in one chat.

    Raises:
        ModelUnavailable: vLLM is not installed here, or the weights are missing or cannot be loaded.
    """

    def __init__(self, config: VLMConfig, settings: EngineConfig, *, batch_size: int, max_pictures: int) -> None:
        self._config = config
        self._settings = settings
        folder, self.revision = locate(config.model, config.revision, config.section)
        self._vllm = _import_vllm(settings)
        self._lora, lora_digest = _lora(config, settings)
        try:
            self._engine = self._vllm.LLM(**_engine_words(config, settings, folder, batch_size, max_pictures))
            self._tokenizer: Any = self._engine.get_tokenizer()
        except Exception as error:  # noqa: BLE001 - the engine raises whatever its many parts raise
            raise ModelUnavailable(
                f"vLLM cannot run {config.model}: {_last_line(error)}",
                f"look at the replica's log; where memory is short lower {settings.section}.memory_share or max_tokens",
            ) from error
        dtype = str(self._engine.llm_engine.model_config.dtype).removeprefix("torch.")
        self.traits = (
            f"dtype={dtype} quantization={config.quantization} vllm={self._vllm.__version__}"
            f" structured={settings.structured:d}{lora_digest}"
        )

    def generate(
        self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float, choices: Sequence[str] = ()
    ) -> list[Reply]:
        """The model's reply to each chat: greedy at temperature 0, else sampled from the config's seed.

        Where there are `choices` and `EngineConfig.structured` holds, a reply is one of them: the engine masks every
        token that would lead elsewhere.
        """
        from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports] as above

        held = StructuredOutputsParams(choice=list(choices)) if choices and self._settings.structured else None
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
        written = [output.outputs[0] for output in outputs]
        return [
            Reply(text=whole_answer(text, one.text), is_whole=one.finish_reason == "stop")
            for text, one in zip(texts, written, strict=True)
        ]

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
            if shown := [Image.fromarray(picture) for picture in pictures_of(chat)]:
                request["multi_modal_data"] = {"image": shown}
            requests.append(request)
        return self._engine.generate(requests, sampling, lora_request=self._lora, use_tqdm=False)

    def _texts(self, chats: Sequence[Chat]) -> list[str]:
        return [self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _import_vllm(settings: EngineConfig) -> Any:
    """The package, with the settings that it reads on import."""
    os.environ.update({name: os.environ.get(name, value) for name, value in _SETTINGS.items()})
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = f"{settings.cache_gib:g}"
    try:
        import vllm
    except ImportError as error:
        raise ModelUnavailable(
            f"vLLM cannot be imported here: {_last_line(error)}",
            f"build its environment with make vllm, or name one with --{settings.section}.python, and serve the model",
        ) from error
    return vllm


def _engine_words(
    config: VLMConfig, engine: EngineConfig, folder: Path, batch_size: int, max_pictures: int
) -> dict[str, Any]:
    """Our config in vLLM's words."""
    bounds = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
    return {
        "model": str(folder),
        "dtype": config.dtype,
        "quantization": "bitsandbytes" if config.quantization == "nf4" else None,
        "seed": config.seed,
        "max_model_len": engine.max_tokens or None,
        "max_num_seqs": batch_size,
        "enforce_eager": engine.eager,
        "enable_prefix_caching": engine.prefix_caching,
        "gpu_memory_utilization": engine.memory_share,
        "tensor_parallel_size": engine.tensor_parallel,
        "distributed_executor_backend": "mp" if engine.tensor_parallel > 1 else "uni",
        "limit_mm_per_prompt": {"image": max_pictures, "video": 0},
        "mm_processor_kwargs": {name: value for name, value in bounds.items() if value} or None,
        "enable_lora": bool(config.adapter or engine.lora),
        "max_lora_rank": engine.max_lora_rank,
        "trust_remote_code": False,
        "disable_log_stats": True,
    }


def _lora(config: VLMConfig, settings: EngineConfig) -> tuple[Any, str]:
    """The adapter as vLLM wants it, and its mark in the stamp; None and nothing without one."""
    named = config.adapter or settings.lora
    if not named:
        return None, ""
    folder = Path(named).expanduser()
    check_adapter(folder)
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports] as above

    return LoRARequest("adapter", 1, str(folder.resolve())), adapter_mark(named)


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
