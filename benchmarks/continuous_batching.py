"""Labels per second of the vLLM judge when requests enter its engine as they come, and when batches are closed.

    .envs/vllm/bin/python benchmarks/continuous_batching.py --rounds 5

One engine serves both, in turns, so that whatever else the machine does hits both. Requests of one pair each arrive at
random times (a Poisson process, the same times for both) faster than the engine answers. Closed: a batch takes what has
arrived, up to the engine's size, and the next begins when all of it is answered. As they come: one by one, as replicas
on vLLM do. `direct` reads probabilities; `single_stage` writes up to 64 tokens, of which some replies need few. Answers
of both must be the same.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np

from rlvlm.core.judging import Query
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig, Mode
from rlvlm.judges.judge import ContinuousJudge
from rlvlm.pocket.models import weights_folder
from rlvlm.serving.fair_queue import FairQueue
from rlvlm.vlms.config import EngineConfig

BATCH = 16


def make_pairs(count: int, seed: int) -> list[Query]:
    """Noise with a band of one colour per side: no two alike, so that no cache answers."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (count, 2, 1, 96, 96, 3), np.uint8)
    frames[:, :, :, 30:66] = rng.integers(0, 256, (count, 2, 1, 1, 1, 3))
    return [Query(goal="open the drawer", left=left, right=right) for left, right in frames]


async def timed(
    put: Callable[[Sequence[Any]], Awaitable[Any]], pairs: Sequence[Query], arrivals_s: Sequence[float]
) -> tuple[float, list[Any]]:
    """Seconds until the last pair is answered, and the answers."""
    begun = time.perf_counter()

    async def one(pair: Query, at_s: float) -> Any:
        await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - begun)))
        return (await put([pair]))[0]

    answers = await asyncio.gather(*map(one, pairs, arrivals_s))
    return time.perf_counter() - begun, list(answers)


async def main(arguments: argparse.Namespace, mode: Mode, judge: ContinuousJudge) -> None:
    async def ask_all(batch: list[Any]) -> list[Any]:
        return await asyncio.gather(*map(judge.answer, batch))

    rates: dict[str, list[float]] = {"closed": [], "as they come": []}
    for number in range(-1, arguments.rounds):  # the first round warms up
        rng = np.random.default_rng(100 + number)
        arrivals = np.cumsum(rng.exponential(1 / arguments.rate, arguments.pairs)).tolist()
        labels = {}
        for place, name in enumerate(rates if number % 2 else reversed(rates)):
            pairs = make_pairs(arguments.pairs, 1_000 * number + 1_000_000)
            for pair in pairs:  # another pixel each time: neither finds in a cache what the other has left there
                pair.left[0, 0, 0] = pair.right[0, 0, 0] = place
            queue = (
                FairQueue(ask_all, batch_size=BATCH, wait_s=0.005)
                if name == "closed"
                else FairQueue(ask_all, batch_size=1, concurrency=2 * BATCH)
            )
            seconds, answers = await timed(queue.put, pairs, arrivals)
            labels[name] = [answer.label for answer in answers]
            if number >= 0:
                rates[name].append(arguments.pairs / seconds)
        same = sum(map(lambda left, right: left == right, *labels.values()))
        print(f"{mode} round {number}: {same} of {arguments.pairs} labels alike", flush=True)
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    for name, rate in rates.items():
        print(
            f"{mode} {name}: {medians[name]:.1f} labels/s (median of {len(rate)}, {min(rate):.1f} to {max(rate):.1f})"
        )
    ratios = [now / before for before, now in zip(rates["closed"], rates["as they come"], strict=True)]
    print(
        f"{mode} ratio: {statistics.median(ratios):.2f} (median of the rounds', {min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=96)
    parser.add_argument("--rate", type=float, default=200.0, help="pairs that arrive per second")
    parser.add_argument("--modes", nargs="+", default=["direct", "single_stage"])
    asked = parser.parse_args()
    for wanted in asked.modes:
        config = JudgeConfig(
            backend="vllm",
            model=str(weights_folder()),
            dtype="float32",
            prompt=wanted,
            max_new_tokens=64,
            engine=EngineConfig(eager=True, max_tokens=2048),
        )
        built = build_judge(config)
        asyncio.run(main(asked, wanted, cast(ContinuousJudge, built)))
        del built
