import io

from rich.console import Console

from rlvlm.core import metrics
from rlvlm.core.console.panel import PanelRow, RunConsole
from rlvlm.runs.settings.panels import STEPS_PANEL

LATEST = {
    metrics.ENV_STEPS: 2_500,
    metrics.EVAL_SUCCESS_AT_END: 0.2,
    metrics.EVAL_SUCCESS_RATE: 0.4,
    metrics.TRAIN_EPISODE_RETURN: 812.34,
    metrics.TRAIN_LEARNED_RETURN: 12.1,
    metrics.QUERIES: 120,
    metrics.LABEL_ACCURACY: 0.914,
    metrics.LABELS_CHECKED: 93,
    metrics.STEPS_PER_S: 50.0,
    metrics.QUERIES_NO_PREFERENCE: 7,
}


def test_a_pipe_gets_one_plain_line_when_it_is_due():
    stream = io.StringIO()
    with RunConsole(stream, "tiny: judge labels", 40_000, STEPS_PANEL) as console:
        console.update(LATEST, is_due=True)
        console.update({metrics.ENV_STEPS: 2_750}, is_due=False)
        console.phase("evaluating", is_line=False)
    assert stream.getvalue().splitlines() == [
        "tiny: judge labels",
        "step   2,500/40,000  success 20%  return 812.3  learned 12.10  labels 120  right 91.4%  of 93  "
        "steps/s 50  left 0:12:30",
    ]
    assert "\x1b" not in stream.getvalue()


def test_an_algorithm_shows_its_own_numbers():
    stream = io.StringIO()
    rows = [PanelRow(label="tokens a reply", metric="tokens", format=".0f", word="tokens")]
    with RunConsole(stream, "t", 100, rows) as console:
        console.update({"tokens": 12.0}, is_due=True)
    assert "tokens 12  steps/s -" in stream.getvalue() and "success" not in stream.getvalue()


def test_a_reward_that_is_withheld_says_so_until_it_is_in_force():
    stream = io.StringIO()
    with RunConsole(stream, "t", 100, STEPS_PANEL) as console:
        asked = {metrics.QUERIES: 3.0}
        for latest in ({}, asked | {metrics.REWARD_IS_TRUSTED: 0.0}, {metrics.REWARD_IS_TRUSTED: 1.0}):
            console.update(latest, is_due=True)
    _, before, untrusted, trusted = stream.getvalue().splitlines()
    assert "reward" not in before and "labels" not in before, "nobody was asked yet"
    assert "reward exploring: the reward model is not yet better than chance  labels" in untrusted
    assert "reward in force  labels" in trusted


def test_a_terminal_gets_a_panel_with_everything():
    stream = io.StringIO()
    stream.isatty = lambda: True
    with RunConsole(stream, "tiny", 40_000, STEPS_PANEL) as console:
        console.update(LATEST, is_due=True)
        panel = console.render()
    shown = io.StringIO()
    Console(file=shown, width=110).print(panel)
    numbers = ("20%", "812.3", "12.10", "120", "91.4%", "7")
    for text in (*numbers, "without preference", "step 2,500 of 40,000", "left 0:12:30"):
        assert text in shown.getvalue(), text
    assert "\x1b[?25h" in stream.getvalue()  # the cursor comes back
