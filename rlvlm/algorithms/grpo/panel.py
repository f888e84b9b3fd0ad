"""What a run of this algorithm shows besides success and returns."""

from rlvlm.core import metrics
from rlvlm.core.console.panel import DEFAULT, PanelRow

ROWS = (
    *DEFAULT,
    PanelRow(label="sampled success, evaluation", metric=metrics.EVAL_SAMPLED_SUCCESS, format=".0%", word="sampled"),
    PanelRow(label="updates", metric=metrics.GRPO_UPDATES, format=",.0f", word="updates"),
    PanelRow(label="groups that teach something", metric=metrics.GRPO_KEPT, format=".0%", word="groups kept"),
    PanelRow(label="change per chunk, nats", metric=metrics.GRPO_KL, format=".3f", word="kl"),
    PanelRow(label="entropy of a token, nats", metric=metrics.GRPO_ENTROPY, format=".2f"),
    PanelRow(label="step size", metric=metrics.GRPO_LR, format=".1e"),
    PanelRow(
        label="failures the judge calls successes",
        metric=metrics.JUDGE_FALSE_POSITIVES,
        format=".0%",
        word="fooled",
        is_rare=True,
    ),
    PanelRow(label="the judge's alarm", metric=metrics.JUDGE_ALARM, format=".0f", word="alarm", is_rare=True),
)
"""For `RunConsole`."""
