"""What the pocket policy reads rightly and how evenly it acts, on episodes it never saw.

`python -m rlvlm.pocket.policy.evaluate` prints the figures that stand in `evaluation.json` and in CARD.md.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from rlvlm.core.disk import write_json
from rlvlm.core.sampling import ReplyRequest, SampledReply
from rlvlm.pocket.policy.dataset import TAUGHT_TASKS, Moment, Replies, TaughtTask, collect_moments
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.vlms.shipped import weights_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What is measured, and where it is written."""

    model: Path = weights_folder("policy")
    """Folder of the weights."""
    out: Path | None = None
    """File for the figures, as JSON; none prints them only."""
    moments: int = 400
    """Moments per task, of episodes that training never saw."""
    tasks: tuple[str, ...] = ()
    """Tasks; none means all."""
    seed: int = 2_000_000
    """Of the episodes."""
    max_new_tokens: int = 80
    """A longer reply counts as invalid."""


def measure(engine: PolicyEngine, task: TaughtTask, config: EvaluateConfig) -> dict[str, float]:
    """Figures of one task, sampled at temperature 1 unless said otherwise.

    `valid`: replies with a legal action. `reads`: replies that begin as every right one does, up to the plan; `reads
    greedy` likewise for greedy replies. `plays`: share that does what the expert does; `chance` is what even play would
    give. `most chosen`: share of the action taken most often, where even play gives about 1 / actions.
    """
    env, moments = collect_moments(task, config.moments, config.seed)
    replies = Replies([task], moments)
    images = [moment.image for moment in moments]
    missing = engine.missing(images)
    for begin in range(0, len(missing), engine.max_batch):
        rows = missing[begin : begin + engine.max_batch]
        engine.show([images[row] for row in rows], env.draw(np.stack([moments[row].snapshot for row in rows])))
    requests = [ReplyRequest(prompt=moment.prompt, image=moment.image, seed=i) for i, moment in enumerate(moments)]
    sampled = engine.reply(requests, max_new_tokens=config.max_new_tokens)
    greedy = engine.reply(requests, max_new_tokens=config.max_new_tokens, greedy=True)
    legal = [moment.legal for moment in moments]
    actions = [_action(env.action_names, reply.text, may) for reply, may in zip(sampled, legal, strict=True)]
    chosen = [action for action in actions if action is not None]
    return {
        "valid": len(chosen) / len(moments),
        "reads": _reads(replies, moments, sampled),
        "reads greedy": _reads(replies, moments, greedy),
        "plays": float(np.mean([a == m.action for a, m in zip(actions, moments, strict=True)])),
        "chance": float(np.mean([1 / len(may) for may in legal])),
        "most chosen": max(Counter(chosen).values()) / max(len(chosen), 1),
        "tokens": float(np.mean([len(reply.tokens.reply_ids) for reply in sampled])),
        "pictures": len(set(images)),
    }


def _reads(replies: Replies, moments: Sequence[Moment], said: Sequence[SampledReply]) -> float:
    """Share of replies whose beginning, up to the plan, is right."""
    right = [reply.text.startswith("{" + replies.reading(moment)) for reply, moment in zip(said, moments, strict=True)]
    return float(np.mean(right))


def _action(names: Sequence[str], text: str, legal: Sequence[int]) -> int | None:
    found = re.search(r'"action": "([^"]*)"\}$', text)
    index = names.index(found[1]) if found and found[1] in names else None
    return index if index in legal else None


def main() -> None:
    """Reads the command line, measures and prints."""
    config = tyro.cli(EvaluateConfig, description=__doc__)
    engine = PolicyEngine(load_policy(PolicyConfig(model=str(config.model), learns="all", device="cpu")))
    tasks = [each for each in TAUGHT_TASKS if not config.tasks or each.name in config.tasks]
    figures = {each.name: measure(engine, each, config) for each in tasks}
    print(json.dumps(figures, indent=2))  # noqa: T201 - the command's answer
    if config.out is not None:
        write_json(config.out, figures)


if __name__ == "__main__":
    main()
