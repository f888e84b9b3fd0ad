import os

import pytest

from rlvlm.core.errors import MachineError
from rlvlm.gateway.token_file import MIN_CHARS, make_token, read_token


def test_a_token_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "token"
    assert make_token(path) and not make_token(path)
    token = read_token(path)
    assert len(token) == 43 and read_token(path) == token  # 32 random bytes in base64
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["token"]


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        ("x" * 40, 0o644, "yours alone, its mode is 644"),
        ("x" * 40, 0o620, "yours alone"),
        ("x" * (MIN_CHARS - 1), 0o600, "at least 32"),
        ("two words that are long enough to be a token", 0o600, "one line"),
        ("", 0o600, "one line"),
    ],
)
def test_a_token_file_that_is_not_fit_is_refused_without_quoting_it(tmp_path, content, mode, reason):
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(MachineError, match=reason) as caught:
        read_token(path)
    assert not content or content not in str(caught.value) + caught.value.fix


def test_a_link_a_folder_and_nothing_are_refused(tmp_path):
    (tmp_path / "real").write_text("x" * 40)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", ".", "gone", "pipe"):
        with pytest.raises(MachineError):
            read_token(tmp_path / name)
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"):
        make_token(tmp_path / "file" / "token")
