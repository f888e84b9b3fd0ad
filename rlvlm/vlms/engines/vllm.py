"""Chat VLMs on vLLM, an inference engine that takes requests as they come, keeps what prompts share, and spreads over
GPUs.

vLLM pins its own torch and transformers, so this file is used in an environment of its own: `make vllm` builds it and
`serving` gives it to the replica. `AsyncLLM` computes in processes of its own; `end_with_parent` is called in each of
them, so that none outlives the replica and goes on holding a GPU.
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
from rlvlm.vlms.chats import TOP_P, Chat, ChatReply, ChatRequest, Pixels, images_of, whole_answer, without_thought
from rlvlm.vlms.config import EngineConfig, VLMConfig
from rlvlm.vlms.engines.loop import LoopThread
from rlvlm.vlms.files import locate
from rlvlm.vlms.images import resize
from rlvlm.vlms.lora import adapter_mark, check_adapter
from rlvlm.vlms.processors import load_processor

T = TypeVar("T")
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU: one process beside ours computes, not two
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every replica of a machine is bound to the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_PR_SET_PDEATHSIG = 1


class VllmCore:
    """An `AsyncLLM`, started: that takes seconds for a small model, minutes for a big one that is compiled.

    It lives on an event loop of its own in a thread of its own; its coroutines may be awaited on any loop, and a caller
    that is cancelled has its request aborted.

    Args:
        config: names model, precision and seed.
        settings: of the engine itself.
        max_requests: computed at once; more of them wait.
        max_images: in one request.
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
        self.tokenizer: Any = self._engine.get_tokenizer()
        self._images: Any = load_processor(folder, self._engine.model_config.hf_config, config).image_processor
        self._resizes = hasattr(self._images, "merge_size")
        self.window: int = self._engine.model_config.max_model_len
        """Tokens of prompt and reply together."""
        self.dtype = str(self._engine.model_config.dtype).removeprefix("torch.")
        """Type of the weights, such as `bfloat16`."""

    async def _start(self, options: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports] - not installed here
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports] - likewise

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of `work`; for callers without an event loop, in any thread."""
        return self._loop.run(work)

    async def ask(
        self, prompt_ids: Sequence[int], images: Sequence[Pixels], sampling: dict[str, Any], lora: Any = None
    ) -> Any:
        """The whole `RequestOutput` of one request, which is aborted when the task that awaits it is cancelled.

        Args:
            prompt_ids: with one token for each image; the engine puts in as many as the image takes.
            images: [H, W, 3] each.
            sampling: of vLLM's `SamplingParams`.
            lora: a `LoRARequest`; None takes the model as it is.

        Raises:
            ValueError: the engine does not take this request, such as a prompt beyond its window.
            RuntimeError: it failed on this request.
            ModelUnavailable: it is dead.
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
            if self._resizes:  # by Pillow as everywhere else: what vLLM's environment has for it rounds differently,
                # which moved a small judge's probabilities by 0.008
                images = [resize(image, self._images) for image in images]
                request["mm_processor_kwargs"] = {"do_resize": False}
            request["multi_modal_data"] = {"image": list(map(Image.fromarray, images))}
        params = self.vllm.SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        name = f"r{next(self._numbers)}"
        try:
            # only the final output comes: tokens one by one would cost a wake-up each
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
        """Whether its processes are gone: it will answer nothing any more."""
        return self._engine.errored

    async def add_lora(self, lora: Any) -> None:
        """Loads an adapter, a `LoRARequest`, beside those that are loaded; raises what the engine raises."""
        await self._loop.on_loop(self._engine.add_lora(lora))

    async def remove_lora(self, lora: Any) -> None:
        """Forgets an adapter."""
        await self._loop.on_loop(self._engine.remove_lora(lora.lora_int_id))

    async def replace_weights(self, method: str, **arguments: Any) -> None:
        """Has `method` of the workers put other weights in the place of the model's; raises what the engine raises."""
        await self._loop.on_loop(self._engine.collective_rpc(method, kwargs=arguments))
        # it empties its caches of images and does not tell the scheduler, which would count on them and die
        await self._loop.on_loop(self._engine.reset_mm_cache())
        await self._loop.on_loop(self._engine.reset_encoder_cache())

    async def forget_prefixes(self) -> None:
        """Empties the cache of computed beginnings: those of other weights must not be used again."""
        await self._loop.on_loop(self._engine.reset_prefix_cache())

    async def sleep(self) -> None:
        """Moves the weights to main memory and lets the cache of keys and values go."""
        await self._loop.on_loop(self._engine.sleep(level=1))

    async def wake(self) -> None:
        """Moves the weights back; what was computed before is forgotten."""
        await self._loop.on_loop(self._engine.wake_up())
        await self.forget_prefixes()

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()


class VllmEngine:
    """Chats in, texts or probabilities of texts out, one at a time: the engine merges what is under way.

    Args:
        config: names model, adapter, precision and seed.
        settings: of the engine itself.
        max_requests: chats computed at once.
        max_images: in one chat.

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
        self._lora = None if adapter is None else lora_request("adapter", 1, adapter)
        self.traits = (
            f"dtype={self._core.dtype} quantization={config.quantization} vllm={self._core.vllm.__version__}"
            f" structured={settings.structured:d}{adapter_mark(config.adapter)}"
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of `work`; for callers without an event loop."""
        return self._core.run(work)

    async def reply(
        self, request: ChatRequest, *, max_new_tokens: int, temperature: float, deadline: float = math.inf
    ) -> ChatReply:
        """The model's reply: greedy at temperature 0, else sampled from the config's seed; see `chats.AsyncEngine`.

        Where there are choices and `EngineConfig.structured` holds, it is one of them: the engine masks every token
        that would lead elsewhere. Raises as `VllmCore.ask` does.
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
        output = await self._core.ask(self._tokens(text), images_of(request.chat), sampling, self._lora)
        written = output.outputs[0]
        return ChatReply(text=whole_answer(text, written.text), is_whole=written.finish_reason == "stop")

    async def choice_log_p(self, chat: Chat, choices: Sequence[str]) -> NDArray[np.float64]:
        """[C] log-probability that the reply begins with each choice's whole token sequence.

        One request per beginning that the choices share, shortest first, so that prefix caching spares the images
        and the chat in all but the first. Raises as `VllmCore.ask` does.
        """
        prompt_ids = self._tokens(without_thought(self._text(chat)))
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
        return self._core.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    def _tokens(self, text: str) -> list[int]:
        return self._core.tokenizer.encode(text, add_special_tokens=False)


def lora_request(name: str, number: int, folder: Path) -> Any:
    """An adapter as vLLM wants it: it loads each number once, so other weights need another one."""
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports] - not installed here

    return LoRARequest(name, number, str(folder.resolve()))


def end_with_parent() -> None:
    """Has the kernel end this process, one of the engine's own, as soon as the replica that started it is gone.

    vLLM calls it in each of its processes, by the entry point `vllm.general_plugins`. A replica that is killed cannot
    end them itself.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # the parent was gone before the call: the kernel's signal would never come
    if os.getppid() != parent.pid:
        os._exit(1)


def _import_vllm(settings: EngineConfig) -> Any:
    """The package, with the settings that it reads on import."""
    # set before the import, which reads them once; what the user has set stays
    os.environ.update({name: os.environ.get(name, value) for name, value in _SETTINGS.items()})
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(settings.cache_gib))  # it reads whole numbers alone
    from rlvlm.vlms.devices import use_own_segments  # torch, which vLLM brings

    use_own_segments()
    if settings.eager:
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # vLLM's sampler compiles itself all the same
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
    """Our config as vLLM's engine arguments."""
    bounds = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
    return {  # what is None is left to vLLM
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
        # memory is set aside for as many as are allowed, so videos, which are not sent, are not
        "limit_mm_per_prompt": {"image": max_images, "video": 0},
        "mm_processor_kwargs": {name: value for name, value in bounds.items() if value} or None,
        "max_lora_rank": engine.max_lora_rank,
        "trust_remote_code": False,
        "disable_log_stats": True,
    }


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
