"""Files of a user's own, by path; what they are good for is tested where they are named."""

import sys

import pytest

from rlvlm.core.errors import UsageError
from rlvlm.core.references import find_registered, load_object


def test_of_two_files_of_one_name_each_is_itself(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_reward_of_two.py").write_text(f"NAME = {folder!r}\n")
    for folder in ("a", "b", "a"):
        assert load_object(f"{tmp_path / folder / 'my_reward_of_two.py'}:NAME", "reward.source") == folder


@pytest.mark.parametrize("name", ["random", "numpy"])
def test_a_file_does_not_take_the_place_of_a_module_that_others_need(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("NAME = 1\n")
    before = __import__(name)
    with pytest.raises(UsageError, match=f"{name}.py is called like a module that others need"):
        load_object(f"{tmp_path / name}.py:NAME", "reward.source")
    assert sys.modules[name] is before


@pytest.mark.parametrize(
    ("parameters", "is_right"), [("a, b", True), ("a, b, c=1", True), ("*all", True), ("a", False), ("a, b, c", False)]
)
def test_a_function_of_the_wrong_arguments_is_refused_when_it_is_named(parameters, is_right, tmp_path):
    file = tmp_path / f"own_loss_{abs(hash(parameters))}.py"
    file.write_text(f"def loss({parameters}): ...\n")
    own = load_object(f"{file}:loss", "algo.loss.policy")
    if is_right:
        assert find_registered(f"{file}:loss", {"own": own}, "algo.loss.policy", "policy_loss", takes=("x", "y")) is own
        return
    with pytest.raises(UsageError, match=r"is called with \(x, y\), and takes \("):
        find_registered(f"{file}:loss", {"own": own}, "algo.loss.policy", "policy_loss", takes=("x", "y"))
