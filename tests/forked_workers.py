"""Ray's worker processes, forked from a process that has imported the large libraries.

An env runner uses 5 to 7 seconds of processor time before it has done anything, and 2 when it is forked. Ray itself is
not among the libraries, as it keeps what it reads at import, and nor is rlvlm. A worker whose runtime environment names
another interpreter or changes a variable starts as always.

Ray runs this file where it would run its own `setup_worker.py`, once for each worker, on the nodes that name it.
"""

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
from contextlib import contextmanager
from importlib import import_module, util
from pathlib import Path
from typing import Any

_ADDRESS = "RLVLM_FORKED_WORKERS"
"""Environment variable: the socket of the process to fork."""

_CONTEXT = "--serialized-runtime-env-context="
_LIBRARIES = (
    "torch", "torch._dynamo", "torch.utils.tensorboard", "scipy.stats", "scipy.signal", "pandas", "gymnasium",
    "transformers.modeling_utils", "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "safetensors.torch", "PIL.Image", "fastapi", "uvicorn", "aiohttp", "jsonschema", "tensorboardX", "rich.console",
)  # fmt: skip


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
    """Forks for each request until its input ends; returns in the forks, with what was asked for."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    for library in _LIBRARIES:
        import_module(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as stream:
            _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
            request = json.loads(stream.readline())
            if os.fork():
                for output in outputs:
                    os.close(output)
                continue
            os.setpgid(0, request.pop("group"))  # while the worker that asks keeps the group alive
            listener.close()
            for number, output in enumerate([os.open(os.devnull, os.O_RDONLY), *outputs]):
                os.dup2(output, number)
                os.close(output)
            return request
    os._exit(0)  # to take thousands of modules down in order costs seconds


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
    if any(context.values()) or any(os.environ.get(name) != value for name, value in variables.items()):
        found = util.find_spec("ray")
        assert found and found.origin
        file = Path(found.origin).with_name("_private") / "workers" / "setup_worker.py"
        os.execv(sys.executable, [sys.executable, str(file), *words])
    command = [word for word in words if not word.startswith((_CONTEXT, "--language="))]
    request = {"command": command, "environment": dict(os.environ), "folder": os.getcwd(), "group": os.getpgrp()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[_ADDRESS])
        socket.send_fds(connection, [b" "], [1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        connection.recv(1)  # ends when the fork is in this process's group


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _run(**_wait_to_be_forked(sys.argv[1]))
    else:
        _ask_for_a_fork(*sys.argv[1:])
