"""The apps of `rlvlm serve` while they are served: loads them on Ray, and shows them until Ctrl-C."""

import base64
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import ray
from PIL import Image
from rich.console import Console
from rich.text import Text

from rlvlm.core.console.boxes import EXIT_INTERRUPTED
from rlvlm.core.console.quiet import quiet_output
from rlvlm.core.console.screen import QuietConsole
from rlvlm.core.console.signals import StopRequest
from rlvlm.core.errors import EXIT_DONE, MachineError
from rlvlm.envs.registry import make_env, task_env, task_goal
from rlvlm.runs.start.preflight import port_is_free
from rlvlm.runs.start.ray_session import ray_session
from rlvlm.serving.app_file import AppFile
from rlvlm.serving.apps import running_apps, unhealthy
from rlvlm.serving.guard import make_token, read_token

REPORT_S = 15.0
"""Interval in seconds after which a progress line is repeated if there is no terminal."""
WATCH_S = 1.0


def serve_apps(file: AppFile, *, exports_metrics: bool = False) -> int:
    """Starts the apps of `file`, prints when and where they answer, and stops them on Ctrl-C.

    Args:
        file: apps to serve.
        exports_metrics: whether a private Ray opens its metrics port.

    Returns:
        0 if it was stopped while it served, 130 while it was still loading.

    Raises:
        MachineError: the port is taken, or the media root or the token file cannot be used.
        JudgeUnavailable: an app cannot be loaded or placed; says why.
    """
    if not os.environ.get("RAY_ADDRESS") and not port_is_free(file.port):  # else Serve may be what listens there
        raise MachineError(f"port {file.port} is taken", "choose another: --port N")
    if file.http.media_root and not Path(file.http.media_root).is_dir():
        raise MachineError(f"the media root {file.http.media_root} is not a folder", "create it, or name another")
    # the token must exist before the first request, which may come as soon as the port is open
    is_new = make_token(file.http.token_path)
    read_token(file.http.token_path)  # an error in it is reported now, not by a replica in a minute
    with ExitStack() as stack:
        # removed after a clean end; after a failure it holds the only output of libraries
        log = Path(tempfile.mkstemp(prefix="rlvlm-serve-", suffix=".log")[1])
        console = QuietConsole(file=stack.enter_context(quiet_output(log)), soft_wrap=True)
        stop = stack.enter_context(StopRequest())
        # ended before the console's stream is given back
        progress = Progress(console)
        stack.callback(progress.end)
        progress.say("starting Ray")

        def tell_lost(what: str) -> None:
            again = "Start rlvlm serve again, on a cluster once its head is back"
            console.print(f"{what}; Ray's own words are in {log}. {again}.")

        stack.enter_context(ray_session(exports_metrics=exports_metrics, on_lost=tell_lost))
        stop.take_over()
        start = time.monotonic()
        stack.enter_context(running_apps(file, progress.say, lambda: bool(stop)))
        if stop:
            return EXIT_INTERRUPTED
        progress.end()
        seconds = time.monotonic() - start
        examples = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlvlm-example-")))
        show_ready(console, file, seconds, is_new, examples)
        down: list[str] = []
        while not stop:
            time.sleep(WATCH_S)
            # printed on changes, not every second
            now = unhealthy(file)
            if now != down:
                console.print(f"{', '.join(now)}: being replaced" if now else "all answer again")
                down = now
        console.print(f"{stop.signal_name}: stopping")
    log.unlink()
    return EXIT_DONE


class Progress:
    """Shows the current step of the start, in a line that is updated in place on a terminal.

    Elsewhere, as in a job's log, each new step gets its own line, and a long one is repeated.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._what = ""
        self._last = 0.0
        if self._status:
            self._status.start()

    def say(self, what: str, waited_s: float = 0.0) -> None:
        """Shows the current step, and its duration in seconds so far."""
        line = Text(f"{what} ({waited_s:.0f} s)" if waited_s >= 1 else what)
        if self._status:
            self._status.update(line)
        elif what != self._what or time.monotonic() - self._last >= REPORT_S:
            self._what, self._last = what, time.monotonic()
            self._console.print(line)

    def end(self) -> None:
        """Removes the line."""
        if self._status:
            self._status.stop()


def show_ready(console: Console, file: AppFile, seconds: float, is_new: bool, examples: Path) -> None:
    """Prints address, requirements, and lines to paste; their example files are put into the folder `examples`."""
    token = file.http.token_path
    reach = "this machine only" if file.is_loopback else "every machine that can reach it; put TLS in front"
    # needed by another process to join this Ray: its address, and the file of its token
    variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "RAY_AUTH_MODE": "token"}
    # set by the session that has just started, or by the command that started the cluster
    variables |= {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH") if name in os.environ}
    lines = [
        f"{file.name} is ready after {seconds:.0f} s",
        f"  listens   {file.url}  ({reach})",
        f"  token     {token}{'  (made now)' if is_new else ''}",
    ]
    if file.policies:
        lines.append(f"  policy    {file.about}, {file.policies[0].placement.num_replicas} replicas")
    lines += [
        f"  judge     {entry.app}: {entry.judge.backend} {entry.judge.model}".rstrip() + f", {entry.resources}"
        for entry in file.judges
    ]
    videos = f"below {file.http.media_root}" if file.http.media_root else "not by name; --media-root DIR allows it"
    # the token is read from the file when it is sent, so the list of processes does not show it (bash and zsh)
    curl = f"""curl -s -H @<(printf 'Authorization: Bearer %s' "$(cat {token})")"""
    if file.turn:  # images are too long for a line to paste
        image, prompt = file.turn
        (examples / "turn.png").write_bytes(image)
        route, body = "/v1/act", {"image": base64.b64encode(image).decode(), "prompt": prompt}
        lines.append(f"  example   {examples / 'turn.png'}  (a first turn of the task, for the next line)")
    else:
        route, body = "/v1/preference", example_question(examples)
        lines.append(f"  example   {examples / 'left.png'} and right.png  (a fallen pole and a balanced one)")
    (examples / "question.json").write_text(json.dumps(body))
    lines += [
        f"  try       {curl} -H 'Content-Type: application/json' -d @{examples / 'question.json'} {file.url}{route}",
        f"  fields    {file.url}/docs  (opens in a browser)",
    ]
    if file.judges:
        lines += [
            f"  videos    {videos}",
            f"  in a run  {' '.join(f'{name}={value}' for name, value in variables.items())} "
            f"python -m rlvlm.run drawer_open --serve.app {file.judges[0].app}",
        ]
    lines.append("Ctrl-C stops it.")
    console.print(Text("\n".join(lines)))


def example_question(folder: Path) -> dict[str, Any]:
    """Returns a complete question to a judge about a task that draws in milliseconds; its images go into `folder`."""
    env = make_env("cartpole", task_env("cartpole"), 0)
    env.reset(seed=0)
    balanced = env.snapshot()
    for _ in range(200):  # the pole falls, whatever the start
        env.step(np.ones(env.action_space.shape, np.float32))
    question: dict[str, Any] = {"goal": task_goal("cartpole")}
    for side, frame in zip(("left", "right"), env.draw(np.stack([env.snapshot(), balanced]), 128), strict=True):
        Image.fromarray(frame).save(folder / f"{side}.png")
        question[side] = [base64.b64encode((folder / f"{side}.png").read_bytes()).decode()]
    env.close()
    return question
