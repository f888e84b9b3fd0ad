from pathlib import Path

import pytest

from rlvlm.core.errors import MachineError
from rlvlm.envs.robosuite.scene import load

pytest.importorskip("robosuite")
pytest.importorskip("libero")


def test_a_library_that_the_system_lacks_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_gl.py").write_text(
        "raise ImportError('libGL.so.1: cannot open shared object file: No such file or directory')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MachineError, match=r"libGL\.so\.1") as caught:  # as OpenCV says on a slim machine
        load("needs_gl")
    assert "libgl1" in caught.value.fix
