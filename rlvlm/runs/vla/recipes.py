"""One complete, tuned configuration per task of the third pipeline. docs/vla.md has their runs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rlvlm.algorithms.grpo.config import AdvantageConfig, GRPOConfig, ScoreConfig, SFTConfig
from rlvlm.envs.libero.suites import SUITES
from rlvlm.envs.registry import task_env
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket import video
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.runs.config import EvalConfig, TrackConfig
from rlvlm.runs.vla.config import VLARunConfig


def push_block() -> VLARunConfig:
    """The tiny env in chunks, from a start that succeeds in about half of all episodes."""
    return VLARunConfig(
        task="push_block",
        steps=6_000_000,
        env=task_env("push_block"),
        judge=JudgeConfig(model="scorer", score="success"),
        reward=ScoreConfig(num_frames=2, frame_px=144),
        sft=SFTConfig(p_perturb=0.1, label_width=0.08),
        algo=GRPOConfig(draws="chunk"),
        eval=EvalConfig(every_steps=250_000, episodes=200),
        track=TrackConfig(log_every_steps=50_000, checkpoint_every_steps=500_000),
    )


def libero(task: str) -> VLARunConfig:
    """One task of LIBERO, its things moved by up to 2 cm so that the policy must look.

    Four fifths of the usual time limit: failures cost less, and there is time to try again, as demonstrations show that
    go astray now and then.
    """
    world = task_env(task)
    judge, reward = _judged(task)
    return VLARunConfig(
        task=task,
        steps=600_000,
        env=replace(world, moved=0.02, physics="fast", mesh_cell=0.012, episode_steps=world.episode_steps * 4 // 5),
        policy=VLAConfig(pocket=PocketVLAConfig(image_px=64, dilated=1, ways=True)),
        sft=SFTConfig(demonstrations=100, noise=0.02, p_perturb=0.1, label_width=0.05, steps=800),
        judge=judge,
        reward=reward,
        algo=GRPOConfig(
            groups=16,
            rounds=1,
            temperature=0.25,
            draws="chunk",
            least_range=0.2,
            kl_target=1.0,
            lr=5e-4,
            warm_up=4,
            final_lr=0.3,
            advantage=AdvantageConfig(baseline="critic"),
        ),
        eval=EvalConfig(every_steps=150_000, episodes=100),
        track=TrackConfig(log_every_steps=10_000, checkpoint_every_steps=50_000),
    )


def libero_suite(suite: str) -> VLARunConfig:
    """One policy for all tasks of a suite: as for one task, with more demonstrations and longer lessons."""
    one, num_tasks = libero(f"{suite}/0"), len(SUITES[suite])
    judge, reward = _judged(suite)
    return replace(
        one,
        task=suite,
        steps=2_000_000,
        env=replace(one.env, episode_steps=task_env(suite).episode_steps * 4 // 5),
        judge=judge,
        reward=reward,
        sft=replace(one.sft, demonstrations=30 * num_tasks, steps=2_500),
        eval=replace(one.eval, every_steps=200_000, episodes=200),
    )


def _judged(task: str) -> tuple[JudgeConfig, ScoreConfig]:
    """Who is asked about a task or a suite if anybody is, and what it is shown: the pocket video judge knows some."""
    if task in video.KNOWS:
        shown = ScoreConfig(num_frames=video.NUM_FRAMES, frame_px=video.FRAME_PX)
        return JudgeConfig(model="video", score="success"), shown
    return JudgeConfig(), ScoreConfig(flip_images=True)


def general(task: str) -> VLARunConfig:
    """Any other env in chunks, not tuned."""
    return VLARunConfig(task=task, env=task_env(task))


RECIPES: dict[str, Callable[[], VLARunConfig]] = {"push_block": push_block} | {
    suite: partial(libero_suite, suite) for suite in SUITES
}
FAMILY_RECIPES: dict[str, Callable[[str], VLARunConfig]] = dict.fromkeys(SUITES, libero)
