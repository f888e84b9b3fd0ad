"""What a run checks before it starts: whatever would otherwise stop it after it has begun, with the fix."""

import socket
from pathlib import Path

from rlvlm.core.errors import JudgeUnavailable, MachineError, ModelUnavailable, UsageError
from rlvlm.envs.rendering import FIX, ensure_renderer, try_renderer
from rlvlm.runs.config import Network, RunConfig
from rlvlm.vlms.shipped import shipped_folder, weights_folder

_MOST_NAMED = 8
"""Tasks that a judge knows, in a line that a person reads."""
POCKET_FIX = "reinstall rlvlm, or make them anew as rlvlm/pocket/judge/CARD.md says"


def check_before_run(config: RunConfig) -> None:
    """Raises what would otherwise stop the run after it has begun.

    Raises:
        UsageError: the judge knows nothing of this task, a model's folder is missing or holds none, another folder is
            missing, a file cannot be read, the hub does not have a policy's model or cannot be reached, or the judge's
            store is none that can be used.
        JudgeUnavailable: the pocket judge's weights are missing.
        MachineError: no renderer, a GPU is named that is not there, or the dashboard's port is taken.
    """
    if config.asks_judge:
        _check_judge(config)
    _check_folders(config)
    config.check_files()
    for section, network in config.networks.items():
        check_network(section, network)
    if config.track.dashboard and not port_is_free(config.track.dashboard_port):
        what = f"port {config.track.dashboard_port} for the Ray dashboard is taken"
        raise MachineError(what, f"choose another: --track.dashboard-port {free_port()}")
    backend = ensure_renderer()
    failure = try_renderer(backend)
    if failure is not None:
        raise MachineError(f"drawing with {backend} does not work: {failure}", FIX)


def check_network(section: str, network: Network) -> None:
    """Passes where the device is there, and the model on this machine or on the hub.

    Raises:
        UsageError: the model is not.
        MachineError: the device is not.
    """
    if network.device not in ("auto", "cpu"):
        from rlvlm.vlms.devices import pick_device  # torch is for those alone who name a GPU

        try:
            pick_device(network.device, section)
        except ModelUnavailable as error:
            raise MachineError(str(error), error.fix) from error
    if network.model and not Path(network.model).expanduser().is_dir():
        from rlvlm.vlms.files import fetched  # and this for those who name a model of the hub

        try:
            fetched(network.model, network.revision, ("config.json",), section)
        except ModelUnavailable as error:
            raise UsageError(str(error), error.fix) from error


def _check_judge(config: RunConfig) -> None:
    model = config.judge.model
    if not config.judge_goal:
        raise UsageError(
            f"{config.task} has no goal phrase of its own, and the judge is asked about one",
            f'say it in a few words: python -m rlvlm.run {config.task} --goal "reach the flag on the hill"',
        )
    if config.judge.store:
        from rlvlm.labels.store import LabelStore  # numpy is not for those who only ask for help

        LabelStore(Path(config.judge.store).expanduser())
    if config.serve.app:  # says itself what it is, once the run has found it
        return
    check_judge_knows(config)
    is_name = bool(model) and "/" not in model
    if config.judge.ships_weights and is_name and not (shipped_folder(model) or Path(model).is_dir()):
        raise UsageError(
            f"judge.model {model} is no pocket judge and no folder",
            "scorer, video, or a folder with the weights of one; leave it out for the one that compares images",
        )
    if config.judge.backend == "transformers" and shipped_folder(model):
        raise UsageError(
            f"judge.model {model} is a pocket judge's, which judge.backend transformers does not have",
            "--judge.model with a hub name or a folder, or leave out --judge.backend",
        )
    if config.judge.ships_weights and not (model or weights_folder().is_dir()):
        raise JudgeUnavailable(f"the pocket judge's weights are not in {weights_folder()}", POCKET_FIX)


def check_judge_knows(config: RunConfig) -> None:
    """Passes where the judge is a general model, was trained on the run's task, or may be asked all the same.

    Raises:
        UsageError: it knows other tasks alone.
    """
    known = config.judge_knows
    if known and config.task not in known and config.judge.untrained == "refuse":
        named = ", ".join(known) if len(known) <= _MOST_NAMED else f"{known[0]}, {known[1]} and {len(known) - 2} others"
        raise UsageError(
            f"the pocket judge knows {named} alone; about {config.task} it talks nonsense, and sure of it",
            "put in a general model with --judge.backend transformers --judge.model MODEL, choose another "
            "--reward.teacher, or go on all the same with --judge.untrained ok",
        )


def _check_folders(config: RunConfig) -> None:
    for setting, name in config.models.items():
        folder, fix = Path(name).expanduser(), "give the folder with config.json and the weights in *.safetensors"
        if name.startswith(("/", "./", "../", "~")) and not folder.is_dir():
            raise UsageError(f"{setting} {name} is not a folder", fix)
        if "/" in name and folder.is_dir():  # otherwise the hub's name of a model, or of one that ships with rlvlm
            for pattern in ("config.json", "*.safetensors"):
                if not any(folder.glob(pattern)):
                    raise UsageError(f"{setting} {name} holds no model: there is no {pattern} in it", fix)
    for setting, wanted in config.folders.items():
        folder, fix = Path(wanted.path).expanduser(), f"look for the right one, or leave out --{setting}"
        if wanted.path and not folder.is_dir():
            raise UsageError(f"{setting} {wanted.path} is not a folder", fix)
        if wanted.path and not (folder / wanted.holds).is_file():
            raise UsageError(f"{setting} {wanted.path} is none: there is no {wanted.holds} in it", fix)


def port_is_free(port: int) -> bool:
    """Whether this process could listen on a loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
