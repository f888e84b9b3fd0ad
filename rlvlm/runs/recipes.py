"""One complete, tuned configuration per task: the recipe decides which algorithm learns it.

docs/results.md (states), docs/policies.md (turns) and docs/vla.md (chunks) have their runs.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rlvlm.algorithms.policy_gradient.config import (
    AdvantageConfig,
    LossConfig,
    PolicyGradientConfig,
    chunk_defaults,
)
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.envs.libero.tasks import SUITES
from rlvlm.envs.minigrid.ids import SHORT_NAMES
from rlvlm.envs.registry import find_task, full_name, task_env
from rlvlm.envs.robosuite import words
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket.models import VIDEO_FRAME_PX, VIDEO_NUM_FRAMES, known_tasks
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig
from rlvlm.rewards.config import ChunkRewardConfig, StepRewardConfig
from rlvlm.runs.config import EvalConfig, RunConfig, TrackConfig
from rlvlm.runs.kinds import ChunksRun, StepsRun, TurnsRun


def recipe(task: str, has_checkpoint: bool = False) -> RunConfig:
    """The configuration a task starts from: ours, its family's, its own, or the general defaults with its name.

    Args:
        task: any name of it.
        has_checkpoint: whether a VLA that comes trained (`policy.model`) will act: what our recipes have tuned for the
            pocket VLA does not become it.

    Raises:
        UsageError: there is no such task; the message names the nearest.
    """
    task = full_name(task)
    own, family = find_task(task).recipe, task.partition("/")[0]
    if task in RECIPES or family in FAMILY_RECIPES:
        config = RECIPES[task]() if task in RECIPES else FAMILY_RECIPES[family](task)
        return of_checkpoint(config) if has_checkpoint and config.kind == "chunks" else config
    if own:
        module, _, function = own.partition(":")
        return replace(getattr(importlib.import_module(module), function)(), task=task)
    return general(task)


def general(task: str) -> RunConfig:
    """Any other task: one of your own, or of Gymnasium's (docs/own_env.md). Not tuned for it.

    In steps the reward is learned from states, where the paper's is learned from images: what the images show is in the
    state, and a state tells near from nearer with far fewer labels. There are four times as many labels as in our own
    tasks and hardly more gradient steps: fitted for longer, held-out pairs are ordered worse (docs/experiments/).
    Networks scale states and the reward's level, since the units of the one are unknown and the other is not chosen.
    """
    env = task_env(task)
    if (kind := find_task(task).kind) == "turns":
        return _turns(task, steps=40_960, gamma=0.97)
    if kind == "chunks":
        return ChunksRun(task=task, env=env)
    return StepsRun(
        task=task,
        env=env,
        reward=StepRewardConfig(model="state"),
        feedback=FeedbackConfig(first_step=2_000, every_steps=1_000, queries=400),
        reward_model=RewardModelConfig(batch_size=64, lr=1e-3, output="normalised"),
        algo=SACConfig(is_calibrated=True),
        eval=EvalConfig(episodes=20),
    )


def paper(task: str) -> RunConfig:
    """The defaults, which are the paper's set-up: hidden robot, fixed start near what is to be moved, 250 steps."""
    return StepsRun(task=task, env=task_env(task))


def sweep_into() -> RunConfig:
    """MetaWorld sweep-into in the paper's set-up: hidden robot, fixed start behind the cube, 250-step episodes.

    It needs the networks of 256: with 2x128 SAC on the true reward learns nothing that stays. Whether the hand touches
    the cube is decided by centimetres, which networks see once states are scaled. Queries are about the last 5,000
    steps: of all there were, most show the cube where it started, and few tell its places near the hole apart.
    """
    return StepsRun(
        task="sweep_into",
        feedback=FeedbackConfig(queries=200, recent_episodes=20),
        algo=SACConfig(is_calibrated=True),
    )


def cartpole() -> RunConfig:
    """The continuous cart and pole, 100 steps an episode as in the paper."""
    return StepsRun(
        task="cartpole",
        steps=10_000,
        env=task_env("cartpole"),
        eval=EvalConfig(every_steps=1_000, episodes=10),
    )


def straighten_rope() -> RunConfig:
    """A crumpled rope, held by both ends, 40 steps an episode as in the paper.

    Sessions are larger and closer together than elsewhere, since a tangled rope is hard to read: of random pairs of an
    oracle, with 200 the image reward ordered 69 % of those held out, with 2,000 it ordered 80 %, and the larger step
    size adds two.
    """
    return StepsRun(
        task="straighten_rope",
        steps=10_000,
        env=task_env("straighten_rope"),
        feedback=FeedbackConfig(first_step=2_000, every_steps=1_000, queries=400),
        reward_model=RewardModelConfig(lr=1e-3),
        eval=EvalConfig(every_steps=1_000, episodes=10),
    )


def pass_water() -> RunConfig:
    """A cup of water that is brought to a red disc, 75 steps an episode as in the paper.

    With half as many queries and the usual step size an oracle's comparisons brought a return of -70; with these, -32.
    """
    return StepsRun(
        task="pass_water",
        steps=10_000,
        env=task_env("pass_water"),
        feedback=FeedbackConfig(first_step=2_000, every_steps=1_000, queries=200),
        reward_model=RewardModelConfig(lr=1e-3),
        eval=EvalConfig(every_steps=1_500, episodes=5),
    )


def fold_cloth() -> RunConfig:
    """A cloth that is folded along its diagonal; an episode is a single fold, as in the paper.

    There is no exploration by novelty, because all states are the same, and queries are drawn from the folds since the
    last session.
    """
    return StepsRun(
        task="fold_cloth",
        steps=3_000,
        env=task_env("fold_cloth"),
        feedback=FeedbackConfig(first_step=300, every_steps=300, queries=50, max_queries=500, recent_episodes=300),
        algo=SACConfig(seed_steps=300, turn_steps=1),
        eval=EvalConfig(every_steps=300, episodes=1),
        track=TrackConfig(log_every_steps=300, checkpoint_every_steps=1_500),
    )


def stock(task: str) -> RunConfig:
    """Any task of MetaWorld or SoftGym as it comes, not tuned. MetaWorld's robot is shown: it starts far away, and in
    some tasks it is judged.
    """
    return StepsRun(task=task, steps=100_000, env=task_env(task))


def number_line() -> RunConfig:
    """gym-cards NumberLine. The start is kept short and noisy, so that what PPO adds can be seen."""
    return _turns("number_line", steps=10_240)


def ez_points() -> RunConfig:
    """gym-cards EZPoints: 12 from two cards. The start is noisy, so that what PPO adds can be seen."""
    return _turns(
        "ez_points", steps=12_288, gamma=0.95, reward_scale=0.1, min_lr_ratio=0.05,
        sft=ReplySFTConfig(turns=1_000, p_wrong=0.3, updates=200),
    )  # fmt: skip


def blackjack() -> RunConfig:
    """gym-cards Blackjack, from demonstrations of basic strategy without mistakes."""
    return _turns("blackjack", steps=10_240, sft=ReplySFTConfig(turns=6_000, updates=400))


def points24() -> RunConfig:
    """gym-cards Points24: 24 from four cards; evaluated on unseen hands.

    The expert's thought is a search of up to 620 tokens, which takes many demonstrations to learn.
    """
    base = _turns(
        "points24", steps=8_192, gamma=0.95, reward_scale=0.1,
        env=replace(task_env("points24"), split="training"),
        sft=ReplySFTConfig(turns=40_000, updates=2_500, batch_size=48, lr=1.5e-3),
    )  # fmt: skip
    return replace(base, algo=replace(base.algo, max_reply_tokens=640), eval=replace(base.eval, every_steps=base.steps))


def empty_random_6x6() -> RunConfig:
    """MiniGrid's empty room with a start anywhere. The start is short and noisy and episodes end after some four times
    the expert's turns, so that what PPO adds can be seen: with the env's 144 turns even chance succeeds.
    """
    return _turns(
        "empty_random_6x6", steps=6_144, gamma=0.97, min_lr_ratio=0.05,
        env=replace(task_env("empty_random_6x6"), episode_steps=24),
        sft=ReplySFTConfig(turns=1_000, p_wrong=0.5, updates=300),
    )  # fmt: skip


def doorkey(task: str, episode_steps: int, turns: int, updates: int) -> RunConfig:
    """MiniGrid's key, door and goal; evaluated on layouts that were never met, in a bit more than three times the
    expert's turns. Larger rooms take more demonstrations, and more steps to learn them.

    A greedy policy that is wrong in one state stays there. So the expert is perturbed, that many states be shown, and
    the prompt has the last action and whether it changed anything.
    """
    return _turns(
        task, steps=4_096, gamma=0.97, min_lr_ratio=0.05,
        env=replace(task_env(task), episode_steps=episode_steps, split="training", prompt_last_action=True),
        sft=ReplySFTConfig(turns=turns, p_perturb=0.3, updates=updates),
    )  # fmt: skip


def pick_place_can() -> RunConfig:
    """The robot arm with the can, by an action head.

    The wrist does not see every can from the start, so there is a second view, and the prompt says where the hand is.
    The pocket policy's eyes know no robots: they learn in the supervised start, from what the expert says of the image
    more than from what it does, and stay as they are in PPO.
    """
    steps = 15_360
    base = _turns(
        "pick_place_can", steps=steps, gamma=0.97,
        env=replace(
            task_env("pick_place_can"), second_view=True, view_px=96, shows_text=True, physics="fast",
        ),
        sft=ReplySFTConfig(turns=12_000, p_perturb=0.12, updates=800, reply_weight=0.2),
    )  # fmt: skip
    return replace(
        base,
        policy=PolicyConfig(head="actions", train_vision=True, min_pixels=2 * 96 * 96, new_words=words.SENTENCES),
        algo=replace(
            base.algo, loss=LossConfig(entropy_weight=0.01), num_envs=48, rollout_turns=768, minibatch_turns=128,
            epochs=3, lr=1e-4, min_lr_ratio=0.2, keeps_vision=True,
        ),
        eval=replace(base.eval, every_steps=steps),
    )  # fmt: skip


_SHORT_AND_NOISY = ReplySFTConfig(turns=1_000, p_wrong=0.4, updates=100)


def _turns(
    task: str,
    *,
    steps: int,
    gamma: float = 0.9,
    reward_scale: float = 1.0,
    sft: ReplySFTConfig = _SHORT_AND_NOISY,
    env: Any = None,
    min_lr_ratio: float = 0.02,
) -> TurnsRun:
    """A task in turns: what its env and its length ask for is given, all else is alike."""
    return TurnsRun(
        task=task,
        steps=steps,
        env=env or task_env(task),
        judge=JudgeConfig(model="scorer", score="utility"),
        sft=sft,
        algo=PolicyGradientConfig(
            advantage=AdvantageConfig(gamma=gamma),
            loss=LossConfig(kl_weight=0.02),
            reward_scale=reward_scale,
            lr=2e-4,
            min_lr_ratio=min_lr_ratio,
        ),
        eval=EvalConfig(every_steps=steps // 2, episodes=200),
        track=TrackConfig(log_every_steps=512, checkpoint_every_steps=steps // 2),
    )


def push_block() -> RunConfig:
    """The tiny env in chunks, from a start that succeeds in about half of all episodes."""
    return ChunksRun(
        task="push_block",
        steps=6_000_000,
        env=task_env("push_block"),
        judge=JudgeConfig(model="scorer", score="success"),
        reward=ChunkRewardConfig(num_frames=2, frame_px=144),
        sft=ChunkSFTConfig(p_perturb=0.1, label_width=0.08),
        algo=chunk_defaults(draws="chunk"),
        eval=EvalConfig(every_steps=250_000, episodes=200),
        track=TrackConfig(log_every_steps=50_000, checkpoint_every_steps=500_000),
    )


def libero(task: str) -> ChunksRun:
    """One task of LIBERO, its things moved by up to 2 cm so that the policy must look.

    Four fifths of the usual time limit: failures cost less, and there is time to try again, as demonstrations show that
    go astray now and then.
    """
    env = task_env(task)
    judge, reward = _judged(task)
    return ChunksRun(
        task=task,
        steps=600_000,
        env=replace(
            env, start_jitter_m=0.02, physics="fast", mesh_cell=0.012, episode_steps=env.episode_steps * 4 // 5
        ),
        policy=VLAConfig(pocket=PocketVLAConfig(image_px=64, dilated=1, predicts_offsets=True)),
        sft=ChunkSFTConfig(episodes=100, noise=0.02, p_perturb=0.1, label_width=0.05, updates=800),
        judge=judge,
        reward=reward,
        algo=chunk_defaults(
            preset="ppo",
            groups=16,
            rounds=1,
            temperature=0.25,
            draws="chunk",
            min_range=0.2,
            kl_target=1.0,
            lr=5e-4,
            warm_up=4,
            min_lr_ratio=0.3,
            advantage=AdvantageConfig(gamma=1.0, gae_lambda=0.5, values="state"),
        ),
        eval=EvalConfig(every_steps=150_000, episodes=100),
        track=TrackConfig(log_every_steps=10_000, checkpoint_every_steps=50_000),
    )


def libero_suite(suite: str) -> RunConfig:
    """One policy for all tasks of a suite: as for one task, with more demonstrations and a longer SFT."""
    single, num_tasks = libero(f"{suite}/0"), len(SUITES[suite])
    judge, reward = _judged(suite)
    return replace(
        single,
        task=suite,
        steps=2_000_000,
        env=replace(single.env, episode_steps=task_env(suite).episode_steps * 4 // 5),
        judge=judge,
        reward=reward,
        sft=replace(single.sft, episodes=30 * num_tasks, updates=2_500),
        eval=replace(single.eval, every_steps=200_000, episodes=200),
    )


def of_checkpoint(pocket: RunConfig) -> RunConfig:
    """The same task as its benchmark has it, for a VLA that comes trained: nothing is moved, physics are exact, and
    GRPO's settings are those published for OpenVLA-OFT, where the pocket VLA's would ruin it.

    Source: RLinf's and SimpleVLA-RL's LIBERO configs: temperature 1.6, groups of 8, no bound on the divergence; RLinf's
    step size for LoRA. Departure: 8 groups for 64, which is what one GPU plays in a bearable time.
    """
    return replace(
        pocket,
        env=task_env(pocket.task),
        algo=chunk_defaults(groups=8, temperature=1.6, lr=2e-5, warm_up=0, kl_target=None, microbatch_turns=16),
    )


def _judged(task: str) -> tuple[JudgeConfig, ChunkRewardConfig]:
    """The judge of a task or a suite, if it has one, and what it is shown: the pocket video judge knows some."""
    if task in known_tasks("video"):
        shown = ChunkRewardConfig(num_frames=VIDEO_NUM_FRAMES, frame_px=VIDEO_FRAME_PX)
        return JudgeConfig(model="video", score="success"), shown
    return JudgeConfig(), ChunkRewardConfig(flip_images=True)


RECIPES: dict[str, Callable[[], RunConfig]] = {
    **{task: partial(paper, task) for task in ("drawer_open", "soccer")},
    **{task: partial(general, task) for task in SHORT_NAMES},
    **{make.__name__: make for make in (sweep_into, cartpole, straighten_rope, pass_water, fold_cloth)},
    **{make.__name__: make for make in (number_line, ez_points, blackjack, points24, pick_place_can)},
    "empty_random_6x6": empty_random_6x6,
    "doorkey_6x6": partial(doorkey, "doorkey_6x6", episode_steps=40, turns=22_000, updates=2_000),
    "doorkey_8x8": partial(doorkey, "doorkey_8x8", episode_steps=70, turns=40_000, updates=3_000),
    "push_block": push_block,
    **{suite: partial(libero_suite, suite) for suite in SUITES},
}
"""By task."""
FAMILY_RECIPES: dict[str, Callable[[str], RunConfig]] = {
    **dict.fromkeys(("metaworld", "softgym"), stock),
    "minigrid": general,
    **dict.fromkeys(SUITES, libero),
}
"""For tasks named FAMILY/NAME, called with the task."""
