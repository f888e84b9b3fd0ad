"""Prompts of the user's own."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlvlm.core.errors import UsageError
from rlvlm.envs.registry import check_env_settings, make_env, task_env


def asked(task: str, file: Path, text: str) -> str:
    """The second prompt of an episode of `task` with the words `text`."""
    file.write_text(text)
    config = replace(task_env(task), prompt=str(file))
    check_env_settings(task, config)
    env = make_env(task, config, 0)
    env.reset(seed=3)
    return env.step(env.action_text(env.expert_action()))[0].prompt


def test_a_files_prompt_is_filled_with_the_fields_that_it_names(tmp_path):
    text = "You may lose $$1. So far: [$formula]. Choose among $actions."
    prompt = asked("ez_points", tmp_path / "words.txt", text)
    assert prompt.startswith("You may lose $1. So far: [") and "[]" not in prompt and '"9", "10", "+"' in prompt
    assert asked("number_line", tmp_path / "words.txt", "Ours: $prompt").startswith("Ours: ")
    assert "reach the green goal square!" in asked("empty_random_6x6", tmp_path / "words.txt", "$goal!")


@pytest.mark.parametrize(("text", "what"), [("$formule", "formule"), ("a $ sign", "Invalid placeholder")])
def test_an_unknown_field_of_a_prompt_is_refused_with_the_known_ones(tmp_path, text, what):
    with pytest.raises(UsageError, match=what) as caught:
        asked("ez_points", tmp_path / "words.txt", text)
    assert "$formula" in caught.value.fix
    with pytest.raises(UsageError, match="cannot be read"):
        make_env("ez_points", replace(task_env("ez_points"), prompt=str(tmp_path / "none.txt")), 0)
