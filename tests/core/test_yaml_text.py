import datetime
import random

import pytest

from rlvlm.core.errors import UsageError
from rlvlm.core.yaml_text import MAX_ALIASES, MAX_DEPTH, read_yaml, write_yaml
from rlvlm.runs.files.folder import read_config
from rlvlm.serving.app_file import read_app_file
from rlvlm.sweeps.config import read_sweep


def bomb(levels: int = 12, width: int = 9) -> str:
    """Lists of lists by alias: `width ** levels` values in a few hundred bytes."""
    rows = ["a0: &a0 [lol]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(rows) + "\n"


BROKEN = {
    "bomb": (bomb(), "aliases"),
    "tower": ("a: " + "[" * 50_000, "deep"),
    "closed tower": ("a: " + "[" * 500 + "]" * 500, "deep"),
    "braces": ("{a: " * 500, "deep"),
    "itself": ("a: &a [*a]\n", "inside of what it names"),
    "object": ("a: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
    "date": ("a: 2024-99-99\n", "month"),
    "tab": ("a:\n\t- b\n", "cannot start any token"),
    "huge": ("a: " + "b" * 2_000_000, "characters"),
    "control": ("a: \x01\n", "not allowed"),
    "twice": ("a:\n  b: 1\n  'b': 2\n", "'b' stands twice in one mapping, in lines 2 and 3"),
}


def test_plain_values_come_through_with_an_anchor_used_twice():
    assert read_yaml("a: &x [1, 2]\nb: *x\nc: {d: 0.5}\n", "f") == {"a": [1, 2], "b": [1, 2], "c": {"d": 0.5}}
    assert read_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, "f") is not None
    assert read_yaml("a: &x {c: 1}\nb: {<<: *x, c: 2}\n", "f")["b"] == {"c": 2}, "a merge may be overridden"
    most = "a: &x 1\nb: [" + ", ".join(["*x"] * MAX_ALIASES) + "]"
    assert read_yaml(most, "f")["b"] == [1] * MAX_ALIASES


def test_numbers_are_those_of_the_command_line_and_texts_that_look_like_them_stay_texts():
    assert read_yaml("[1e-4, 1.5E3, -2e+5, 3, 0.1]", "f") == [1e-4, 1500.0, -2e5, 3, 0.1]
    texts = ["1e-4", "1.5E3", "3", "e5", "1e", "-1e5-2", "a: b"]
    assert read_yaml(write_yaml(texts), "f") == texts


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("read", [read_sweep, read_app_file, "config"])
def test_a_broken_file_is_refused_at_once_by_its_name(name, read, tmp_path):
    text, reason = BROKEN[name]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=reason if read is not read_app_file or name != "huge" else "bytes") as caught:
        read_config(tmp_path) if read == "config" else read(path)
    assert "config.yaml" in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("key", ["tasks", "sources", "seeds", "task_seeds", "settings", "halving", "smoke", "zzz"])
@pytest.mark.parametrize(
    "value", ["3", "[[3]]", "{a: [1]}", "[{}]", "''", "[]", "{? [1] : 2}", ".nan", "{choice: [1]}"]
)
def test_a_sweep_file_with_something_else_in_it_says_so_with_its_name(key, value, tmp_path):
    path = tmp_path / "mine.yaml"
    whole = {"tasks": "[drawer_open]", "sources": "{env: {reward.source: env}}", "seeds": "[0]"} | {key: value}
    path.write_text("".join(f"{name}: {text}\n" for name, text in whole.items()))
    try:
        read_sweep(path)  # some of these are fine for some keys
    except UsageError as error:
        assert "mine.yaml" in str(error)
    if key == "zzz":
        with pytest.raises(UsageError, match="mine.yaml"):
            read_sweep(path)


PIECES = (
    *("a: ", "- ", "? ", ": ", "[", "]", "{", "}", ", ", "\n", "\n  ", "\n\t", "|\n", ">-\n", "---\n", "...\n"),
    *("# c\n", "tasks: ", "pipeline: "),
    *("&x ", "*x", "<<: *x", "!!python/object/apply:os.system ['touch {canary}']", "!!python/name:os.system "),
    *("!!python/object/new:pathlib.Path ['{canary}']", "!!python/module:os ", "!!set ", "!!binary gA==", "!x "),
    *("%YAML 9\n", "1", ".nan", "1e999", "2024-13-01", "0o9", "true", "'", '"', "\\", "\u2028", "\ufeff", "\x00", "~"),
)


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_made_up_text_is_plain_values_or_is_refused_and_runs_nothing(count, tmp_path):
    rng, canary, num_read = random.Random(0), tmp_path / "canary", 0
    for _ in range(count):
        parts = rng.choices(PIECES, k=rng.randrange(1, 9))
        text = "".join(part.replace("{canary}", str(canary)) for part in parts)
        try:
            value = read_yaml(text, "mine.yaml")
        except UsageError as error:
            assert str(error).startswith("mine.yaml is not YAML"), text
            continue
        num_read += 1
        assert is_plain(value), text
    assert not canary.exists() and 0.05 * count < num_read < 0.95 * count


def is_plain(value: object) -> bool:
    """Whether there is nothing in it but what YAML itself knows."""
    if isinstance(value, dict | list | set):
        return all(map(is_plain, [*value, *(value.values() if isinstance(value, dict) else ())]))
    return value is None or isinstance(value, str | int | float | bytes | datetime.date | tuple)
