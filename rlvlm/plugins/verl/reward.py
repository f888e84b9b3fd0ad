"""A judge's score as verl's custom reward function, named in verl's config.

reward.custom_reward_function.path=pkg://rlvlm.plugins.verl.reward
reward.custom_reward_function.name=compute_score
+reward.custom_reward_function.reward_kwargs.url=http://127.0.0.1:8123
+reward.custom_reward_function.reward_kwargs.show=my_file:show
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvlm.core.errors import UsageError
from rlvlm.core.references import load_object
from rlvlm.judges.client import Judge
from rlvlm.judges.rewarding import Rewards, WithoutAnswer


@dataclass(frozen=True, kw_only=True)
class RewardKwargs:
    """The settings `reward.custom_reward_function.reward_kwargs`."""

    url: str
    """Address of a server of `rlvlm serve`."""
    show: str
    """`my_file:FUNCTION`, called with the reply, the ground truth and the row's `extra_info`; returns the clip to
    judge: an array [L, H, W, 3] of uint8, or a list of images."""
    goal: str = ""
    """Goal of all rows; empty takes each row's `extra_info.goal`."""
    token: str = ""
    """Bearer token, or the file with it; empty reads `~/.rlvlm/token` for a server on this machine."""
    judge: str = ""
    """Name of the judge at the server; empty takes its first."""
    without_answer: WithoutAnswer = "raise"
    """raise: `JudgeUnavailable`; a number in [0, 1]: that reward."""


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **reward_kwargs: Any,
) -> dict[str, float]:
    """Returns a judge's score in [0, 1] of one reply; what verl scores at the same time is asked together.

    Args:
        data_source: verl's name of the data set.
        solution_str: the model's reply.
        ground_truth: what the row's `reward_model` has; handed to `show`.
        extra_info: the row's `extra_info`, with what tools added to it.
        reward_kwargs: fields of `RewardKwargs`.

    Returns:
        `score`, the reward, and `judge_answered`, 1.0 or 0.0, which verl logs.

    Raises:
        UsageError: the row has no goal, or `show` cannot be imported.
        JudgeUnavailable: there is no answer.
    """
    kwargs, info = RewardKwargs(**reward_kwargs), extra_info or {}
    if not (goal := kwargs.goal or str(info.get("goal") or "")):
        raise UsageError(
            f"a row of {data_source} has no extra_info.goal; extra_info has {', '.join(sorted(info)) or 'nothing'}",
            "add it to the data set, or give one goal: reward_kwargs.goal=...",
        )
    clip = load_object(kwargs.show, "reward_kwargs.show")(solution_str, ground_truth, info)
    (value,), (status,) = await _rewards(kwargs).ask_async([clip], [goal])
    assert value is not None, "None is not allowed"
    return {"score": value, "judge_answered": float(status == "ok")}


@functools.cache
def _rewards(kwargs: RewardKwargs) -> Rewards:
    # one for all rows of a process: its judge holds the connections, and gathers what is asked at the same time
    return Rewards(judge=Judge(kwargs.url, kwargs.token, name=kwargs.judge), without_answer=kwargs.without_answer)
