"""Chat VLMs on vLLM, an inference engine with continuous batching, prefix caching and multi-GPU support.

vLLM pins its own torch and transformers, so this file is used in an environment of its own: `make vllm` builds it and
`serving` runs the replica in it. `AsyncLLM` computes in child processes; each of them calls `end_with_parent`, so that
none outlives the replica and keeps holding a GPU.
"""

import ctypes
import itertools
import math
import multiprocessing
import os
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.errors import ModelUnavailable
from rlvlm.vlms.chats import (
    TOP_P,
    Chat,
    ChatReply,
    ChatRequest,
    Pixels,
    images_of,
    rendered,
    whole_answer,
    without_thought,
)
from rlvlm.vlms.config import EngineConfig, VLMConfig
from rlvlm.vlms.engines.loop import LoopThread
from rlvlm.vlms.files import locate
from rlvlm.vlms.images import resize
from rlvlm.vlms.lora import adapter_mark, check_adapter
from rlvlm.vlms.processors import adds_begin, load_processor

T = TypeVar("T")
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU: one process beside ours computes, not two
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise every replica of a machine is bound to the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_PR_SET_PDEATHSIG = 1


class VllmCore:
    """A started `AsyncLLM`; starting takes seconds for a small model, minutes for a big one that is compiled.

    It runs on an event loop in a thread of its own; its coroutines may be awaited on any loop, and cancelling a caller
    aborts its request.

    Args:
        config: model, precision and seed.
        settings: settings of the engine itself.
        max_requests: maximum number of concurrent requests; more of them wait.
        max_images: maximum number of images in one request.
        options: further arguments of vLLM's `AsyncEngineArgs`.

    Raises:
        ModelUnavailable: vLLM is not installed here, or the weights are missing or cannot be loaded.
    """

    def __init__(
        self, config: VLMConfig, settings: EngineConfig, *, max_requests: int, max_images: int, **options: Any
    ) -> None:
        folder, self.revision = locate(config.model, config.revision, config.section)
        self.vllm = _import_vllm(settings)
        self._loop = LoopThread("vllm")
        self._numbers = itertools.count()
        options = _engine_args(config, settings, folder, max_requests, max_images) | options
        try:
            self._engine = self.run(self._start(options))
        except Exception as error:  # noqa: BLE001 - the engine raises whatever its many parts raise
            raise ModelUnavailable(
                f"vLLM cannot run {config.model}: {_last_line(error)}",
                f"look at the replica's log; where memory is short lower {settings.section}.memory_share or max_tokens",
            ) from error
        self.processor: Any = load_processor(folder, self._engine.model_config.hf_config, config)
        """Processor that renders chats, as on our own engines: older models have their template beside it alone."""
        self._images: Any = self.processor.image_processor
        self._resizes = hasattr(self._images, "merge_size")
        self.window: int = self._engine.model_config.max_model_len
        """Maximum tokens of prompt and reply together."""
        self.dtype = str(self._engine.model_config.dtype).removeprefix("torch.")
        """Dtype of the weights, such as `bfloat16`."""

    async def _start(self, options: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports] - not installed here
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports] - likewise

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` and returns its result; for callers without an event loop, in any thread."""
        return self._loop.run(work)

    async def ask(
        self, prompt_ids: Sequence[int], images: Sequence[Pixels], sampling: dict[str, Any], lora: Any = None
    ) -> Any:
        """Returns the whole `RequestOutput` of one request, which is aborted if the awaiting task is cancelled.

        Args:
            prompt_ids: with one token for each image; the engine expands it to as many as the image takes.
            images: [H, W, 3] each.
            sampling: arguments of vLLM's `SamplingParams`.
            lora: a `LoRARequest`; None: no adapter.

        Raises:
            ValueError: the engine does not accept this request, such as a prompt beyond its window.
            RuntimeError: it failed on this request.
            ModelUnavailable: the engine is dead.
        """
        return await self._loop.on_loop(self._ask(prompt_ids, images, sampling, lora))

    async def _ask(
        self, prompt_ids: Sequence[int], images: Sequence[Pixels], sampling: dict[str, Any], lora: Any
    ) -> Any:
        from vllm.exceptions import VLLMClientError, VLLMError  # pyright: ignore[reportMissingImports] - as above
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports] - as above
        from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports] - as above

        request: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
        if images:
            if self._resizes:  # by Pillow as everywhere else: the resizing of vLLM's environment rounds differently,
                # which moved a small judge's probabilities by 0.008
                images = [resize(image, self._images) for image in images]
                request["mm_processor_kwargs"] = {"do_resize": False}
            request["multi_modal_data"] = {"image": list(map(Image.fromarray, images))}
        params = self.vllm.SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        name = f"r{next(self._numbers)}"
        try:
            # only the final output: each token would cost a wake-up
            outputs = [output async for output in self._engine.generate(request, params, name, lora_request=lora)]
        except EngineDeadError as error:
            raise ModelUnavailable("vLLM's engine has died", "look at the replica's log") from error
        except VLLMClientError as error:
            raise ValueError(_last_line(error)) from error
        except VLLMError as error:
            raise RuntimeError(f"vLLM failed on a request: {_last_line(error)}") from error
        return outputs[-1]

    @property
    def is_dead(self) -> bool:
        """Whether its processes have died: it cannot answer any more."""
        return self._engine.errored

    async def add_lora(self, lora: Any) -> None:
        """Loads an adapter, a `LoRARequest`, beside those already loaded; raises the engine's errors.

        Raises:
            ModelUnavailable: the adapter has layers that the model has not.
        """
        await self._loop.on_loop(self._engine.add_lora(lora))
        # of each worker: it has all names, whatever part of the weights it holds
        found = await self._loop.on_loop(self._engine.collective_rpc("misfits", args=(lora.lora_int_id,)))
        if odd := sorted({name for names in found for name in names}):
            await self.remove_lora(lora)
            raise ModelUnavailable(
                f"the adapter in {lora.lora_path} does not fit this model on vLLM, as at {odd[0]}",
                "give the adapter the model that it was trained on, or serve it with the backend transformers",
            )

    async def remove_lora(self, lora: Any) -> None:
        """Unloads an adapter."""
        await self._loop.on_loop(self._engine.remove_lora(lora.lora_int_id))

    async def replace_weights(self, method: str, **arguments: Any) -> None:
        """Calls `method` of the workers to replace the model's weights; raises the engine's errors."""
        await self._loop.on_loop(self._engine.collective_rpc(method, kwargs=arguments))
        # it empties its image caches without telling the scheduler, which would rely on them and die
        await self._loop.on_loop(self._engine.reset_mm_cache())
        await self._loop.on_loop(self._engine.reset_encoder_cache())

    async def forget_prefixes(self) -> None:
        """Empties the prefix cache: prefixes computed with other weights must not be reused."""
        await self._loop.on_loop(self._engine.reset_prefix_cache())

    async def sleep(self) -> None:
        """Moves the weights to main memory and frees the key-value cache."""
        await self._loop.on_loop(self._engine.sleep(level=1))

    async def wake(self) -> None:
        """Moves the weights back and drops computed prefixes."""
        await self._loop.on_loop(self._engine.wake_up())
        await self.forget_prefixes()

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()


class VllmEngine:
    """Turns chats into texts or probabilities of texts, one at a time: the engine batches concurrent requests.

    Args:
        config: model, adapter, precision and seed.
        settings: settings of the engine itself.
        max_requests: maximum number of concurrent chats.
        max_images: maximum number of images in one chat.

    Raises:
        ModelUnavailable: vLLM is not installed here, or the weights are missing or cannot be loaded.
    """

    def __init__(self, config: VLMConfig, settings: EngineConfig, *, max_requests: int, max_images: int) -> None:
        self._config = config
        self._settings = settings
        adapter = Path(config.adapter).expanduser() if config.adapter else None
        if adapter is not None:
            check_adapter(adapter)
        self._core = VllmCore(
            config, settings, max_requests=max_requests, max_images=max_images, enable_lora=adapter is not None
        )
        self.revision = self._core.revision
        self._lora = None
        if adapter is not None:
            self._lora = lora_request("adapter", 1, adapter)
            # now, and not with the first request: an adapter for another model is an error of the start
            self.run(self._core.add_lora(self._lora))
        self.traits = (
            f"dtype={self._core.dtype} quantization={config.quantization} vllm={self._core.vllm.__version__}"
            f" structured={settings.structured:d}{adapter_mark(config.adapter)}"
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` and returns its result; for callers without an event loop."""
        return self._core.run(work)

    async def reply(
        self, request: ChatRequest, *, max_new_tokens: int, temperature: float, deadline: float = math.inf
    ) -> ChatReply:
        """Returns the reply: greedy at temperature 0, else sampled from the config's seed; see `chats.AsyncEngine`.

        With choices and `EngineConfig.structured` it is one of them: the engine masks every token that would lead
        elsewhere. Raises as `VllmCore.ask` does.
        """
        if request.wants_log_probs:
            return ChatReply(choice_log_p=await self.choice_log_p(request.chat, request.choices))
        text = self._text(request.chat)
        sampling: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": temperature}
        if temperature:
            sampling |= {"top_p": TOP_P, "seed": self._config.seed}
        if request.choices and self._settings.structured:
            from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports] as above

            sampling["structured_outputs"] = StructuredOutputsParams(choice=list(request.choices))
        output = await self._core.ask(self._chat_tokens(text), images_of(request.chat), sampling, self._lora)
        written = output.outputs[0]
        return ChatReply(text=whole_answer(text, written.text), is_whole=written.finish_reason == "stop")

    async def choice_log_p(self, chat: Chat, choices: Sequence[str]) -> NDArray[np.float64]:
        """Returns [C], the log-probability that the reply begins with each choice's whole token sequence.

        Makes one request per prefix shared by choices, shortest first, so that prefix caching saves the images and the
        chat in all but the first. Raises as `VllmCore.ask` does.
        """
        prompt_ids = self._chat_tokens(without_thought(self._text(chat)))
        ids_of = [self._tokens(choice) for choice in choices]
        scores = np.zeros(len(choices))
        for beginning in sorted({tuple(ids[:end]) for ids in ids_of for end in range(len(ids))}, key=len):
            following = {
                index: ids[len(beginning)]
                for index, ids in enumerate(ids_of)
                if tuple(ids[: len(beginning)]) == beginning and len(ids) > len(beginning)
            }
            wanted = {"temperature": 0.0, "max_tokens": 1, "logprob_token_ids": sorted(set(following.values()))}
            output = await self._core.ask([*prompt_ids, *beginning], images_of(chat), wanted, self._lora)
            log_p = output.outputs[0].logprobs[0]
            for index, token in following.items():
                scores[index] += log_p[token].logprob
        return scores

    def _text(self, chat: Chat) -> str:
        return rendered(chat, self._core.processor.apply_chat_template)

    def _chat_tokens(self, text: str) -> list[int]:
        tokenizer = self._core.processor.tokenizer
        return tokenizer.encode(text, add_special_tokens=adds_begin(tokenizer, text))

    def _tokens(self, text: str) -> list[int]:
        return self._core.processor.tokenizer.encode(text, add_special_tokens=False)


def lora_request(name: str, number: int, folder: Path) -> Any:
    """Returns vLLM's request for an adapter; vLLM loads each number once, so other weights need another number."""
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports] - not installed here

    return LoRARequest(name, number, str(folder.resolve()))


def end_with_parent() -> None:
    """Makes the kernel end this process, one of the engine's own, as soon as the replica that started it ends.

    vLLM calls it in each of its processes, through the entry point `vllm.general_plugins`. A killed replica cannot end
    them itself.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # the parent ended before the call: the kernel's signal would never come
    if os.getppid() != parent.pid:
        os._exit(1)


def _import_vllm(settings: EngineConfig) -> Any:
    """Imports the package, with the settings that it reads on import."""
    # set before the import, which reads them once; the user's own settings take precedence
    os.environ.update({name: os.environ.get(name, value) for name, value in _SETTINGS.items()})
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(settings.cache_gib))  # it only reads integers
    from rlvlm.vlms.devices import use_own_segments  # torch, which vLLM depends on

    use_own_segments()
    if settings.eager:
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # vLLM's sampler compiles itself anyway
    try:
        import vllm
    except ImportError as error:
        raise ModelUnavailable(
            f"vLLM cannot be imported here: {_last_line(error)}",
            f"build its environment with make vllm, or name one with --{settings.section}.python, and serve the model",
        ) from error
    return vllm


def _engine_args(
    config: VLMConfig, engine: EngineConfig, folder: Path, max_requests: int, max_images: int
) -> dict[str, Any]:
    """Converts our config to vLLM's engine arguments."""
    bounds = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
    return {  # None leaves a value to vLLM
        "model": str(folder),
        "dtype": config.dtype,
        "quantization": "bitsandbytes" if config.quantization == "nf4" else None,
        "seed": config.seed,
        "max_model_len": engine.max_tokens or None,
        "max_num_seqs": max_requests,
        "enforce_eager": engine.eager,
        "enable_prefix_caching": engine.prefix_caching,
        "gpu_memory_utilization": engine.memory_share,
        "tensor_parallel_size": engine.tensor_parallel,
        "distributed_executor_backend": "mp" if engine.tensor_parallel > 1 else "uni",
        # memory is reserved for the allowed number, so videos, which are never sent, are not allowed
        "limit_mm_per_prompt": {"image": max_images, "video": 0},
        "mm_processor_kwargs": {name: value for name, value in bounds.items() if value} or None,
        "max_lora_rank": engine.max_lora_rank,
        "worker_extension_cls": "rlvlm.vlms.engines.vllm_worker.AdapterCheck",
        "trust_remote_code": False,
        "disable_log_stats": True,
    }


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
