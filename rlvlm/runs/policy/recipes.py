"""One complete, tuned configuration per task of the second pipeline. docs/policies.md has their runs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rlvlm.algorithms.ppo_vlm.config import HeadConfig, PPOConfig, TokenPPOConfig
from rlvlm.algorithms.sft.config import SFTConfig
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.minigrid.ids import SHORT_NAMES
from rlvlm.envs.registry import task_env
from rlvlm.envs.robosuite import words
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.config import EvalConfig, TrackConfig
from rlvlm.runs.policy.config import PolicyRunConfig


def number_line() -> PolicyRunConfig:
    """gym-cards NumberLine. The start is kept short and noisy, so that what PPO adds can be seen."""
    return _recipe("number_line", steps=10_240)


def ez_points() -> PolicyRunConfig:
    """gym-cards EZPoints: 12 from two cards. The start is noisy, so that what PPO adds can be seen."""
    return _recipe(
        "ez_points", steps=12_288, gamma=0.95, reward_scale=0.1, final_lr=0.05,
        sft=SFTConfig(turns=1_000, p_wrong=0.3, updates=200),
    )  # fmt: skip


def blackjack() -> PolicyRunConfig:
    """gym-cards Blackjack, from demonstrations of basic strategy without mistakes."""
    return _recipe("blackjack", steps=10_240, sft=SFTConfig(turns=6_000, updates=400))


def points24() -> PolicyRunConfig:
    """gym-cards Points24: 24 from four cards; evaluated on hands that were never dealt.

    The expert's thought is a search of up to 620 tokens, which takes many demonstrations to learn.
    """
    base = _recipe(
        "points24", steps=8_192, gamma=0.95, reward_scale=0.1,
        world=replace(task_env("points24"), split="training"),
        sft=SFTConfig(turns=40_000, updates=2_500, batch_turns=48, lr=1.5e-3),
    )  # fmt: skip
    return replace(base, algo=replace(base.algo, max_reply_tokens=640), eval=replace(base.eval, every_steps=base.steps))


def general(task: str) -> PolicyRunConfig:
    """Any env of MiniGrid and any other env in turns, not tuned."""
    return _recipe(task, steps=40_960, gamma=0.97)


def empty_random_6x6() -> PolicyRunConfig:
    """MiniGrid's empty room with a start anywhere. The start is short and noisy and episodes end after some four times
    the expert's turns, so that what PPO adds can be seen: with the env's 144 turns even chance succeeds.
    """
    return _recipe(
        "empty_random_6x6", steps=6_144, gamma=0.97, final_lr=0.05,
        world=replace(task_env("empty_random_6x6"), episode_steps=24),
        sft=SFTConfig(turns=1_000, p_wrong=0.5, updates=300),
    )  # fmt: skip


def doorkey_6x6() -> PolicyRunConfig:
    """MiniGrid's key, door and goal; evaluated on layouts that were never met, in a bit more than three times the
    expert's turns.

    A greedy policy that is wrong in one state stays there. So the expert perturbed, that many states be shown, and the
    prompt tells the last action and whether it changed anything.
    """
    return _recipe(
        "doorkey_6x6", steps=4_096, gamma=0.97, final_lr=0.05,
        world=replace(task_env("doorkey_6x6"), episode_steps=40, split="training", shows_last=True),
        sft=SFTConfig(turns=22_000, p_perturb=0.3, updates=2_000),
    )  # fmt: skip


def doorkey_8x8() -> PolicyRunConfig:
    """As doorkey_6x6, with larger rooms: more demonstrations, and more steps to learn them."""
    return _recipe(
        "doorkey_8x8", steps=4_096, gamma=0.97, final_lr=0.05,
        world=replace(task_env("doorkey_8x8"), episode_steps=70, split="training", shows_last=True),
        sft=SFTConfig(turns=40_000, p_perturb=0.3, updates=3_000),
    )  # fmt: skip


def pick_place_can() -> PolicyRunConfig:
    """The robot arm with the can, by an action head.

    The wrist does not see every can from the start, so there is a second view, and the prompt tells where the hand is.
    The pocket policy's eyes know no robots: they learn in the supervised start, from what the expert says of the image
    more than from what it does, and stay as they are in PPO.
    """
    steps = 15_360
    base = _recipe(
        "pick_place_can", steps=steps,
        world=replace(
            task_env("pick_place_can"), second_view=True, view_px=96, shows_text=True, physics="fast",
        ),
        sft=SFTConfig(turns=12_000, p_perturb=0.12, updates=800, reply_weight=0.2),
    )  # fmt: skip
    return replace(
        base,
        policy=PolicyConfig(acts="head", train_vision=True, min_pixels=2 * 96 * 96, new_words=words.SENTENCES),
        algo=replace(
            base.algo, objective=HeadConfig(gamma=0.97), num_envs=48, rollout_turns=768, minibatch_turns=128,
            epochs=3, lr=1e-4, final_lr=0.2, keeps_vision=True,
        ),
        eval=replace(base.eval, every_steps=steps),
    )  # fmt: skip


_SHORT_AND_NOISY = SFTConfig(turns=1_000, p_wrong=0.4, updates=100)


def _recipe(
    task: str,
    *,
    steps: int,
    gamma: float = 0.9,
    reward_scale: float = 1.0,
    sft: SFTConfig = _SHORT_AND_NOISY,
    world: EnvConfig | None = None,
    final_lr: float = 0.02,
) -> PolicyRunConfig:
    return PolicyRunConfig(
        task=task,
        steps=steps,
        env=world or task_env(task),
        judge=JudgeConfig(model="scorer", score="utility"),
        sft=sft,
        algo=PPOConfig(
            objective=TokenPPOConfig(gamma=gamma, kl_weight=0.02),
            reward_scale=reward_scale,
            lr=2e-4,
            final_lr=final_lr,
        ),
        eval=EvalConfig(every_steps=steps // 2, episodes=200),
        track=TrackConfig(log_every_steps=512, checkpoint_every_steps=steps // 2),
    )


RECIPES: dict[str, Callable[[], PolicyRunConfig]] = {
    **{task: partial(general, task) for task in SHORT_NAMES},
    "number_line": number_line,
    "ez_points": ez_points,
    "blackjack": blackjack,
    "points24": points24,
    "pick_place_can": pick_place_can,
    "empty_random_6x6": empty_random_6x6,
    "doorkey_6x6": doorkey_6x6,
    "doorkey_8x8": doorkey_8x8,
}
FAMILY_RECIPES: dict[str, Callable[[str], PolicyRunConfig]] = {"minigrid": general}
"""For tasks named FAMILY/NAME, called with the task."""
