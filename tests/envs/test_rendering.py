import os
import sys

import pytest

from rlvlm.core.errors import MachineError
from rlvlm.envs import rendering
from rlvlm.envs.rendering import FIX, ensure_renderer, try_renderer


@pytest.fixture(scope="module")
def working():
    """A backend that this machine has; not every one has both."""
    return next(backend for backend in rendering.BACKENDS if try_renderer(backend) is None)


@pytest.fixture
def no_choice(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)


def test_a_set_backend_is_respected_without_a_trial(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", " OSMesa ")
    monkeypatch.setattr(sys, "executable", "/nowhere")  # a trial would fail
    assert ensure_renderer() == "osmesa"


def test_a_word_that_names_no_backend_is_an_error(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "vulkan")
    with pytest.raises(MachineError, match="vulkan") as caught:
        ensure_renderer()
    assert caught.value.fix == "unset MUJOCO_GL"


@pytest.mark.slow
@pytest.mark.usefixtures("no_choice")
def test_the_next_backend_is_taken_when_one_fails(monkeypatch, working):
    monkeypatch.setattr(rendering, "BACKENDS", ("no_such_backend", working))
    assert ensure_renderer() == working


@pytest.mark.usefixtures("no_choice")
def test_without_any_backend_the_error_brings_the_command_that_helps(monkeypatch):
    monkeypatch.setattr(rendering, "BACKENDS", ("no_such_backend",))
    with pytest.raises(MachineError, match="no_such_backend: RuntimeError: invalid value") as caught:
        ensure_renderer()
    assert caught.value.fix == FIX
    assert "MUJOCO_GL" not in os.environ


def test_a_trial_works_whatever_this_process_draws_with(monkeypatch, working):
    monkeypatch.setenv("PYOPENGL_PLATFORM", next(backend for backend in rendering.BACKENDS if backend != working))
    assert try_renderer(working) is None
    assert "no answer within" in (try_renderer("egl", timeout_s=0.001) or "")


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(rendering._LIBRARIES, "no_such_backend", "NoSuchMesa")
    assert try_renderer("no_such_backend") == "libNoSuchMesa is not installed"


@pytest.mark.parametrize(
    ("release", "platform", "command"),
    [
        ({"ID": "debian"}, "linux", "apt-get install"),
        ({"ID": "ubuntu", "ID_LIKE": "debian"}, "linux", "apt-get install"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "linux", "dnf install"),
        ({"ID": "void"}, "linux", "apt-get install"),
        ({}, "darwin", "run it on Linux"),
    ],
)
def test_the_command_is_that_of_the_distribution(release, platform, command, monkeypatch):
    monkeypatch.setattr(rendering.platform, "freedesktop_os_release", lambda: release)
    monkeypatch.setattr(sys, "platform", platform)
    assert rendering.install_line().startswith(command)
