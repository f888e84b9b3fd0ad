"""A judge's score as a reward function of TRL's trainers (GRPO, RLOO), which leaves out what was not answered.

trainer = GRPOTrainer(model, reward_funcs=judge_or_none(judge, show), train_dataset=data)
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlvlm.core.errors import UsageError
from rlvlm.judges.client import Judge
from rlvlm.judges.rewarding import Rewards

Completion = str | list[dict[str, Any]]
"""A text, or the messages that a conversation goes on with."""


def judge_or_none(
    judge: Judge, show: Callable[[Completion, Mapping[str, Any]], Any], *, goal: str = "", goal_column: str = "goal"
) -> Callable[..., Awaitable[list[float | None]]]:
    """Returns an async reward function whose rewards are a judge's scores in [0, 1].

    A reward is None, by which TRL leaves a completion out of the update, where the judge's answer could not be read or
    had, a server that was killed included. Several reward functions of a trainer are asked at the same time.

    Args:
        judge: judge to ask, in one question for all completions.
        show: `show(completion, row) -> clip`: what happens, as images, if the model's reply is done. A clip is an array
            [L, H, W, 3] of uint8, or a list of images; `row` has the data set's columns for this completion, `prompt`,
            and `environments` if the trainer has them.
        goal: goal of all prompts; empty takes each from the data set.
        goal_column: its column there.

    Raises:
        UsageError: when called, a goal is missing.
    """
    rewards = Rewards(judge=judge, goal=goal, without_answer=None, takes_none=True)

    async def judged_or_none(prompts: list[Any], completions: list[Completion], **columns: Any) -> list[float | None]:
        # besides columns, TRL passes on objects of its own: its state, and functions for logging
        listed = {"prompt": prompts} | {
            name: column for name, column in columns.items() if isinstance(column, list) and len(column) == len(prompts)
        }
        if not goal and goal_column not in listed and completions:
            raise UsageError(
                f"the data set has no column {goal_column!r} with the goals; it has {', '.join(sorted(listed))}",
                "add it, name another one as goal_column, or give one goal: judge_or_none(judge, show, goal=...)",
            )
        rows = [{name: column[index] for name, column in listed.items()} for index in range(len(completions))]
        clips = [show(completion, row) for completion, row in zip(completions, rows, strict=True)]
        values, statuses = await rewards.ask_async(clips, None if goal else [row[goal_column] for row in rows])
        if statuses and (log_metric := columns.get("log_metric")):
            log_metric("judge/answered", statuses.count("ok") / len(statuses))
        return values

    return judged_or_none
