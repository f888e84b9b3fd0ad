"""What a run of this algorithm shows besides success and returns."""

from rlvlm.core import metrics
from rlvlm.core.console.panel import DEFAULT, PanelRow

_SAMPLED = PanelRow(
    label="sampled success, evaluation", metric=metrics.EVAL_SAMPLED_SUCCESS, format=".0%", word="sampled"
)
_FOOLED = (
    PanelRow(
        label="failures the judge calls successes", metric=metrics.JUDGE_FALSE_POSITIVES, format=".0%", word="fooled",
        is_rare=True,
    ),
    PanelRow(label="the judge's alarm", metric=metrics.JUDGE_ALARM, format=".0f", word="alarm", is_rare=True),
)  # fmt: skip

TURN_ROWS = (
    *DEFAULT,
    _SAMPLED,
    PanelRow(label="return above 0, greedy", metric=metrics.EVAL_STRICT_SUCCESS, format=".0%", word="return>0"),
    PanelRow(
        label="return above 0, sampled", metric=metrics.EVAL_SAMPLED_STRICT_SUCCESS, format=".0%", word="sampled>0"
    ),
    PanelRow(label="unreadable replies, sampled", metric=metrics.REPLY_INVALID, format=".1%", word="unreadable"),
    PanelRow(label="tokens of a reply", metric=metrics.REPLY_TOKENS, format=".0f"),
    PanelRow(label="change per update, nats", metric=metrics.UPDATE_KL, format=".3f", word="kl"),
    PanelRow(label="same thought for other images", metric=metrics.REPLY_SAME_THOUGHT, format=".0%"),
    PanelRow(label="judged reward of a turn", metric=metrics.REWARD_JUDGED, format="+.2f", word="judged", is_rare=True),
    *_FOOLED,
)
"""For `RunConsole`, of envs that are talked to."""
CHUNK_ROWS = (
    *DEFAULT,
    _SAMPLED,
    PanelRow(label="updates", metric=metrics.UPDATES, format=",.0f", word="updates"),
    PanelRow(label="groups that teach something", metric=metrics.GROUP_KEPT, format=".0%", word="groups kept"),
    PanelRow(label="change per chunk, nats", metric=metrics.UPDATE_KL, format=".3f", word="kl"),
    PanelRow(label="entropy of a token, nats", metric=metrics.UPDATE_ENTROPY, format=".2f"),
    PanelRow(label="step size", metric=metrics.UPDATE_LR, format=".1e"),
    *_FOOLED,
)
"""For `RunConsole`, of envs in chunks."""
