"""A complete, tuned configuration per task; the recipe decides which algorithm is used.

Their runs are in docs/results.md (states), docs/policies.md (turns) and docs/vla.md (chunks).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rlvlm.algorithms.policy_gradient.config import (
    AdvantageConfig,
    LossConfig,
    PolicyGradientConfig,
    chunk_defaults,
)
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.core.own_code import import_own
from rlvlm.envs.config import TurnEnvConfig
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
from rlvlm.runs.settings.config import EvalConfig, RunConfig, TrackConfig
from rlvlm.runs.settings.kinds import ChunksRun, StepsRun, TurnsRun


def recipe(task: str, has_checkpoint: bool = False) -> RunConfig:
    """Returns a task's default configuration: our recipe, its family's, its own, or the general defaults.

    Args:
        task: any name of the task.
        has_checkpoint: whether a pretrained VLA (`policy.model`) will act, for which the settings tuned for the pocket
            VLA are unsuitable.

    Raises:
        UsageError: there is no such task; the message names the nearest.
    """
    task = full_name(task)
    own, family = find_task(task).recipe, task.partition("/")[0]
    if task in RECIPES or family in FAMILY_RECIPES:
        config = RECIPES[task]() if task in RECIPES else FAMILY_RECIPES[family](task)
        return of_checkpoint(config) if has_checkpoint and isinstance(config, ChunksRun) else config
    if own:
        module, _, function = own.partition(":")
        return replace(getattr(import_own(module), function)(), task=task)
    return general(task)


def general(task: str) -> RunConfig:
    """Returns untuned defaults for any other task: your own, or one of Gymnasium's (docs/own_env.md).

    In steps the reward is learned from states rather than from images as in the paper: the state contains what images
    show, and needs far fewer labels to tell near from nearer. There are four times as many labels as in our own tasks
    and hardly more gradient steps: with a longer fit, held-out pairs are ordered worse (docs/experiments/). Networks
    scale states and the reward's level, because the former have unknown units and the latter is arbitrary.
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
    """Returns the defaults, which are the paper's set-up: hidden robot, fixed start near the object, 250 steps."""
    return StepsRun(task=task, env=task_env(task))


def sweep_into() -> RunConfig:
    """Returns MetaWorld sweep-into in the paper's set-up: hidden robot, fixed start behind the cube, 250 steps.

    It needs networks of 256 units: with 2x128 SAC on the true reward learns nothing that lasts. Centimetres decide
    whether the hand touches the cube, which networks only see once states are scaled. Queries are about the last 5,000
    steps: most of all earlier ones show the cube at its start, and few distinguish its positions near the hole.
    """
    return StepsRun(
        task="sweep_into",
        feedback=FeedbackConfig(queries=200, recent_episodes=20),
        algo=SACConfig(is_calibrated=True),
    )


def cartpole() -> RunConfig:
    """Returns the continuous cart and pole, with 100 steps per episode as in the paper."""
    return StepsRun(
        task="cartpole",
        steps=10_000,
        env=task_env("cartpole"),
        eval=EvalConfig(every_steps=1_000, episodes=10),
    )


def straighten_rope() -> RunConfig:
    """Returns a crumpled rope, held by both ends, with 40 steps per episode as in the paper.

    Sessions are larger and more frequent than elsewhere, because a tangled rope is hard to judge: from random pairs
    labelled by an oracle, the image reward ordered 69 % of held-out pairs right with 200 pairs and 80 % with 2,000; the
    larger step size adds two.
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
    """Returns a cup of water that is moved to a red disc, with 75 steps per episode as in the paper.

    With half as many queries and the usual step size an oracle's comparisons led to a return of -70; with these, -32.
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
    """Returns a cloth that is folded along its diagonal; an episode is a single fold, as in the paper.

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
    """Returns any stock task of MetaWorld, not tuned. The robot is visible: it starts far away, and in some tasks it is
    what is judged.
    """
    return StepsRun(task=task, steps=100_000, env=task_env(task))


def number_line() -> RunConfig:
    """Returns gym-cards NumberLine, with a short and noisy start, so that the effect of PPO is visible."""
    return _turns("number_line", steps=10_240)


def ez_points() -> RunConfig:
    """Returns gym-cards EZPoints, 12 from two cards, with a noisy start, so that the effect of PPO is visible."""
    return _turns(
        "ez_points", steps=12_288, gamma=0.95, reward_scale=0.1, min_lr_ratio=0.05,
        sft=ReplySFTConfig(turns=1_000, p_wrong=0.3, updates=200),
    )  # fmt: skip


def blackjack() -> RunConfig:
    """Returns gym-cards Blackjack, with flawless demonstrations of basic strategy."""
    return _turns("blackjack", steps=10_240, sft=ReplySFTConfig(turns=6_000, updates=400))


def points24() -> RunConfig:
    """Returns gym-cards Points24, 24 from four cards, evaluated on unseen hands.

    The expert's thought is a search of up to 620 tokens, which takes many demonstrations to learn.
    """
    base = _turns(
        "points24", steps=8_192, gamma=0.95, reward_scale=0.1,
        env=replace(task_env("points24"), split="training"),
        sft=ReplySFTConfig(turns=40_000, updates=2_500, batch_size=48, lr=1.5e-3),
    )  # fmt: skip
    return replace(base, algo=replace(base.algo, max_reply_tokens=640), eval=replace(base.eval, every_steps=base.steps))


def empty_random_6x6() -> RunConfig:
    """Returns MiniGrid's empty room with a start anywhere. The start is short and noisy and episodes end after about
    four times the expert's turns, so that the effect of PPO is visible: in the env's 144 turns even chance succeeds.
    """
    return _turns(
        "empty_random_6x6", steps=6_144, gamma=0.97, min_lr_ratio=0.05,
        env=replace(task_env("empty_random_6x6"), episode_steps=24),
        sft=ReplySFTConfig(turns=1_000, p_wrong=0.5, updates=300),
    )  # fmt: skip


def doorkey(task: str, episode_steps: int, turns: int, updates: int) -> RunConfig:
    """Returns MiniGrid's key, door and goal, evaluated on unseen layouts within a bit more than three times the
    expert's turns. Larger rooms need more demonstrations, and more steps to learn them.

    A greedy policy that is wrong in one state stays there. So the expert is perturbed, to show many states, and the
    prompt contains the last action and whether it changed anything.
    """
    return _turns(
        task, steps=4_096, gamma=0.97, min_lr_ratio=0.05,
        env=replace(task_env(task), episode_steps=episode_steps, split="training", prompt_last_action=True),
        sft=ReplySFTConfig(turns=turns, p_perturb=0.3, updates=updates),
    )  # fmt: skip


def pick_place_can() -> RunConfig:
    """Returns the robot arm with the can, with an action head.

    At the start the wrist camera misses some cans, so there is a second view, and the prompt states the hand's
    position. The pocket policy's vision encoder has never seen robots: it is trained in the supervised start, more by
    the expert's description of the image than by its actions, and frozen in PPO.
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
    env: TurnEnvConfig | None = None,
    min_lr_ratio: float = 0.02,
) -> TurnsRun:
    """Returns a task in turns from its own settings; all others are common defaults."""
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
    """Returns the tiny env in chunks, from a start that succeeds in about half of all episodes."""
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
    """Returns one task of LIBERO, with things moved by up to 2 cm so that the policy must look.

    The time limit is four fifths of the usual: failures cost less, and there is still time to try again, as
    demonstrations with occasional perturbations show.
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
    """Returns one policy for all tasks of a suite: as for one task, with more demonstrations and a longer SFT."""
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
    """Returns the same task as in its benchmark, for a pretrained VLA: nothing is moved, physics are exact, and GRPO's
    settings are those published for OpenVLA-OFT; the pocket VLA's would ruin it.

    Source: RLinf's and SimpleVLA-RL's LIBERO configs: temperature 1.6, groups of 8, no bound on the divergence; RLinf's
    step size for LoRA. Departure: 8 groups instead of 64, which a single GPU plays in reasonable time.
    """
    return replace(
        pocket,
        env=task_env(pocket.task),
        algo=chunk_defaults(groups=8, temperature=1.6, lr=2e-5, warm_up=0, kl_target=None, microbatch_turns=16),
    )


def _judged(task: str) -> tuple[JudgeConfig, ChunkRewardConfig]:
    """Returns the judge of a task or a suite, if the pocket video judge knows it, and the images it is shown."""
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
"""Recipes by task."""
FAMILY_RECIPES: dict[str, Callable[[str], RunConfig]] = {
    "metaworld": stock,
    "minigrid": general,
    **dict.fromkeys(SUITES, libero),
}
"""Recipes for tasks named FAMILY/NAME, called with the task."""
