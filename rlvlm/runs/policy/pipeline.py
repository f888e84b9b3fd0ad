"""How a run of a VLM policy is built, written down and shown."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from rlvlm.algorithms.env_slots import EnvSlot
from rlvlm.algorithms.evaluation import Player
from rlvlm.algorithms.ppo_vlm.algorithm import (
    PPOVLM,
    MakeEngine,
    PPOVLMConfig,
    load_start,
    load_trained_policy,
    make_slot,
)
from rlvlm.algorithms.ppo_vlm.panel import ROWS
from rlvlm.algorithms.ppo_vlm.play import Actor
from rlvlm.algorithms.ppo_vlm.player import ScriptPlayer, TurnsPlayer, stands_still
from rlvlm.core.disk import write_whole
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.players import RandomPlayer, ScriptedExpert
from rlvlm.judges.judge import Judge
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.runs.artifacts.episodes import Caption, ShownEpisode, episodes_page
from rlvlm.runs.artifacts.scored import ScoreRecorder, write_score_page
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.runs.pipeline import Draw, Players
from rlvlm.runs.policy.config import PolicyRunConfig
from rlvlm.runs.session import built, fallback_judge
from rlvlm.serving.apps import running_policy
from rlvlm.serving.engine import ServedEngine


class PolicyPipeline:
    """PPO for a policy that looks, thinks and acts in text."""

    rows = ROWS

    def __init__(self) -> None:
        self._algorithm: PPOVLM | None = None

    @contextmanager
    def open_algorithm(self, config: PolicyRunConfig, make_judge: Callable[[], Judge] | None) -> Iterator[PPOVLM]:
        """The algorithm, until the context closes."""
        torch.set_num_threads(config.algo.threads)
        makes_policy = partial(make_policy, config.policy.in_run(config.seed))
        settings = (
            PPOVLMConfig()
            .envs(task=config.task, env_settings=config.env)
            .acting(make_policy=makes_policy)
            .rewards(
                reward=config.reward,
                goal=config.goal,
                make_judge=make_judge,
                make_fallback_judge=fallback_judge(config.reward.fallback_judge),
            )
            .learning(ppo=config.algo, sft=config.sft, total_steps=config.steps)
            .debugging(seed=config.seed)
        )
        with ExitStack() as stack:
            if config.engine.num_replicas:
                settings.acting(make_policy=makes_policy, make_engine=_served(config, stack))
            algorithm = stack.enter_context(built(settings))
            assert isinstance(algorithm, PPOVLM), "what its config builds"
            self._algorithm = algorithm
            yield algorithm
            self._algorithm = None

    def open_recorder(self, folder: RunFolder, config: PolicyRunConfig, draw: Draw) -> ScoreRecorder:
        """Takes what was said of turns and episodes."""
        return ScoreRecorder(folder, draw)

    def write_pages(self, folder: RunFolder, config: PolicyRunConfig) -> None:
        """`episodes.html`: the last evaluation's episodes, image by image, with what the policy said; and the judge's
        page, where anybody scored.
        """
        write_score_page(folder, config)
        if self._algorithm is None or not self._algorithm.last_played:
            return
        shown = [
            ShownEpisode(
                title=config.task,
                frames=self._algorithm.draw(episode.snapshots[:-1], 0),
                captions=[
                    Caption(
                        thought=reply.thought,
                        action=reply.text[slice(*reply.action_span)] if reply.action_span else reply.text,
                        reward=float(reward),
                        value=output.value / config.algo.reward_scale,
                    )
                    for reply, reward, output in zip(episode.replies, episode.env_rewards, outputs, strict=True)
                ],
                is_success=bool(episode.success.any()),
                episode_return=float(episode.env_rewards.sum()),
                steps=len(episode.env_rewards),
                seed=episode.seed,
            )
            for episode, outputs in self._algorithm.last_played[:_PAGE_EPISODES]
        ]
        played = self._algorithm.last_played
        note = (
            f"The first {len(shown)} of {len(played)} greedy episodes of the last evaluation; the thought is "
            "everything that the reply says before its action."
        )
        if still := [episode for episode, outputs in played if stands_still(episode, outputs)]:
            unreadable = sum(episode.replies[-1].action is None for episode in still)
            note += (
                f" In {len(still)} of all {len(played)} the policy stood still at the end: it saw the same again and "
                f"so did the same again, in {unreadable} by a reply that cannot be read. Sampled play may get out."
            )
        write_whole(folder.path / "episodes.html", episodes_page(shown, config.title, note))

    def open_players(self, config: PolicyRunConfig, checkpoint: Path) -> Players:
        """The policy and what PPO started from, greedy and sampled; the env's expert, where it has one; chance.

        Where starts were held out from training, the policy is also played on those that were not.
        """
        torch.set_num_threads(config.algo.threads)
        held_out = config.env.for_evaluation()
        slots = partial(make_slot, config.task, held_out)
        world = slots().env
        policy, start = (make_policy(config.policy, len(world.action_names)) for _ in range(2))
        load_trained_policy(policy, checkpoint)

        def plays(who: VLMPolicy, greedy: bool, slots: Callable[[], EnvSlot] = slots) -> TurnsPlayer:
            engine = PolicyEngine(who, config.algo.num_envs)
            actor = Actor(engine, config.algo.max_reply_tokens, config.algo.temperature)
            return TurnsPlayer(actor, slots, config.algo.num_envs, greedy)

        others: dict[str, Player] = {"policy, sampled": plays(policy, False)}
        if config.env.split != held_out.split:
            seen = partial(make_slot, config.task, replace(held_out, split=config.env.split))
            others |= {f"seen starts, {way}": plays(policy, way == "greedy", seen) for way in ("greedy", "sampled")}
        if load_start(start, checkpoint):
            others |= {"before PPO, greedy": plays(start, True), "before PPO, sampled": plays(start, False)}
        if world.has_expert:
            others["scripted expert"] = ScriptPlayer(ScriptedExpert(), slots())
        others["random actions"] = ScriptPlayer(RandomPlayer(), slots())

        def draw(snapshots: FloatArray, size_px: int) -> Frames:
            return world.draw(snapshots)

        return Players(
            own=plays(policy, True), name="policy, greedy", draw=draw, others=others, milestones=world.milestones
        )


def make_policy(config: PolicyConfig, num_actions: int) -> VLMPolicy:
    """The policy of `config`, for an env with so many actions; `partial(make_policy, config)` pickles."""
    return load_policy(config, num_actions)


def _served(config: PolicyRunConfig, stack: ExitStack) -> MakeEngine:
    """Makes the engine over a Serve app of the policy, which is started now and lasts as long as `stack`."""
    slot = make_slot(config.task, config.env)
    num_actions = len(slot.env.action_names)
    slot.env.close()
    engine = config.engine
    batch_size = -(-config.algo.num_envs // engine.num_replicas)
    app = stack.enter_context(
        running_policy(
            config.policy,
            num_actions,
            engine.placement,
            config.task,
            batch_size=batch_size,
            vllm=engine.vllm if engine.backend == "vllm" else None,
        )
    )
    return partial(ServedEngine, app, config=engine)


_PAGE_EPISODES = 24
"""Episodes on the page, at most."""
