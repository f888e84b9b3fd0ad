"""What a run of this algorithm shows besides success and returns."""

from rlvlm.core import metrics
from rlvlm.core.console.panel import DEFAULT, PanelRow

ROWS = (
    *DEFAULT,
    PanelRow(label="sampled success, evaluation", metric=metrics.EVAL_SAMPLED_SUCCESS, format=".0%", word="sampled"),
    PanelRow(label="return above 0, greedy", metric=metrics.EVAL_STRICT_SUCCESS, format=".0%", word="return>0"),
    PanelRow(
        label="return above 0, sampled", metric=metrics.EVAL_SAMPLED_STRICT_SUCCESS, format=".0%", word="sampled>0"
    ),
    PanelRow(label="replies nobody can read", metric=metrics.REPLY_INVALID, format=".1%", word="unreadable"),
    PanelRow(label="tokens of a reply", metric=metrics.REPLY_TOKENS, format=".0f"),
    PanelRow(label="change per update, nats", metric=metrics.PPO_KL, format=".3f", word="kl"),
    PanelRow(label="same thought for other images", metric=metrics.REPLY_SAME_THOUGHT, format=".0%"),
    PanelRow(label="judged reward of a turn", metric=metrics.REWARD_JUDGED, format="+.2f", word="judged", is_rare=True),
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
