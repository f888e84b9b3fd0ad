"""Weights on their way into processes that do not know Ray: bucket by bucket, through files; Ray itself is not here."""

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlvlm.core.episodes import Observations, SampledReply
from rlvlm.core.errors import ModelUnavailable
from rlvlm.policies.buckets import Bucket, read_bucket, write_buckets
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.vllm_worker import BucketLoader, described
from rlvlm.serving import weights as weights_module
from rlvlm.serving.config import ServedEngineConfig
from rlvlm.serving.engine import ServedEngine
from rlvlm.serving.policy_replica import ReplyReceipt, VllmPolicyReplica
from rlvlm.serving.weights import Probe, Weights, feed_buckets, write_adapter
from tests.tiny_vlm import save_tiny_vlm

STATE = {f"model.layer.{number}": torch.full((64,), float(number)) for number in range(8)} | {
    "value_head.0.weight": torch.ones(8)
}


class Worker(BucketLoader):
    """What vLLM's worker has of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.loaded: dict[str, Any] = {}

    def reload_weights(self, weights_iterator: Any, is_checkpoint_format: bool) -> None:
        assert is_checkpoint_format
        self.loaded.update(weights_iterator)


def packed(state: dict[str, torch.Tensor] = STATE) -> Weights:
    nothing = np.zeros(0, np.int64)
    obs, frame = Observations(texts=("",), images=(b"",)), np.zeros((1, 1, 1, 3), np.uint8)
    probe = Probe(obs=obs, prompt_ids=nothing, ids=nothing, frame=frame, log_probs=np.zeros(0, np.float32))
    buckets = write_buckets(state, lambda content: (content.copy(),), size=600)
    return Weights(version=1, buckets=tuple(buckets), probe=probe)


def test_every_worker_reads_every_bucket_and_there_are_never_more_than_two(monkeypatch, tmp_path):
    weights, most, folder = packed(), [0], tmp_path / "version-1"
    folder.mkdir()

    def fetch(_: Weights, bucket: Bucket) -> Any:
        most.append(sum(file.name.isdigit() for file in folder.iterdir()))
        return bucket.where[0]

    monkeypatch.setattr(weights_module, "fetch", fetch)
    workers, is_over = [Worker(0), Worker(1)], threading.Event()
    with ThreadPoolExecutor(3) as pool:
        feeding = pool.submit(feed_buckets, weights, folder, 2, is_over)
        loading = [pool.submit(one.load_buckets, str(folder), described(weights.buckets)) for one in workers]
        for one in loading:
            one.result(30)
        is_over.set()
        feeding.result(30)
    assert len(weights.buckets) > 3 and max(most) == 1, "one is read while the next is written"
    for worker in workers:  # by the model's own names, and without the heads, which vLLM does not have
        assert worker.loaded.keys() == {f"layer.{number}" for number in range(8)}
        assert all(torch.equal(worker.loaded[f"layer.{n}"], STATE[f"model.layer.{n}"]) for n in range(8))


def test_a_bucket_that_does_not_come_or_is_torn_ends_the_load_on_both_sides(monkeypatch, tmp_path):
    weights = packed()

    def gone(_: Weights, bucket: Bucket) -> Any:
        if bucket is weights.buckets[2]:
            raise ModelUnavailable("they are gone", "")
        return bucket.where[0]

    def torn(_: Weights, bucket: Bucket) -> Any:
        return bucket.where[0] + np.uint8(bucket is weights.buckets[2])

    for number, (fetch, reason) in enumerate({gone: "does not come", torn: "torn"}.items()):
        monkeypatch.setattr(weights_module, "fetch", fetch)
        is_over, folder = threading.Event(), tmp_path / str(number)
        folder.mkdir()  # as the replica does: workers take a folder that is missing for the end of it
        with ThreadPoolExecutor(2) as pool:
            feeding = pool.submit(feed_buckets, weights, folder, 1, is_over)
            with pytest.raises((RuntimeError, ValueError), match=reason):
                pool.submit(Worker(0).load_buckets, str(folder), described(weights.buckets)).result(30)
            is_over.set()
            if fetch is gone:
                with pytest.raises(ModelUnavailable, match="they are gone"):
                    feeding.result(30)
            else:
                feeding.result(30)


@pytest.mark.slow
@pytest.mark.parametrize("learns", ["all", "lora"])
def test_vllm_gets_weights_in_its_own_precision_and_an_adapter_once(learns, monkeypatch, tmp_path):
    config = PolicyConfig(
        model=str(save_tiny_vlm(tmp_path / "model", "qwen3_vl")), device="cpu", learns=learns, lora_rank=4
    )
    policy = load_policy(config, num_actions=2)
    frame = np.zeros((1, 32, 32, 3), np.uint8)
    policy.show([b"image"], frame)
    puts: list[Any] = []
    monkeypatch.setattr(weights_module.ray, "put", lambda content: puts.append(content.copy()) or puts[-1])
    monkeypatch.setattr(weights_module, "fetch", lambda _, bucket: bucket.where[0])
    learners = write_buckets(policy.trained_state(), lambda content: (content.copy(),), size=1 << 20)
    obs, ids = Observations(texts=("go",), images=(b"image",)), np.array([5, 6])
    config = ServedEngineConfig(num_replicas=1, backend="vllm", bucket_mib=1)
    engine = ServedEngine("app", policy, obs, ids, frame, config=config)
    # learners have put it into the store in float32 already: nothing is put again for a CPU
    plain = engine.pack(1, learners)
    assert not puts
    said = SampledReply(
        image=b"image",
        answer={"ids": ids},
        text="",
        log_probs=np.zeros(2, np.float32),
        value=0.0,
        is_complete=True,
        version=0,
    )
    answer = Future[ReplyReceipt]()
    answer.set_result(ReplyReceipt(answers=[said], sync_error=0.0, dtype="bfloat16"))
    engine.end([answer])
    half = engine.pack(2, learners)
    engine.close()
    assert plain.buckets == tuple(learners)
    assert 0 < sum(map(len, puts)) <= sum(len(bucket.where[0]) for bucket in learners) / 2
    if learns == "all":
        state = policy.trained_state()
        sent = [pair for bucket in half.buckets for pair in read_bucket(bucket, bucket.where[0])]
        assert {name for name, _ in sent} == {name for name in state if name.startswith("model.")}
        assert all(torch.equal(value, state[name].to(torch.bfloat16)) for name, value in sent), "to the bit"
        return
    policy.model.save_pretrained(tmp_path / "peft")
    saved = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for weights, dtype in ((plain, torch.float32), (half, torch.bfloat16)):
        write_adapter(weights, tmp_path / str(dtype))
        written = load_file(tmp_path / str(dtype) / "adapter_model.safetensors")
        assert written.keys() == saved.keys()
        assert all(torch.equal(value, saved[name].to(dtype)) for name, value in written.items())


class SlowSampler:
    """What a replica has of vLLM: workers of the real protocol, a load that takes a while, and no engine."""

    num_workers, dtype, is_dead = 1, "float32", False

    def __init__(self) -> None:
        self.version, self.loads, self.worker = -1, 0, Worker(0)

    def holds(self, version: int) -> bool:
        return version == self.version

    async def load_buckets(self, version: int, folder: Path, buckets: Any) -> None:
        self.loads += 1
        await asyncio.get_running_loop().run_in_executor(
            None, self.worker.load_buckets, str(folder), described(buckets)
        )
        self.version = version

    async def read(self, *_: Any) -> np.ndarray:
        return np.zeros(1, np.float32)


def test_a_caller_that_gives_up_during_a_sync_ends_neither_the_sync_nor_the_replica(monkeypatch, tmp_path):
    weights = packed()
    weights = replace(weights, probe=replace(weights.probe, log_probs=np.zeros(1, np.float32)))

    def fetch(_: Weights, bucket: Bucket) -> Any:
        time.sleep(0.1)  # four of them: longer than the first caller waits
        return bucket.where[0]

    async def answer(items: Any, key: str) -> list[str]:
        return ["a reply" for _ in items]

    monkeypatch.setattr(weights_module, "fetch", fetch)
    sampler = SlowSampler()
    # without Serve and vLLM, which its constructor wants
    replica: Any = VllmPolicyReplica.__new__(VllmPolicyReplica)
    replica._loaded, replica._turns, replica._folder, replica._kept = sampler, None, tmp_path, MagicMock()
    replica._sync_errors, replica._under_way, replica._heartbeat = {}, {}, MagicMock()
    replica._slots = SimpleNamespace(put=answer)
    call: Any = SimpleNamespace(weights=weights, rules=object(), obs=["a turn"], key="")

    async def asked() -> Any:
        replica._taking, replica._idle = asyncio.Lock(), asyncio.Condition()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replica.ask(call), 0.15)
        return await asyncio.wait_for(replica.ask(call), 20)

    receipt = asyncio.run(asked())
    assert receipt.answers == ["a reply"] and sampler.loads == 1, "the second try found the load under way"
    assert sampler.worker.loaded.keys() == {f"layer.{number}" for number in range(8)}
    assert set(replica._under_way.values()) == {0}, "the next version waits for nobody"


@pytest.mark.parametrize("adapter", ["", "{}"])
def test_old_weights_stay_until_their_requests_end(adapter, monkeypatch, tmp_path):
    weights = replace(packed(), version=3, adapter=adapter)
    weights = replace(weights, probe=replace(weights.probe, log_probs=np.zeros(1, np.float32)))
    monkeypatch.setattr(weights_module, "fetch", lambda _, bucket: bucket.where[0])
    sampler: Any = SlowSampler()
    sampler.version, sampler.load_adapter = 2, AsyncMock()
    replica: Any = VllmPolicyReplica.__new__(VllmPolicyReplica)
    replica._loaded, replica._folder, replica._kept, replica._heartbeat = sampler, tmp_path, MagicMock(), MagicMock()
    replica._sync_errors, replica._under_way = {}, {1: 1, 2: 1}

    def is_loaded() -> bool:
        return sampler.loads > 0 or sampler.load_adapter.called

    async def synced() -> None:
        replica._idle = asyncio.Condition()
        syncing = asyncio.ensure_future(replica._sync_weights(SimpleNamespace(weights=weights, rules=object())))
        await asyncio.sleep(0.1)
        assert not is_loaded(), "a reply by version 1 is under way"
        await replica._leave(1)
        await asyncio.sleep(0.1)
        assert is_loaded() == bool(adapter), "adapters of two versions stand side by side"
        await replica._leave(2)
        await asyncio.wait_for(syncing, 20)

    asyncio.run(synced())


@pytest.mark.parametrize("is_gone", [False, True])
def test_workers_stop_where_the_writer_stops_early_or_is_gone(is_gone, monkeypatch, tmp_path):
    weights, is_over, folder = packed(), threading.Event(), tmp_path / "version-1"

    def fetch(_: Weights, bucket: Bucket) -> Any:
        if bucket is weights.buckets[1]:
            is_over.set()
        return bucket.where[0]

    monkeypatch.setattr(weights_module, "fetch", fetch)
    with ThreadPoolExecutor(2) as pool:
        if not is_gone:
            pool.submit(feed_buckets, weights, folder, 1, is_over).result(30)
        with pytest.raises(RuntimeError, match="does not come"):
            pool.submit(Worker(0).load_buckets, str(folder), described(weights.buckets)).result(30)
