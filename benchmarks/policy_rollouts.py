"""Time that PPO for VLM policies takes, by part, and env steps per second, measured side by side in one run.

    python benchmarks/policy_rollouts.py --out rollouts.json
    python benchmarks/policy_rollouts.py --tasks number_line --rounds 5

Env steps per second of rollouts, by who samples the replies:

(a) generate: the references' way: the model's own `generate`, one prompt at a time, the image encoded with it.
    generate in batches: the same for all envs at once, padded on the left, as most people run it.
(b) engine: the engine in process, all envs as one batch, images encoded once.
(c) served 1, served 2: the same behind Ray Serve, with one and with two replicas.

and of updates, which are the same for all. The ways take turns within each round, so that a busy machine slows all.
Rates are per processor second of all processes that take part (this one and the replicas), wall time stands beside
them: on a machine that does other things it says little.

Then a PPO step with the engine in process, by part: sampling replies, gradient steps, other passes of the model (the
critic after a rollout, the reference), and the rest: envs, drawing, reading replies, advantages, bookkeeping.

    python benchmarks/policy_rollouts.py --tasks --staleness 0 1 2 --rounds 10

What `algo.staleness` gains in wall clock: the schedule of a run, whose engine and learner sleep for what two public
logs of GPUs say (`LOGGED`), a fiftieth of it. Replies of a row take times of a log-normal distribution, and a row waits
for its slowest. From the same times follows what a rollout would take if every env went on alone, so that only the
slowest env is waited for, and if what is unfinished were carried over into the next rollout, so that none is.
"""

import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import psutil
import torch
import tyro
from ray import serve
from ray.serve.context import _get_global_client

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient, PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.source import EpisodeSource, Rollout
from rlvlm.algorithms.policy_gradient.turns import Actor
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core import metrics
from rlvlm.core.episodes import Observations, SampledReply
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.slots import make_slot
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.engine import Engine, PolicyEngine
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.start.build import built
from rlvlm.runs.start.ray_session import ray_session
from rlvlm.serving.apps import running_policy
from rlvlm.serving.config import ServedEngineConfig
from rlvlm.serving.engine import ServedEngine

LOGGED = {
    "SimpleVLA-RL, OpenVLA-OFT 7B on 8 H20": (306.5, 161.4),
    "GRPO of Qwen3-4B, 2 + 2 accelerators": (97.2, 81.4),
}
"""Seconds of a rollout and of an update. The first: https://github.com/PRIME-RL/SimpleVLA-RL/issues/8 (`timing/gen`,
`timing/update_actor`). The second: https://github.com/vllm-project/vime/issues/358 (the wait for the rollout, and the
training, of the synchronous run, which took 178.3 s a step; the asynchronous one took 104.0 s)."""
SCALE = 1 / 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    tasks: tuple[str, ...] = ("number_line", "doorkey_6x6")
    turns: int = 512
    """Turns of each rollout and update, as in the recipes; (a) takes a sixteenth."""
    rounds: int = 3
    sft_updates: int = 100
    """Updates of the supervised start: replies should be as long as they are in a run."""
    replicas: tuple[int, ...] = (1, 2)
    staleness: tuple[int, ...] = ()
    """Values of `algo.staleness` that are compared with an engine and a learner that sleep."""
    spread: float = 0.5
    """Standard deviation of the logarithm of what a reply takes there, >= 0."""
    out: Path | None = None
    """File for the figures, as JSON."""


@dataclass
class Clock:
    """Processor and wall seconds, by part."""

    processes: Sequence[psutil.Process] = ()
    """That work for this one."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    wall_s: dict[str, float] = field(default_factory=dict)
    _is_inside: bool = False

    @contextlib.contextmanager
    def around(self, part: str) -> Iterator[None]:
        """Counts what happens within to `part`; a part within a part counts to the outer one alone."""
        if self._is_inside:
            yield
            return
        self._is_inside = True
        began, wall = self.now(), time.perf_counter()
        try:
            yield
        finally:
            self._is_inside = False
            self.cpu_s[part] = self.cpu_s.get(part, 0.0) + self.now() - began
            self.wall_s[part] = self.wall_s.get(part, 0.0) + time.perf_counter() - wall

    def now(self) -> float:
        """Processor seconds so far, of all that take part."""
        return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in self.processes)

    def wrap(self, owner: Any, method: str, part: str) -> None:
        """Counts every call of `owner.method` to `part`."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.around(part):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)


class GenerateEngine(PolicyEngine):
    """The model's own `generate`, as an engine: `batch_size` prompts at a time; 1 is the references' way."""

    def __init__(self, policy: VLMPolicy, batch_size: int = 1) -> None:
        super().__init__(policy, batch_size)
        self._batch_size = batch_size
        policy.processor.tokenizer.padding_side = "left"
        self._frames: dict[bytes, Frames] = {}

    def missing(self, images: Sequence[bytes]) -> list[int]:
        """Every image is given to the model anew, so it is enough that its pixels are here."""
        return list({key: place for place, key in enumerate(images) if key not in self._frames}.values())

    def show(self, images: Sequence[bytes], frames: Frames) -> None:
        """Keeps the pixels."""
        self._frames |= dict(zip(images, frames, strict=True))

    def reply(
        self,
        obs: Observations,
        seeds: Sequence[int],
        sampling: ReplySampling,
    ) -> list[SampledReply]:
        """One batch after the other; rollouts sample."""
        asked = list(zip(obs.texts, obs.images, strict=True))
        batches = [asked[start : start + self._batch_size] for start in range(0, len(asked), self._batch_size)]
        torch.manual_seed(seeds[0] % 2**31)
        return [reply for batch in batches for reply in self._generate(batch, sampling)]

    @torch.no_grad()
    def _generate(self, asked: Sequence[tuple[str, bytes]], sampling: ReplySampling) -> list[SampledReply]:
        policy = self.policy
        contents = [[{"type": "image"}, {"type": "text", "text": prompt}] for prompt, _ in asked]
        chats = [policy.processor.apply_chat_template([{"role": "user", "content": content}]) for content in contents]
        inputs: Any = policy.processor(text=chats, images=[[self._frames[image]] for _, image in asked])
        made = policy.model.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=sampling.temperature,
            suppress_tokens=policy.banned_ids.tolist(),
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=policy.stop_id,
            pad_token_id=policy.backbone.pad_id,
        )
        replies = made[:, inputs["input_ids"].shape[1] :].numpy()
        ends = [np.flatnonzero(ids == policy.stop_id)[:1] for ids in replies]  # what follows is padding
        own = [ids[: end[0] + 1] if len(end) else ids for ids, end in zip(replies, ends, strict=True)]
        return [self._reply(image, ids) for (_, image), ids in zip(asked, own, strict=True)]

    def _reply(self, image: bytes, ids: Any) -> SampledReply:
        policy = self.policy
        return SampledReply(
            image=image,
            answer={"ids": ids},
            text=policy.text_of(ids),
            log_probs=np.zeros(len(ids), np.float32),
            is_complete=bool(ids[-1] == policy.stop_id),
            version=self.version,
        )


def overlap(config: Config, rollout_s: float, update_s: float, staleness: int) -> dict[str, float]:
    """Seconds of a round of rollout and update, and of its rollout in three ways, in the units of the log."""
    algo = PolicyGradientConfig(staleness=staleness)
    rng, num_rows = np.random.default_rng(0), config.turns // algo.num_envs
    # a rollout takes what was logged however its replies are spread
    slowest = np.exp(config.spread * rng.standard_normal((10_000, algo.num_envs))).max(1).mean()
    played: list[FloatArray] = []

    def play(weights: Any) -> Rollout:
        """Asleep: row by row, each until its slowest reply is there."""
        seconds = np.exp(config.spread * rng.standard_normal((num_rows, algo.num_envs)))
        played.append((seconds * rollout_s / (num_rows * slowest)).astype(np.float32))
        for row in played[-1]:
            time.sleep(float(row.max()) * SCALE)
        return [], []

    labeller: Any = None  # of nothing
    source = EpisodeSource(algo, play, lambda: None, labeller, False, TrainingStats(), plays_elsewhere=True)
    rounds = []
    for number in range(staleness + 1 + config.rounds):
        began = time.monotonic()
        source.next()
        time.sleep(update_s * SCALE)
        if number > staleness:  # as many rollouts are under way as may be
            rounds.append(time.monotonic() - began)
    source.forget()
    source.close()
    rows = np.stack(played)  # [rollouts, rows, envs]
    return {
        "round": float(np.mean(rounds)) / SCALE,
        "rollout, row by row": float(rows.max(2).sum(1).mean()),
        "each env on its own": float(rows.sum(1).max(1).mean()),
        "unfinished carried over": float(rows.sum(1).mean()),
    }


def algorithm_of(config: Config, run: RunConfig) -> PolicyGradientAlgorithmConfig:
    return (
        PolicyGradientAlgorithmConfig()
        .settings(task=run.task, env_settings=run.env, policy=run.policy)
        .settings(
            algo=replace(run.algo, rollout_turns=config.turns),
            sft=replace(run.sft, updates=config.sft_updates),
            total_steps=run.steps,
        )
        .debugging(seed=0)
    )


def replica_processes(app: str) -> list[psutil.Process]:
    client = _get_global_client()
    assert client is not None, "Serve runs"
    deployments = client.get_serve_details()["applications"][app]["deployments"].values()
    return [psutil.Process(replica["pid"]) for deployment in deployments for replica in deployment["replicas"]]


def contest(config: Config, task: str) -> dict[str, Any]:
    """Rates of all ways on one task, and the parts of a step."""
    run = recipe(task)
    assert run.kind.name == "turns", f"{task} is not an env in turns"
    with contextlib.ExitStack() as stack:
        algorithm = stack.enter_context(built(algorithm_of(config, run)))
        assert isinstance(algorithm, PolicyGradient)
        algorithm.prepare(lambda line: None)
        policy, runner = algorithm.policy, algorithm.env_runner_group.local_env_runner
        ways: dict[str, tuple[Engine, int, Sequence[psutil.Process]]] = {
            "generate": (GenerateEngine(policy), max(1, config.turns // 16 // run.algo.num_envs), ()),
            "generate in batches": (
                GenerateEngine(policy, run.algo.num_envs),
                config.turns // run.algo.num_envs,
                (),
            ),
            "engine": (PolicyEngine(policy, run.algo.num_envs), config.turns // run.algo.num_envs, ()),
        }
        slot = make_slot(task, run.env)
        slot.begin(0)
        frame = slot.env.draw(slot.turn.snapshot[None])
        seen = slot.see(slot.turn)
        policy.show(list(seen.images), frame)
        probe = seen, policy.write(slot.env.action_text(0))
        for count in config.replicas:
            app = stack.enter_context(
                running_policy(
                    run.policy,
                    len(slot.env.action_names),
                    ServedEngineConfig(num_replicas=count).placement,
                    task,
                    batch_size=-(-run.algo.num_envs // count),
                )  # fmt: skip
            )
            served = ServedEngine(app, policy, *probe, frame, config=ServedEngineConfig(num_replicas=count))
            served.use(served.pack(0))
            ways[f"served {count}"] = served, config.turns // run.algo.num_envs, replica_processes(app)
        parts = step_parts(config, algorithm)  # first, while the policy is where a run has it
        rates = rollout_rates(config, algorithm, ways)
        rates["update"] = update_rates(config, algorithm)
        return {"rates": rates, "parts of a step": parts, "reply tokens": reply_tokens(runner)}


def rollout_rates(
    config: Config, algorithm: PolicyGradient, ways: dict[str, tuple[Engine, int, Sequence[psutil.Process]]]
) -> dict[str, dict[str, float]]:
    """Medians over rounds, of env steps per second."""
    ppo, runner = algorithm.config.algo, algorithm.env_runner_group.local_env_runner
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    sampling = ReplySampling(max_new_tokens=ppo.max_reply_tokens, temperature=ppo.temperature)
    for number in range(config.rounds + 1):
        for name, (engine, turns, processes) in ways.items():
            runner.actor = Actor(engine, sampling)
            clock = Clock(processes)
            with clock.around("all"):
                steps = sum(map(len, runner.sample(num_turns=turns)))
            if number:  # the first warms up
                found[name].append((steps / clock.cpu_s["all"], steps / clock.wall_s["all"]))
    runner.actor = Actor(algorithm.rollouts.engine, sampling)
    return {name: medians(pairs) for name, pairs in found.items()}


def update_rates(config: Config, algorithm: PolicyGradient) -> dict[str, float]:
    """Env steps learned from per second, all epochs together."""
    pairs = []
    for number in range(config.rounds + 1):
        algorithm.source.begin()
        episodes, clock = algorithm.source.labelled(algorithm.source.ended()), Clock()
        steps = sum(map(len, episodes))
        with clock.around("all"):
            algorithm.learners.call_all("learn", episodes, 0.0)
        if number:
            pairs.append((steps / clock.cpu_s["all"], steps / clock.wall_s["all"]))
    return medians(pairs)


_PASSES = ("_values", "_log_probs", "_token_values")
_TIMED = ("reply", "backward", "show", *_PASSES)


def step_parts(config: Config, algorithm: PolicyGradient) -> dict[str, float]:
    """Shares of a PPO step's processor time, engine in process."""
    clock, learner = Clock(), algorithm.learners.local
    assert learner is not None, "the algorithm has one learner, in this process"
    clock.wrap(algorithm.rollouts.engine, "reply", "sampling replies")
    clock.wrap(learner.gradients, "backward", "gradients")
    clock.wrap(algorithm.policy, "show", "encoding images")
    for method in _PASSES:
        clock.wrap(learner.batches, method, "other passes of the model")
    began, steps = clock.now(), 0.0
    for _ in range(config.rounds):
        algorithm.train()
        steps += algorithm.report()[metrics.UPDATE_STEPS]
    total = clock.now() - began
    parts = {name: seconds / total for name, seconds in clock.cpu_s.items()}
    shares = {name: round(share, 4) for name, share in (parts | {"the rest": 1 - sum(parts.values())}).items()}
    for owner in (algorithm.rollouts.engine, algorithm.policy, learner.gradients, learner.batches):
        for method in [name for name in vars(owner) if name in _TIMED]:
            delattr(owner, method)
    return shares | {"gradient steps of an update": steps / config.rounds}


def reply_tokens(runner: Any) -> float:
    """Mean length of a reply."""
    replies = [answer["ids"] for episode in runner.sample(num_turns=2) for answer in episode.answers]
    return round(float(np.mean([len(ids) for ids in replies])), 1)


def medians(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    cpu, wall = (sorted(rates) for rates in zip(*pairs, strict=True))
    return {
        "env_steps_per_cpu_s": round(statistics.median(cpu), 1),
        "lowest": round(cpu[0], 1),
        "highest": round(cpu[-1], 1),
        "env_steps_per_wall_s": round(statistics.median(wall), 1),
    }


def main(show: Callable[[str], None] = print) -> None:
    config = tyro.cli(Config, description=__doc__)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name, (rollout_s, update_s) in LOGGED.items() if config.staleness else ():
        show(f"{name}: rollout {rollout_s:.0f} s, update {update_s:.0f} s, both {rollout_s + update_s:.0f} s")
        for staleness in config.staleness:
            found = figures[f"{name}, staleness {staleness}"] = overlap(config, rollout_s, update_s, staleness)
            show(f"  staleness {staleness}: " + ", ".join(f"{key} {value:.0f} s" for key, value in found.items()))
    if config.tasks:
        contests(config, figures, show)
    if config.out is not None:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        config.out.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2))


def contests(config: Config, figures: dict[str, Any], show: Callable[[str], None]) -> None:
    """Adds the figures of each task to `figures`."""
    with ray_session(num_workers=2 + sum(config.replicas)):
        for task in config.tasks:
            figures[task] = contest(config, task)
            base = figures[task]["rates"]["generate"]["env_steps_per_cpu_s"]
            show(f"{task}, replies of {figures[task]['reply tokens']} tokens")
            for name, rates in figures[task]["rates"].items():
                times = "" if name == "update" else f"{rates['env_steps_per_cpu_s'] / base:6.1f}x"
                show(
                    f"  {name:10s} {rates['env_steps_per_cpu_s']:7.1f} ({rates['lowest']:.1f} to "
                    f"{rates['highest']:.1f}) env steps per cpu-s, {rates['env_steps_per_wall_s']:7.1f} per s {times}"
                )
            for name, share in figures[task]["parts of a step"].items():
                show(f"  {name:28s} {f'{share:.1%} of a PPO step' if share <= 1 else f'{share:.1f}'}")
        serve.shutdown()


if __name__ == "__main__":
    main()
