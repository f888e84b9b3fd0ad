"""Rows of a run's live panel besides success and returns, by kind. Shown by `RunConsole`."""

from rlvlm.core import metrics
from rlvlm.core.console.panel import DEFAULT, PanelRow

_ALARM = PanelRow(
    label="the judge's alarm", metric=metrics.JUDGE_ALARM, format="", word="judge's alarm:", is_rare=True,
    says={0: "none", **metrics.JUDGE_ALARMS},
)  # fmt: skip
STEPS_PANEL = (
    *DEFAULT,
    PanelRow(label="learned return, training", metric=metrics.TRAIN_LEARNED_RETURN, format=".2f", word="learned"),
    PanelRow(
        label="learned reward",
        metric=metrics.REWARD_IS_TRUSTED,
        format="",
        word="reward",
        is_rare=True,
        says={0: "exploring: the reward model is not yet better than chance", 1: "in force"},
    ),
    PanelRow(label="answers predicted, newest session", metric=metrics.REWARD_PREDICTED, format=".0%", is_rare=True),
    PanelRow(label="queries", metric=metrics.QUERIES, format=",.0f", word="labels", is_rare=True),
    PanelRow(
        label="label accuracy, decided pairs", metric=metrics.LABEL_ACCURACY, format=".1%", word="right", is_rare=True
    ),
    PanelRow(
        label="decided pairs with a true difference",
        metric=metrics.LABELS_CHECKED,
        format=",.0f",
        word="of",
        is_rare=True,
    ),
    PanelRow(
        label="queries that wait for a person", metric=metrics.QUERIES_OPEN, format=",.0f", word="waiting", is_rare=True
    ),
    PanelRow(label="labels right or wrong", metric=metrics.QUERIES_OK, format=",.0f", is_rare=True),
    PanelRow(label="labels without preference", metric=metrics.QUERIES_NO_PREFERENCE, format=",.0f", is_rare=True),
    PanelRow(label="answers nobody could read", metric=metrics.QUERIES_INVALID, format=",.0f", is_rare=True),
    PanelRow(label="queries without an answer", metric=metrics.QUERIES_FAILED, format=",.0f", is_rare=True),
    _ALARM,
)
"""Rows about a learned reward and its labels."""
_SAMPLED = PanelRow(
    label="sampled success, evaluation", metric=metrics.EVAL_SAMPLED_SUCCESS, format=".0%", word="sampled"
)
_FOOLED = (
    PanelRow(
        label="failures the judge calls successes", metric=metrics.JUDGE_FALSE_POSITIVES, format=".0%", word="fooled",
        is_rare=True,
    ),
    _ALARM,
)  # fmt: skip

TURNS_PANEL = (
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
"""Rows for a policy that acts in text."""
CHUNKS_PANEL = (
    *DEFAULT,
    _SAMPLED,
    PanelRow(label="updates", metric=metrics.UPDATES, format=",.0f", word="updates"),
    PanelRow(label="groups that teach something", metric=metrics.GROUP_KEPT, format=".0%", word="groups kept"),
    PanelRow(label="change per chunk, nats", metric=metrics.UPDATE_KL, format=".3f", word="kl"),
    PanelRow(label="entropy of a token, nats", metric=metrics.UPDATE_ENTROPY, format=".2f"),
    PanelRow(label="step size", metric=metrics.UPDATE_LR, format=".1e"),
    *_FOOLED,
)
"""Rows for a policy that acts in chunks."""
