"""What can be checked where vLLM is not installed; the engine itself runs in tests/serving/test_served_vllm.py."""

import asyncio
import importlib.util
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlvlm.core.errors import JudgeUnavailable, ModelUnavailable
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket.models import weights_folder
from rlvlm.vlms.config import EngineConfig
from rlvlm.vlms.engines import vllm
from rlvlm.vlms.engines.vllm import VllmEngine
from rlvlm.vlms.engines.vllm_worker import AdapterCheck

CONFIG = JudgeConfig(backend="vllm", model=str(weights_folder()), batch_size=16)


class Core:
    """A core of one vocabulary: every byte is a token, and a row of numbers says how likely each one is."""

    def __init__(self, log_p) -> None:
        self.log_p = log_p
        self.requests: list = []
        self.processor = SimpleNamespace(
            tokenizer=SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode()), bos_token=None),
            apply_chat_template=lambda chat: "".join(part["text"] for part in chat[0]["content"]),
        )

    async def ask(self, prompt_ids, images, sampling, lora):
        self.requests.append(prompt_ids)
        asked = {
            token: SimpleNamespace(logprob=self.log_p(prompt_ids, token)) for token in sampling["logprob_token_ids"]
        }
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[asked])])


def make_model(core) -> VllmEngine:
    model = object.__new__(VllmEngine)
    model._config, model._settings, model._core, model._lora = CONFIG, CONFIG.engine, core, None
    return model


def test_the_probability_of_a_choice_is_that_of_all_its_tokens():
    # by hand: p(0) = 0.5, p(1) = 0.2, p(-) = 0.3, p(1 | -) = 0.9; so -1 has 0.27
    def log_p(ids, token):
        return np.log({"0": 0.5, "1": 0.9 if ids[-1:] == [ord("-")] else 0.2, "-": 0.3}[chr(token)])

    core = Core(log_p)
    chat = [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]
    scores = asyncio.run(make_model(core).choice_log_p(chat, ("0", "1", "-1")))
    assert np.exp(scores) == pytest.approx(np.array([0.5, 0.2, 0.27]))
    assert core.requests == [[97, 98], [97, 98, 45]]  # the longer one begins as the shorter: a cache hit


def test_an_answer_inside_a_thought_is_asked_for_behind_it():
    core = Core(lambda ids, token: -1.0)
    chat = [{"role": "user", "content": [{"type": "text", "text": "ab<think>\n"}]}]
    asyncio.run(make_model(core).choice_log_p(chat, ("0",)))
    assert bytes(core.requests[0]) == b"ab<think>\n\n</think>\n\n"


@pytest.mark.slow
def test_a_process_of_the_engine_ends_with_the_one_that_started_it(tmp_path):
    """A parent that is killed leaves no child, although it could not end it."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, os, signal, time\n"
        "def child(pipe):\n"
        "    from rlvlm.vlms.engines.vllm import end_with_parent\n"
        "    end_with_parent()\n"
        "    pipe.send(os.getpid())\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    here, there = multiprocessing.Pipe()\n"
        "    multiprocessing.get_context('spawn').Process(target=child, args=(there,)).start()\n"
        "    print(here.recv(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    deadline = time.monotonic() + 30
    while Path(f"/proc/{ended.stdout.strip()}").exists() and _state(ended.stdout.strip()) != "Z":
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_our_settings_in_the_engines_words():
    config = replace(CONFIG, quantization="nf4", max_pixels=9, engine=EngineConfig(tensor_parallel=2, max_tokens=512))
    settings = vllm._engine_args(config, config.engine, Path("/weights"), 16, 35)
    assert settings["quantization"] == "bitsandbytes" and settings["tensor_parallel_size"] == 2
    assert settings["distributed_executor_backend"] == "mp" and settings["max_model_len"] == 512
    assert settings["mm_processor_kwargs"] == {"max_pixels": 9} and settings["enable_prefix_caching"]
    assert settings["trust_remote_code"] is False
    plain = vllm._engine_args(CONFIG, CONFIG.engine, Path("/weights"), 16, 35)
    assert plain["quantization"] is None and plain["max_model_len"] is None and plain["mm_processor_kwargs"] is None


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_where_vllm_is_missing_the_way_to_it_is_shown():
    with pytest.raises(JudgeUnavailable, match="vLLM cannot be imported here") as caught:
        build_judge(CONFIG)
    assert "make vllm" in caught.value.fix


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(ModelUnavailable, match="holds no LoRA adapter"):
        VllmEngine(replace(CONFIG, adapter=str(tmp_path)), CONFIG.engine, max_requests=1, max_images=1)


@pytest.mark.slow
def test_vllms_environment_needs_no_peft():
    """It has none: the engine would not even be imported there."""
    code = "import sys; import rlvlm.vlms.engines.vllm; print('peft' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


@pytest.mark.parametrize(("names", "odd"), [(["a.qkv", "a.o"], ""), (["a.qkv", "b.o"], "b.o"), (["x.up"], "x.up")])
def test_an_adapter_with_layers_that_the_model_has_not_is_refused_and_unloaded(names, odd):
    """vLLM's workers leave such layers out, in silence, and answer with the model alone where none fits."""
    adapter, model = (
        SimpleNamespace(loras=dict.fromkeys(names)),
        SimpleNamespace(modules={"a.qkv": 0, "a.o": 0, "c": 0}),
    )
    model.get_adapter = {1: adapter}.__getitem__
    worker = AdapterCheck()
    worker.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=model))
    loaded: list[int] = []

    class Engine:
        async def add_lora(self, lora: Any) -> None:
            loaded.append(lora.lora_int_id)

        async def remove_lora(self, number: int) -> None:
            loaded.remove(number)

        async def collective_rpc(self, method: str, args: tuple[int]) -> list[list[str]]:
            return [getattr(worker, method)(*args)] * 2  # two workers, each with half of the weights

    core = object.__new__(vllm.VllmCore)
    core._engine, core._loop = Engine(), SimpleNamespace(on_loop=lambda work: work)
    lora = SimpleNamespace(lora_int_id=1, lora_path="/adapter")
    if not odd:
        asyncio.run(core.add_lora(lora))
        assert loaded == [1]
        return
    with pytest.raises(ModelUnavailable, match=f"/adapter does not fit this model on vLLM, as at {odd}"):
        asyncio.run(core.add_lora(lora))
    assert not loaded
