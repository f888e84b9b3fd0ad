"""Ray's worker processes, forked from processes that have imported what they need.

An env runner uses 5 to 7 seconds of processor time before it has done anything, and less than one when it is forked.
Ray and rlvlm keep what they read from the environment as they are imported. So one process imports what does not, and
for each environment a fork of it, the nest, imports the rest and is forked again: the workers of a job share one.
A worker whose runtime environment names another interpreter or changes what those libraries read starts as always, and
so does one that no nest answers.

Ray runs this file where it would run its own `setup_worker.py`, once for each worker, on the nodes that name it.
"""

import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ADDRESS = "RLVLM_FORKED_WORKERS"
"""Environment variable: the socket of the process to fork."""

_CONTEXT = "--serialized-runtime-env-context="
_LIBRARIES = (
    "torch", "torch._dynamo", "torch.utils.tensorboard", "scipy.stats", "scipy.signal", "pandas", "gymnasium",
    "transformers.modeling_utils", "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "safetensors.torch", "PIL.Image", "fastapi", "uvicorn", "aiohttp", "jsonschema", "tensorboardX", "rich.console",
    "pytest", "pyarrow.json", "pydantic.v1", "anyio._backends._asyncio",
)  # fmt: skip
_OF_AN_ENVIRONMENT = (
    "ray._private.workers.default_worker", "ray._private.arrow_serialization", "ray.rllib",
    "ray.serve._private.controller", "rlvlm.runs.train", "rlvlm.algorithms.sac_pebble.algorithm",
    "rlvlm.serving.policy_replica",
)  # fmt: skip
_READ_BY_NESTS = ("RAY_", "PL_", "LP_")
"""Beginnings of variables that none of the libraries above reads: Ray's, Tune's and the software renderer's."""

_MAX_MESSAGE = 128 * 2**10
"""Bytes of a request, which is one packet of a socket."""

_NUM_NESTS = 3
"""How many are kept: the environments that were asked for last."""


@contextmanager
def forked_workers() -> Iterator[dict[str, Any]]:
    """Yields what a node of `ray.cluster_utils.Cluster` is started with, so that its workers are forked meanwhile."""
    with tempfile.TemporaryDirectory(prefix="rlvlm-", dir="/tmp") as folder:  # a socket's path is short
        address = f"{folder}/workers"
        # pyarrow's allocator would start a thread, which no fork has
        one_thread = {**os.environ, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        command = [sys.executable, __file__, address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=one_thread):  # it ends with its input
            os.environ[_ADDRESS] = address
            try:
                yield {"setup_worker_path": __file__}
            finally:
                del os.environ[_ADDRESS]


def _wait_to_be_forked(address: str) -> dict[str, Any]:
    """Hands each request to the nest of its environment until the input ends; returns in the workers, with theirs."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    _import(*_LIBRARIES)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    nests: dict[str, socket.socket] = {}
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        message, outputs, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 2)
        environment = json.loads(message)["environment"]
        key = json.dumps(environment, sort_keys=True)
        nest = nests.pop(key, None)
        if nest is None:
            nest, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if not os.fork():
                _close(listener, connection, nest, *nests.values(), *outputs)
                return _nest(inner, environment)
            inner.close()
        with suppress(OSError):  # a nest that has failed: who asked is not answered, and starts by itself
            socket.send_fds(nest, [message], [connection.fileno(), *outputs])
            nests[key] = nest  # the last
        _close(connection, *outputs)
        if len(nests) > _NUM_NESTS:
            _close(nests.pop(next(iter(nests))))
    os._exit(0)  # to take thousands of modules down in order costs seconds


def _nest(requests: socket.socket, environment: dict[str, str]) -> dict[str, Any]:
    """Imports what belongs to an environment, and forks for each request; returns in the forks, with what is asked."""
    os.environ.clear()
    os.environ.update(environment)
    actor: Any = import_module("ray.actor")
    # Ray's own numbers, drawn as classes of actors are imported, would begin a series that all forks go on with: they
    # would give different objects the same names
    size, make = actor.ActorClassID.size(), actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: make(os.urandom(size)))
    _import(*_OF_AN_ENVIRONMENT)
    while True:
        message, files, _, _ = socket.recv_fds(requests, _MAX_MESSAGE, 3)
        if not message:
            os._exit(0)
        if not os.fork():
            break
        _close(*files)
    request = json.loads(message)
    os.setpgid(0, request.pop("group"))  # while the worker that asks keeps the group alive
    os.write(files[0], b"!")
    for number, output in enumerate([os.open(os.devnull, os.O_RDONLY), *files[1:]]):
        os.dup2(output, number)
        os.close(output)
    _close(requests, files[0])
    return request


def _import(*modules: str) -> None:
    for module in modules:
        import_module(module)
    gc.collect()
    gc.freeze()  # what is kept for ever is not looked through, and not copied, in each fork


def _close(*files: socket.socket | int) -> None:
    for file in files:
        os.close(file if isinstance(file, int) else file.detach())


def _run(command: list[str], environment: dict[str, str], folder: str) -> None:
    """Runs a Python file with its arguments as a new process would."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


def _ask_for_a_fork(*words: str) -> None:
    """Asks for the worker that Ray's `setup_worker.py` would become with these arguments, or becomes that."""
    text = next((word for word in words if word.startswith(_CONTEXT)), "").partition("=")[2]
    context = json.loads(text or "{}")
    variables = context.pop("env_vars", {})
    context["py_executable"] = context.get("py_executable", "").replace(sys.executable, "")
    changed = [name for name, value in variables.items() if os.environ.get(name) != value]
    own = any(context.values()) or not all(name.startswith(_READ_BY_NESTS) for name in changed)
    command = [word for word in words if not word.startswith((_CONTEXT, "--language="))]
    if own or not _forked(command, os.environ | variables):
        found = util.find_spec("ray")
        assert found and found.origin
        file = Path(found.origin).with_name("_private") / "workers" / "setup_worker.py"
        os.execv(sys.executable, [sys.executable, str(file), *words])


def _forked(command: list[str], environment: dict[str, str]) -> bool:
    """Whether a nest has taken a request over: its fork is in this process's group and writes to its outputs."""
    request = {"command": command, "environment": environment, "folder": os.getcwd(), "group": os.getpgrp()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, suppress(OSError):
        connection.connect(os.environ[_ADDRESS])
        socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
        return bool(connection.recv(1))
    return False


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _run(**_wait_to_be_forked(sys.argv[1]))
    else:
        _ask_for_a_fork(*sys.argv[1:])
