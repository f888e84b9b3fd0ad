"""What a run checks before it starts: whatever would otherwise stop it after it has begun, with the fix."""

import os
import socket
from pathlib import Path

from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sft_config import NO_EXPERT_FIX, ReplySFTConfig
from rlvlm.core.errors import JudgeUnavailable, MachineError, ModelUnavailable, UsageError, first_line
from rlvlm.envs.registry import make_env, task_has_expert, tasks_without_expert
from rlvlm.envs.rendering import FIX, ensure_renderer, try_renderer
from rlvlm.pocket.models import shipped_folder, weights_folder
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.runs.config import RunConfig
from rlvlm.runs.environment import gpu_names

CONNECT_S = 5.0
"""Longest wait for the cluster that RAY_ADDRESS names."""
_MOST_NAMED = 8
"""Tasks that a judge knows, in a line that a person reads."""
POCKET_FIX = "reinstall rlvlm, or make them anew as rlvlm/pocket/judge/CARD.md says"


def check_before_run(config: RunConfig) -> None:
    """Raises what would otherwise stop the run after it has begun.

    Raises:
        UsageError: the judge knows nothing of this task, nobody plays the demonstrations that are wanted, a model's
            folder is missing or holds none, another folder is missing, a file cannot be read, the hub does not have a
            policy's model or cannot be reached, or the judge's store is none that can be used.
        JudgeUnavailable: the judge's weights, key, client or environment are missing.
        MachineError: no renderer, a GPU is named that is not there or is too small for the policy, the dashboard's port
            is taken, or nothing answers at RAY_ADDRESS.
    """
    if config.asks_judge:
        _check_judge(config)
    cluster_address()
    _check_folders(config)
    config.check_files()
    for section, network in config.networks.items():
        check_network(section, *network)
    _check_memory(config)
    has_expert = task_has_expert(config.task)
    if ":" in config.task:  # an env that is not ours: what does not fit is said now, and by its own words
        env = make_env(config.task, config.env, config.seed)
        has_expert = getattr(env, "has_expert", True)
        env.close()
    if isinstance(config.sft, ReplySFTConfig) and config.sft.plays_expert and not has_expert:
        what = f"{config.task} has no scripted expert to show how it is played"
        raise UsageError(
            f"{what}; of the tasks that ship, those have none: {', '.join(tasks_without_expert())}", NO_EXPERT_FIX
        )
    if config.track.dashboard and not port_is_free(config.track.dashboard_port):
        what = f"port {config.track.dashboard_port} for the Ray dashboard is taken"
        raise MachineError(what, f"choose another: --track.dashboard-port {free_port()}")
    backend = ensure_renderer()
    failure = try_renderer(backend)
    if failure is not None:
        raise MachineError(f"drawing with {backend} does not work: {failure}", FIX)


def _check_memory(config: RunConfig) -> None:
    """Passes where a learner of the policy fits its GPU, by the rule in `memory_plan`.

    Raises:
        MachineError: it does not, with the setting to change.
    """
    policy, algo = config.policy, config.algo
    if policy is None or not policy.model or isinstance(algo, SACConfig) or os.environ.get("RAY_ADDRESS"):
        return  # without a model of one's own everything is small; a cluster's cards are not seen from here
    if not gpu_names():
        return
    from rlvlm.algorithms.policy_gradient.memory_plan import fix_of, plan, size_of, words_of
    from rlvlm.vlms import devices, files

    wants = policy.openvla if isinstance(policy, VLAConfig) else policy
    has_gpu = algo.gpus_per_learner if algo.num_learners else devices.pick_device(wants.device).type == "cuda"
    card = devices.card_bytes()
    if not has_gpu or card is None:
        return
    room = card * min(1.0, float(has_gpu))
    folder = Path(policy.model).expanduser()
    if not folder.is_dir():
        folder = files.fetched(policy.model, policy.revision, ("config.json",), "policy")
    size = size_of(policy, folder)
    if fix := fix_of(size, policy, algo, room):
        needs = words_of(plan(size, policy, algo, on_gpu=True))
        raise MachineError(f"a learner of {policy.model} takes {needs}, and its GPU has {room / 2**30:.0f} GiB", fix)


def cluster_address() -> str:
    """The cluster that RAY_ADDRESS names, as HOST:PORT, once it was reached; empty where there is none.

    Raises:
        UsageError: RAY_ADDRESS is an address of another kind.
        MachineError: nothing answers there.
    """
    address = os.environ.get("RAY_ADDRESS", "").strip()
    if address in ("", "local"):
        return ""
    unset = "unset RAY_ADDRESS to run on this machine alone"
    if address.startswith(("http://", "https://")):
        fix = f"submit the run: ray job submit --address {address} -- python -m rlvlm.run TASK ...; or {unset}"
        raise UsageError(f"RAY_ADDRESS={address} is where jobs are submitted, not the cluster itself", fix)
    if address.startswith("ray://"):
        fix = f"log in to the cluster and run there, or use `ray job submit`; or {unset}"
        raise UsageError(f"RAY_ADDRESS={address} is for Ray Client, which RLlib's algorithms cannot use", fix)
    if address == "auto":
        from ray._private.services import find_gcs_addresses  # seconds, for those alone who ask for it

        found = sorted(find_gcs_addresses())
        if not found:
            raise MachineError("RAY_ADDRESS=auto, and no Ray runs on this machine", f"ray start --head, or {unset}")
        address = found[0]
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"RAY_ADDRESS={address} is not of the form HOST:PORT", f"HOST:6379, or {unset}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        what = f"no Ray answers at RAY_ADDRESS={address}: {first_line(error)}"
        raise MachineError(what, f"start that cluster, or correct the address; or {unset}") from error
    return address


def check_network(section: str, device: str, model: str, revision: str) -> None:
    """Passes where the device is there, and the model on this machine or on the hub.

    Raises:
        UsageError: the model is not.
        MachineError: the device is not.
    """
    if device not in ("auto", "cpu"):
        from rlvlm.vlms.devices import pick_device  # torch is for those alone who name a GPU

        try:
            pick_device(device, section)
        except ModelUnavailable as error:
            raise MachineError(str(error), error.fix) from error
    if model and not Path(model).expanduser().is_dir():
        from rlvlm.vlms.files import fetched  # and this for those who name a model of the hub

        try:
            fetched(model, revision, ("config.json",), section)
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
    if config.judge.is_remote:
        from rlvlm.judges.build import build_judge  # only this asks for the provider's client

        build_judge(config.judge)  # its client and its key; nothing is sent
    elif not os.environ.get("RAY_ADDRESS"):  # else a replica may be on another machine than this one
        _check_judge_fits(config)


def _check_judge_fits(config: RunConfig) -> None:
    """Passes where this machine has the GPUs and the environment that the judge's replicas want.

    Raises:
        JudgeUnavailable: vLLM's environment is missing.
        MachineError: a GPU is.
    """
    python = Path(config.judge.python).expanduser()
    if config.judge.python and not python.is_file():
        raise JudgeUnavailable(
            f"judge.backend {config.judge.backend} needs an environment of its own; {python} is missing",
            "build it with make vllm, or name another with --judge.engine.python",
        )
    check_network("judge", config.judge.device, "", "")
    if config.serve.num_gpus and not gpu_names():
        raise MachineError(
            f"--serve.num-gpus {config.serve.num_gpus:g} asks for a GPU, and this machine has none",
            "leave it out for a CPU, or name a cluster that has one: RAY_ADDRESS=HOST:6379",
        )


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
    for setting, (path, holds) in config.folders.items():
        folder, fix = Path(path).expanduser(), f"look for the right one, or leave out --{setting}"
        if not folder.is_dir():
            raise UsageError(f"{setting} {path} is not a folder", fix)
        if not (folder / holds).is_file():
            raise UsageError(f"{setting} {path} is none: there is no {holds} in it", fix)


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
