import io
import json
from dataclasses import replace

import pytest

from rlvlm.core import metrics
from rlvlm.core.console.panel import RunConsole
from rlvlm.pages.run_charts import write_plots
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.files.checkpoints import RunState
from rlvlm.runs.files.folder import RunFolder
from rlvlm.runs.files.records import score_row
from rlvlm.runs.files.scores import DECODINGS
from rlvlm.runs.files.summary import run_readme, summarise, summarise_decodings
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.runs.train import print_summary

STATE = RunState(env_steps=4_000, wall_s=240.0, peak_rss_mb=1234.4)


def test_the_numbers_of_a_filled_folder(filled, config):
    summary = summarise(filled, config, STATE, "done")
    assert summary["final_success_rate"] == 0.7  # mean of 0.2, 1.0 and 0.9
    assert (summary["success"], summary["best_success_rate"]) == (0.9, 1.0), "the headline is of the last evaluation"
    assert summary["final_episode_return"] == 30.0
    assert summary["queries"] == 12
    assert summary["labels"] == {"ok": 6, "no_preference": 2, "invalid": 2, "failed": 2}
    # one right, one wrong per session; where the truth ties none counts
    assert (summary["label_accuracy"], summary["labels_checked"]) == (0.5, 4)
    assert (summary["env_steps"], summary["steps_per_s"], summary["peak_rss_mb"]) == (4_000, 16.7, 1234)
    assert (summary["seed"], summary["exit_reason"]) == (3, "done")


def test_the_last_line_is_of_one_evaluation(filled, config):
    # at the end 0.6 of the last evaluation's episodes succeed, at any step 0.9; the mean of three is another figure
    rows = filled.evaluations.read()
    filled.evaluations.path.unlink()
    filled.evaluations.append([row | {"success_at_end": 0.6} for row in rows])
    filled.write_summary(summarise(filled, config, STATE, "SIGINT"))
    out = io.StringIO()
    print_summary(filled, RunConsole(out, "a run", 4_000))
    assert "success 60% (at the end of episodes, last evaluation; at any step 90%)" in out.getvalue()
    assert f"saved; resume with: rlvlm resume {filled.path}" in out.getvalue()


def test_a_run_that_never_got_anywhere_has_no_rates(folder, config):
    summary = summarise(folder, config, RunState(env_steps=0, wall_s=0.0, peak_rss_mb=0.0), "SIGTERM")
    assert summary["final_success_rate"] is summary["label_accuracy"] is summary["steps_per_s"] is None
    assert summary["queries"] == 0


def test_scores_count_as_queries_and_are_measured_against_the_truth(folder, config, make_scores):
    folder.scores.append(map(score_row, make_scores(2_000), range(9)))
    summary = summarise(folder, config, STATE, "done")
    assert summary["queries"] == 5 and summary["labels"] == {"ok": 3, "no_preference": 0, "invalid": 1, "failed": 1}
    assert summary["score_error"] == pytest.approx(0.2)  # 0.1, 0.3 and 0.2 away
    assert summary["label_accuracy"] is None
    row = folder.scores.read()[0]
    assert (row["ground_truth_score"], row["vlm_score"], row["env_step"], row["return"]) == ("0", "0.1", "2000", "0")
    folder.cut(1_999)
    assert folder.scores.read() == []


def card(folder: RunFolder, config: RunConfig, reason: str, files: list[str]) -> str:
    summary = summarise(folder, config, STATE, reason)
    return run_readme(config, summary, folder.environment(), folder.command(), files)


def test_the_card_has_the_results_of_the_run_and_how_to_repeat_it(filled, config):
    text = card(filled, config, "done", ["plots/learning_curve.png", "judge_panel.html", "videos/a.mp4"])
    assert "# drawer_open, judge labels, image reward, seed 3" in text
    assert "Finished after 4,000 env steps; the policy ends 90.0 % of episodes in success (last evaluation)" in text
    assert "| no preference / unreadable / no answer | 2 / 2 / 2 |" in text
    assert "| right, of the 4 of 6 decided ones whose progress differs | 50.0 % |" in text
    assert "rlvlm run drawer_open --seed 3" in text
    assert "![Learning curve](plots/learning_curve.png)" in text and "vlm_accuracy.png" not in text
    assert "[videos/a.mp4](videos/a.mp4)" in text and "judge_panel.html" in text
    assert "- judge: pocket, prompt direct" in text


BENCH = {
    "bench": {},
    "judge": {"judge": "transformers:tiny", "prompt": "direct/1"},
    "figures": {"pairs": {}, "scores": {}},
    "tasks": {
        "drawer_open": {
            "pairs": {
                "accuracy": {"value": 0.75, "low": 0.6, "high": 0.9, "count": 40},
                "consistent": {"value": 0.9, "low": 0.8, "high": 1.0, "count": 20},
                "ece": 0.125,
            },
            "scores": {"auc": {"value": 0.8, "low": 0.7, "high": 0.9, "count": 40}},
        }
    },
    "manifest": {},
}


def test_the_card_has_the_judges_figures_in_the_run_beside_those_in_its_bench(filled, folder, config, tmp_path):
    assert "in its bench" not in card(filled, config, "done", [])
    (tmp_path / "bench.json").write_text(json.dumps(BENCH))
    known = replace(config, track=replace(config.track, bench=str(tmp_path)))
    text = card(filled, known, "done", [])
    # of twelve answers two are right, two wrong, two decided where the truth ties, two undecided and four unread
    assert "| accuracy on decided pairs | 50.0 % (15 to 85) | 75.0 % (60 to 90) |" in text
    assert "| undecided | 16.7 % (5 to 45) | - |" in text and "| said left | 66.7 % (30 to 90) | - |" in text
    assert "| label swaps with the order | - | 90.0 % (80 to 100) |" in text
    assert "| calibration error of pairs | 0.17 | 0.12 |" in text, "60 against 30 %: 2/3 sure, and half of them right"


def test_the_card_says_when_and_why_the_learned_reward_counted(filled, config):
    assert "learned reward" not in card(filled, config, "done", []), "nothing was fitted"
    names = (metrics.REWARD_IS_TRUSTED, metrics.REWARD_NUM_PREDICTED, metrics.REWARD_NUM_PREDICTED_RIGHT)
    for step, numbers in ((5_000, (0, 50, 26)), (6_000, (1, 150, 112)), (7_000, (1, 250, 190))):
        filled.metrics.append([{metrics.ENV_STEPS: step, **dict(zip(names, numbers, strict=True))}])
        if step == 5_000:
            unused = "not used, so the agent kept exploring: 26 of 50 answers predicted, no better than chance"
            assert f"| learned reward | {unused} |" in card(filled, config, "done", [])
    text = card(filled, config, "done", [])
    assert "| learned reward | used from step 6,000 on, 112 of 150 answers predicted by then |" in text


@pytest.mark.parametrize(
    ("true", "settings", "first", "others"),
    [
        (None, {}, "1. The true reward, to compare with", ("2. The reward model: `--reward.model state`",)),
        (0.95, {}, "1. The reward model", ("one: 95.0 % after 9,000 env steps", "2. Its fit")),
        (0.95, {"model": "state"}, "1. Its fit: it orders 80.0 % of", ("max-updates 200`", "newest labels 70.0 %")),
        (0.6, {}, "", ()),
    ],
)  # fmt: skip
def test_a_run_that_ends_below_the_true_reward_gets_advice(folder, config, true, settings, first, others):
    config = replace(config, reward=replace(config.reward, **settings))
    row = {"step": 4_000, "success_rate": 0.6, "success_at_end": 0.6, "episode_return": 1.0, "final_progress": 1.0}
    folder.evaluations.append([row | {"episodes": 20, "wall_s": 1.0}])
    fitted = {metrics.REWARD_IS_TRUSTED: 1, metrics.REWARD_ACCURACY: 0.8, metrics.REWARD_PREDICTED: 0.7}
    folder.metrics.append([{metrics.ENV_STEPS: 4_000, **fitted}])
    (folder.path.parent / "torn").mkdir()
    (folder.path.parent / "torn" / "summary.json").write_text('{"task": "drawer_')
    if true is not None:
        (folder.path.parent / "true").mkdir()
        ended = {"task": config.task, "reward": "environment reward", "success": true, "env_steps": 9_000}
        (folder.path.parent / "true" / "summary.json").write_text(json.dumps(ended))
    text = card(folder, config, "done", [])
    assert first in text and all(other in text for other in others)
    assert ("## What to change first" in text) == bool(first)
    assert "What to change first" not in card(folder, config, "SIGTERM", [])


def test_greedy_and_sampled_play_stand_beside_each_other_before_and_after(folder, config):
    row = {"episode_return": 1.0, "final_progress": 1.0, "episodes": 200, "wall_s": 1.0}
    start = {"step": 0, "success_rate": 1.0, "sampled_success_rate": 0.8}
    end = {"step": 4_000, "success_rate": 1.0, "sampled_success_rate": 0.98}
    folder.evaluations.append([row | start])
    text = card(folder, config, "SIGTERM", [])
    assert "success at the end of the episode, last evaluation | not measured" in text, "only the start was measured"
    assert "success at any step, best evaluation | 100.0 %" in text, "its checkpoint is the best there is"
    folder.evaluations.append([row | end])
    text = card(folder, config, "done", [])
    assert "| 200 episodes each | greedy | sampled |" in text and "return above 0" not in text
    assert "| success, at step 0, before training | 100.0 % (98 to 100) | 80.0 % (74 to 85) |" in text
    assert "| success, at the last evaluation | 100.0 % (98 to 100) | 98.0 % (95 to 99) |" in text


def test_a_stopped_run_says_so_and_one_without_a_judge_names_none(folder):
    config = StepsRun(task="drawer_open", reward=StepRewardConfig(source="environment"))
    text = card(folder, config, "SIGTERM", ["episodes.html"])
    assert "Stopped early (SIGTERM)" in text and "not evaluated yet" in text
    assert "judge:" not in text and "queries" not in text and "(episodes.html)" in text


def test_one_episode_played_five_times_is_called_one(folder, config):
    row = {"step": 4_000, "success_rate": 1.0, "success_at_end": 1.0, "episode_return": 1.0, "final_progress": 1.0}
    folder.evaluations.append([row | {"episodes": 5, "wall_s": 1.0, "distinct_episodes": 1}])
    text = card(folder, config, "done", [])
    assert "in success (last evaluation: 5 times the same episode, from one start)" in text
    assert "| distinct episodes of the last evaluation | 1 of 5 |" in text


def test_greedy_episodes_that_repeat_make_no_interval_narrower(folder, config):
    row = {"step": 4_000, "success_rate": 1.0, "sampled_success_rate": 1.0, "episode_return": 1.0}
    folder.evaluations.append([row | {"final_progress": 1.0, "episodes": 200, "wall_s": 1.0, "distinct_episodes": 30}])
    assert "| 100.0 % (89 to 100) | 100.0 % (98 to 100) |" in card(folder, config, "done", [])


def test_a_card_speaks_of_no_success_where_the_env_has_no_test_of_it(folder, config):
    row = {"step": 4_000, "episode_return": -7.25, "final_progress": 0.0, "episodes": 5, "wall_s": 1.0}
    folder.evaluations.append([row])
    text = card(folder, config, "done", [])
    assert "the policy was judged by its return: the env does not define success" in text
    assert "| true return, last evaluation | -7.25 |" in text
    assert "success at" not in text and "in success" not in text
    assert write_plots(folder, config.title)


def test_the_worst_evaluation_after_the_start_is_shown_beside_the_last_one():
    """By hand: the start counts as no dip, and greedy and sampled play may be worst at different times."""
    played = [(0, "0.1", "0.0"), (10, "0.9", "0.4"), (20, "0.3", "0.8"), (30, "1.0", "0.9")]
    rows = [
        dict.fromkeys([name for pair in DECODINGS.values() for name in pair], "") | {"step": str(step), "episodes": "8"}
        for step, *_ in played
    ]
    for row, (_, greedy, sampled) in zip(rows, played, strict=True):
        row |= {"success_rate": greedy, "sampled_success_rate": sampled}
    worst = summarise_decodings(rows)["at worst"]
    assert (worst["success_rate"], worst["sampled_success_rate"], worst["episodes"]) == (0.3, 0.4, 8)
    assert "at worst" not in summarise_decodings(rows[:2]), "one evaluation after the start is the last one"
