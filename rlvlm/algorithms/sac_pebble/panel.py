"""What a run of this algorithm shows besides success and returns: the learned reward and the labels behind it."""

from rlvlm.core import metrics
from rlvlm.core.console.panel import DEFAULT, PanelRow

ROWS = (
    *DEFAULT,
    PanelRow(label="learned return, training", metric=metrics.TRAIN_LEARNED_RETURN, format=".2f", word="learned"),
    PanelRow(
        label="learned reward",
        metric=metrics.REWARD_IS_TRUSTED,
        format="",
        word="reward",
        is_rare=True,
        says=("exploring: the reward model is not yet better than chance", "in force"),
    ),
    PanelRow(label="answers predicted, newest session", metric=metrics.REWARD_FORETOLD, format=".0%", is_rare=True),
    PanelRow(label="queries", metric=metrics.QUERIES, format=",.0f", word="labels", is_rare=True),
    PanelRow(
        label="label accuracy, decided pairs", metric=metrics.LABEL_ACCURACY, format=".1%", word="right", is_rare=True
    ),
    PanelRow(label="labels right or wrong", metric=metrics.QUERIES_OK, format=",.0f", is_rare=True),
    PanelRow(label="labels without preference", metric=metrics.QUERIES_NO_PREFERENCE, format=",.0f", is_rare=True),
    PanelRow(label="answers nobody could read", metric=metrics.QUERIES_INVALID, format=",.0f", is_rare=True),
    PanelRow(label="queries without an answer", metric=metrics.QUERIES_FAILED, format=",.0f", is_rare=True),
)
"""For `RunConsole`."""
