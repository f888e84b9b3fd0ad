"""The episodes of a run's last evaluation, image by image and with captions, as the page of a run shows them."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from rlvlm.algorithms.base import BaseAlgorithm
from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient
from rlvlm.algorithms.policy_gradient.player import stands_still
from rlvlm.core.disk import write_json
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.steps import Frames
from rlvlm.judges.agreement import wilson_interval
from rlvlm.runs.files.folder import RunFolder
from rlvlm.runs.settings.config import RunConfig
from rlvlm.templates import inline

MAX_EPISODES, MAX_FRAMES = 24, 24
"""Maximum number of episodes that are kept, and maximum frames of each."""
CHUNK_PX = 128
"""Side of the frames of envs in chunks, which have no size of their own, pixels."""
MAX_TEXT = 2_000
"""Maximum number of characters kept of a thought or an action."""
PAGE_PX = 256
"""Maximum length of the longer side of a frame, pixels."""


def write_played(folder: RunFolder, config: RunConfig, algorithm: BaseAlgorithm) -> None:
    """Writes `episodes.json`: the last evaluation's episodes with the policy's replies or actions, if it replies or
    plans; for chunks also `success_by_instruction.csv`.
    """
    if not isinstance(algorithm, PolicyGradient) or not (played := algorithm.last_played):
        return
    cards = [episode_card(episode, algorithm, config) for episode in played[:MAX_EPISODES]]
    note = f"The first {len(cards)} of {len(played)} greedy episodes of the last evaluation"
    if played[0].replies:
        note += "; the thought is everything that the reply says before its action."
        if (history := algorithm.config.history) > 1:
            note += f" Each prompt shows the image of its turn and, before it, those of the {history - 1} turns before."
        if still := [episode for episode in played if stands_still(episode)]:
            unreadable = sum(episode.replies[-1].action is None for episode in still)
            note += (
                f" In {len(still)} of all {len(played)} the policy was stuck at the end: it saw the same image again "
                f"and gave the same reply again, in {unreadable} one that cannot be read. Sampled play may get out."
            )
    else:
        note += ", from initial states that training never saw. The table counts all of them, with 95 % intervals."
        rows: list[dict[str, str | int]] = []
        for instruction in sorted({episode.goals[0] for episode in played}):
            ends = [episode.is_success for episode in played if episode.goals[0] == instruction]
            rates = (sum(ends) / len(ends), *wilson_interval(sum(ends), len(ends)))
            row = {"instruction": instruction, "episodes": len(ends), "successes": sum(ends)}
            rows.append(row | {name: f"{rate:.2f}" for name, rate in zip(("rate", "low", "high"), rates, strict=True)})
        folder.by_instruction.write(rows)
    measures = {
        "episodes": len(played),
        "success": f"{np.mean([episode.is_success for episode in played]):.0%}",
        "mean return": f"{np.mean([episode.env_return for episode in played]):.3g}",
        "mean length": f"{np.mean([episode.num_steps for episode in played]):.3g}",
    }
    write_json(folder.played, {"note": note, "measures": measures, "episodes": cards})


def episode_card(episode: TokenEpisode, algorithm: PolicyGradient, config: RunConfig) -> dict[str, Any]:
    """Returns an episode for people: the policy's images before each reply or chunk, by all cameras, and results."""
    if episode.replies:
        title, frames = config.task, algorithm.draw(episode.snapshots[:-1], 0)
        scale = algorithm.config.algo.reward_scale  # unit of the policy's values
        captions = [
            {
                "thought": reply.thought,
                "action": reply.text[slice(*reply.action_span)] if reply.action_span else reply.text,
                "reward": float(reward),
                "value": float(value) / scale,
            }
            for reply, reward, value in zip(episode.replies, episode.env_rewards, episode.values, strict=True)
        ]
    else:
        title, frames = episode.goals[0], algorithm.draw_all(episode.snapshots[[0, *episode.ends]], CHUNK_PX)
        captions = [
            {"action": f"chunk {number}: {steps} steps", "reward": float(reward)}
            for number, (steps, reward) in enumerate(zip(episode.steps, episode.turn_rewards, strict=True), start=1)
        ]
        captions.append({"action": "the end"})
    return {
        "title": title,
        "outcome": "success" if episode.is_success else "failure",
        "episode_return": episode.env_return,
        "steps": episode.num_steps,  # turns, or env steps: frames inside a chunk are not stored
        "seed": episode.seed,
        "num_frames": len(frames),
        "moments": moments_of(frames, captions),
    }


def moments_of(frames: Frames, captions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns evenly spread frames of an episode, each with its number, image and caption.

    Args:
        frames: [T, H, W, 3], T >= 1.
        captions: T of them, describing the policy's answer to the frame: `thought` and `action`, untrusted text;
            `reward`, and the `value` predicted by the policy. Any may be missing.
    """
    moments = []
    for place in np.unique(np.linspace(0, len(frames) - 1, MAX_FRAMES).astype(int)).tolist():
        image, data = Image.fromarray(np.ascontiguousarray(frames[place])), BytesIO()
        is_tiny = image.width < 128  # enlarged without smoothing, and without compression artefacts
        image.thumbnail((PAGE_PX, PAGE_PX * max(1, image.height // image.width)))
        image.save(data, format="webp", lossless=max(image.size) < 128, quality=85)
        caption = {"thought": "", "action": "", "reward": None, "value": None, **captions[place]}
        words = {name: caption[name][:MAX_TEXT] for name in ("thought", "action")}
        picture = {"number": place + 1, "picture": inline(data.getvalue(), "webp"), "is_tiny": is_tiny}
        moments.append(caption | words | picture)
    return moments
