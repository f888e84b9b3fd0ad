"""The preflight of a run, before Ray starts: detects everything that would otherwise stop it later, with the fix."""

import math
import os
import shlex
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rlvlm.algorithms.sft_config import NO_EXPERT_FIX, SFTConfig
from rlvlm.core.errors import JudgeUnavailable, MachineError, ModelUnavailable, UsageError, first_line
from rlvlm.envs.registry import find_task, make_env, task_names
from rlvlm.envs.rendering import FIX, ensure_renderer, try_renderer
from rlvlm.judges.config import POCKET_FIX, JudgeConfig
from rlvlm.pocket.models import shipped_folder, weights_folder
from rlvlm.runs.files.environment import gpu_names
from rlvlm.runs.settings.answers_run import AnswersRun
from rlvlm.runs.settings.config import JUDGE_ROLE, RunConfig
from rlvlm.runs.settings.tree import changed_leaves, option_words
from rlvlm.runs.start.networks import model_folder, workload_of
from rlvlm.serving.config import ServedEngineConfig, check_environment

CONNECT_S = 5.0
"""Maximum wait for the cluster that RAY_ADDRESS names, seconds."""
_MOST_NAMED = 8
"""Maximum number of a judge's tasks listed in a message."""


def check_before_run(config: RunConfig, *, has_started: bool = False) -> None:
    """Raises any error that would otherwise stop the run after it has begun; cheap and certain checks first.

    Args:
        config: config of the run.
        has_started: whether the run has a checkpoint, and what its supervised start read is no longer needed.

    Raises:
        UsageError: the judge does not know this task, no player can play the wanted demonstrations, a folder or file
            in the settings is missing or contains something else, the hub does not have a policy's model or cannot be
            reached, the judge's store is unusable, the policy's model does not match the env, or the algorithm refuses
            its settings.
        JudgeUnavailable: the judge's weights, key, client or environment are missing.
        MachineError: there is no renderer, a named GPU does not exist or is too small for the policy, the dashboard's
            port is taken, or nothing answers at RAY_ADDRESS.
    """
    # first checks of a line of code, then those that take seconds, then those that import torch
    if ":" in config.task:  # whether a user's own env fits, before anything else is asked of the user
        make_env(config.task, config.env, config.seed).close()
    if config.reward.asks_judge:
        _check_judge(config)
        _check_goal_image(config)
        if config.judge.is_own and not config.serve.app:
            from rlvlm.judges.own import load_maker  # help texts should not wait for numpy

            try:
                load_maker(config.judge.backend)
            except JudgeUnavailable as error:  # caused by a name on the command line, not by a missing model
                raise UsageError(str(error), error.fix) from error
    cluster_address()
    _check_models(config)
    _check_folders(config, without="sft." if has_started else None)
    config.kind.check_objects(config, has_started=has_started)
    if config.env.draw_path:
        make_env(config.task, config.judge_env, config.seed).close()  # raises if the env knows no hand
    if not has_started:
        _check_start(config)
    for section, network in config.kind.networks(config).items():
        check_network(section, *network)
    _check_memory(config)
    if config.track.dashboard:
        check_dashboard(config.track.dashboard_port, "--track.dashboard-port")
    with ThreadPoolExecutor(1) as pool:  # which waits for a process that draws, while this one imports
        drawing = pool.submit(_check_renderer, config.task)
        from rlvlm.runs.start.build import algorithm_settings  # torch and RLlib, after all that can be checked without
        from rlvlm.vlms.devices import own_gpu

        drawing.result()
    config.kind.check_policy(config)
    try:
        with own_gpu(0):  # which one it will be is not known before Ray has started
            algorithm_settings(
                config,
                make_judge=_not_yet if config.reward.asks_judge else None,
                make_engine=_not_yet if config.num_engine_replicas else None,
            ).validate()
    except ValueError as error:
        raise UsageError(str(error), f"rlvlm run {config.task} --help") from error


def check_dashboard(port: int, option: str) -> None:
    """Raises MachineError if a private Ray's dashboard cannot have its port, which `option` sets."""
    if not os.environ.get("RAY_ADDRESS") and not port_is_free(port):
        raise MachineError(f"port {port} for the Ray dashboard is taken", f"choose another: {option} {free_port()}")


def _check_renderer(task: str) -> None:
    """Raises MachineError if the task needs a renderer and a process of its own cannot draw: one that does not work may
    end the process that tries it.
    """
    if not find_task(task).needs_renderer:
        return
    is_named = bool(os.environ.get("MUJOCO_GL", "").strip())  # else what was chosen has just been tried
    backend = ensure_renderer()
    if is_named and (failure := try_renderer(backend)):
        raise MachineError(f"drawing with {backend} does not work: {failure}", FIX)


def check_before_play(config: RunConfig) -> None:
    """Raises any error that would otherwise stop playing a run's policy after it has begun to load.

    Raises:
        UsageError: the policy's model or its adapter is missing, or does not match the env.
        MachineError: a named GPU does not exist.
    """
    _check_models(config, "policy.")
    _check_folders(config, "policy.")
    for section, network in config.kind.networks(config).items():
        if section.startswith("policy"):
            check_network(section, *network)
    config.kind.check_policy(config)


def _not_yet(*_: Any) -> NoReturn:
    """Stands for what makes the judge or the engine while settings are checked; it is never called."""
    raise AssertionError("nothing is made in a preflight")


def _check_start(config: RunConfig) -> None:
    """Raises UsageError unless what only the start of a run needs is there and suitable: data of the supervised start,
    or an expert that plays it, and a bench, without which a run that goes on only lacks figures in its card.
    """
    if config.track.bench:
        from rlvlm.judge_bench.rows import read_row

        read_row(Path(config.track.bench).expanduser())
    sft = config.section(SFTConfig)
    if sft is None or not sft.plays_expert:
        return
    has_expert = find_task(config.task).has_expert
    if ":" in config.task:  # a user's own env says so itself
        env = make_env(config.task, config.env, config.seed)
        has_expert = getattr(env, "has_expert", True)
        env.close()
    if not has_expert:
        unplayed = ", ".join(name for name in sorted(task_names()) if not find_task(name).has_expert)
        what = f"{config.task} has no scripted expert to demonstrate it"
        raise UsageError(f"{what}; of the tasks that ship, those have none: {unplayed}", NO_EXPERT_FIX)


def _check_memory(config: RunConfig) -> None:
    """Raises MachineError, with the setting to change, unless a learner of the policy, each sampling copy of it, and
    the judge fit on their GPUs or shares of one, by the rule in `memory_plan`.
    """
    if os.environ.get("RAY_ADDRESS") or not gpu_names():
        return  # a cluster's GPUs cannot be seen from here
    if config.reward.asks_judge and not config.serve.app:
        _check_judge_share(config)
    policy, engine = config.large_policy, config.section(ServedEngineConfig)
    if policy is None or not isinstance(config, AnswersRun):
        return  # without a model everything is small
    from rlvlm.runs.start.memory_plan import fix_of, plan, size_of, words_of
    from rlvlm.runs.start.placement import layout_of, nodes  # ray, as every run needs it
    from rlvlm.vlms import devices

    gpu_bytes = devices.gpu_memory()
    if gpu_bytes is None:
        return
    size, workload, algo = size_of(policy, model_folder(policy)), workload_of(config), config.algo
    for role in config.roles:  # engine replicas and env runners, which hold weights and sampling buffers
        if role.learns or role.name == JUDGE_ROLE or not role.gpus:
            continue
        alone = replace(algo, num_envs=-(-algo.num_envs // role.count), rollout_turns=0, num_learners=0, shard=False)
        parts = plan(size, policy, alone, on_gpu=True, workload=replace(workload, is_sampled=True))
        # a minimum: images are cached as far as memory allows, and vLLM samples with the rest
        is_vllm = role.is_served and engine is not None and engine.backend == "vllm"
        needed = parts.context + parts.weights + (0 if is_vllm else parts.sampling)
        what = f"{policy.model} in each of {role.name}"
        _check_share(what, role.gpu_setting.split()[0], role.gpus, needed / max(1, int(role.gpus)), gpu_bytes)
    share = algo.gpus_per_learner if algo.num_learners else layout_of(config, nodes()).own_share
    if not share:
        return
    # a learner with a share of a GPU may use that share of its memory
    max_bytes = gpu_bytes * min(1.0, share)
    if fix := fix_of(size, policy, algo, max_bytes, workload):
        needs = words_of(plan(size, policy, algo, on_gpu=True, workload=workload))
        raise MachineError(
            f"a learner of {policy.model} takes {needs}, and its GPU has {max_bytes / 2**30:.0f} GiB", fix
        )


def _check_judge_share(config: RunConfig) -> None:
    """Raises MachineError unless the weights of a judge in a local folder fit its share of a GPU."""
    judge, folder = config.judge, Path(config.judge.model).expanduser()
    if not config.serve.num_gpus or "/" not in judge.model or not folder.is_dir():
        return
    from safetensors import safe_open

    from rlvlm.vlms import devices

    gpu_bytes = devices.gpu_memory()
    if gpu_bytes is None:
        return

    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            count += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    # a minimum: buffers come in addition to the weights
    each = 0.5 if judge.quantization == "nf4" else 4 if judge.dtype == "float32" else 2
    needed = each * count / max(1, judge.engine.tensor_parallel)
    _check_share(f"the judge {judge.model}", "--serve.num-gpus", config.serve.num_gpus, needed, gpu_bytes)


def _check_share(what: str, setting: str, share: float, needed: float, gpu_bytes: int) -> None:
    """Raises MachineError if a process on `share` of a GPU cannot have the `needed` bytes."""
    limit = gpu_bytes * min(1.0, share)
    if not share or needed <= limit:
        return
    enough = math.ceil(20 * needed / gpu_bytes) / 20
    fix = f"{setting} {enough:g}" if enough <= 1 else "a smaller model, 4-bit weights or a larger GPU"
    raise MachineError(
        f"{what} takes {needed / 2**30:.1f} GiB at least, and {setting} {share:g} is {limit / 2**30:.1f} GiB of the "
        f"smallest GPU of this machine, which has {gpu_bytes / 2**30:.1f}",
        fix,
    )


def cluster_address() -> str:
    """Returns the cluster that RAY_ADDRESS names, as HOST:PORT, after reaching it; empty if there is none.

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
        from ray._private.services import find_gcs_addresses  # takes seconds, so only for those who use it

        found = sorted(find_gcs_addresses())
        if not found:
            raise MachineError("RAY_ADDRESS=auto, and no Ray runs on this machine", f"ray start --head, or {unset}")
        address = found[0]
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"RAY_ADDRESS={address} is not of the form HOST:PORT", f"HOST:6379, or {unset}")
    try:
        # a few seconds: Ray itself would wait minutes for a dead cluster
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        what = f"no Ray answers at RAY_ADDRESS={address}: {first_line(error)}"
        raise MachineError(what, f"start that cluster, or correct the address; or {unset}") from error
    return address


def check_network(section: str, device: str, model: str, revision: str) -> None:
    """Checks that the device exists, and that the model is on this machine or on the hub.

    Raises:
        UsageError: there is no such model.
        MachineError: there is no such device.
    """
    if device not in ("auto", "cpu"):
        from rlvlm.vlms.devices import pick_device  # torch is only for those who name a GPU

        try:
            pick_device(device, section)
        except ModelUnavailable as error:
            raise MachineError(str(error), error.fix) from error
    if model and not Path(model).expanduser().is_dir():
        from rlvlm.vlms.files import fetched  # and this for those who name a hub model

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
        from rlvlm.labels.store import LabelStore  # help texts should not wait for numpy

        LabelStore(Path(config.judge.store).expanduser())
    if config.serve.app or config.judge.is_human:  # the app reports what it is; people need no machine
        return
    check_judge_knows(config)
    # a single word is one of the pocket judges or a mistake; hub names contain a slash
    is_name = bool(model) and "/" not in model
    if config.judge.ships_weights and is_name and not (shipped_folder(model) or Path(model).is_dir()):
        raise UsageError(
            f"judge.model {model} is neither a pocket judge nor a folder",
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
        from rlvlm.judges.build import build_judge, check_reachable  # only this needs the provider's client

        build_judge(config.judge)  # makes its client and reads its key; nothing is sent
        if not os.environ.get("RAY_ADDRESS"):  # otherwise a replica may reach what this machine does not
            check_reachable(config.judge)
    elif not os.environ.get("RAY_ADDRESS"):  # otherwise a replica may be on another machine
        _check_judge_fits(config)


def _check_goal_image(config: RunConfig) -> None:
    """Raises UsageError if the goal image cannot be read, or the judge cannot use one."""
    if config.goal_file is None:
        return
    from rlvlm.judges.build import check_goal_image  # help texts should not wait for numpy
    from rlvlm.judges.goal_image import read_goal_image

    read_goal_image(config.goal_file, config.judge.image_px)
    if not config.serve.app:  # the app reports what it is
        compares = config.reward.source == "preference"
        check_goal_image(config.judge.backend, config.judge.model, "" if compares else config.judge.score)


def _check_judge_fits(config: RunConfig) -> None:
    """Raises unless this machine has the GPUs and the environment that the judge's replicas need."""
    check_environment(config.judge, config.serve)
    check_network("judge", config.judge.device, "", "")
    if config.serve.num_gpus and not gpu_names():
        raise MachineError(
            f"--serve.num-gpus {config.serve.num_gpus:g} asks for a GPU, and this machine has none",
            "leave it out for a CPU, or name a cluster that has one: RAY_ADDRESS=HOST:6379",
        )


def check_judge_knows(config: RunConfig) -> None:
    """Checks that the judge is a general model, was trained on the run's task, or is explicitly allowed.

    Raises:
        UsageError: it only knows other tasks.
    """
    known = config.kind.judge_knows(config)
    if known and config.task not in known and config.judge.untrained == "refuse":
        named = ", ".join(known) if len(known) <= _MOST_NAMED else f"{known[0]}, {known[1]} and {len(known) - 2} others"
        raise UsageError(
            f"the pocket judge knows only {named}; about {config.task} its answers would be confident nonsense",
            "use a general model with --judge.backend transformers --judge.model MODEL, choose another "
            "--reward.teacher, or go on all the same with --judge.untrained ok",
        )


def _check_models(config: RunConfig, prefix: str = "") -> None:
    """Raises UsageError unless every model folder named by a setting with that prefix exists and contains a model;
    other names are of the hub or of pocket models.
    """
    named = {
        "judge.model": config.judge.model if config.reward.asks_judge else "",
        "policy.model": config.large_policy.model if config.large_policy else "",
    }
    for setting, name in ((setting, name) for setting, name in named.items() if setting.startswith(prefix)):
        folder, fix = Path(name).expanduser(), "give the folder with config.json and the weights in *.safetensors"
        if name.startswith(("/", "./", "../", "~")) and not folder.is_dir():
            raise UsageError(f"{setting} {name} is not a folder", fix)
        if "/" in name and folder.is_dir():
            for pattern in ("config.json", "*.safetensors"):
                if not any(folder.glob(pattern)):
                    raise UsageError(f"{setting} {name} holds no model: there is no {pattern} in it", fix)


def _check_folders(config: RunConfig, prefix: str = "", without: str | None = None) -> None:
    """Raises UsageError unless every other folder named by settings with that prefix, and not `without`'s, exists and
    has the required content.
    """
    if not isinstance(config, AnswersRun):
        return
    sft, loading = config.sft, config.policy.loading
    named = {
        "sft.demonstrations": (sft.demonstrations, "demonstrations.json"),
        "sft.start_from": (sft.start_from, "algorithm/policy.json"),
        f"{loading.section}.adapter": (loading.adapter, "adapter_config.json"),
    }
    for setting, (path, holds) in named.items():
        if not path or not setting.startswith(prefix) or (without and setting.startswith(without)):
            continue
        folder, fix = Path(path).expanduser(), f"correct it, or leave out --{setting}"
        if not folder.is_dir():
            raise UsageError(f"{setting} {path} is not a folder", fix)
        if not (folder / holds).is_file():
            raise UsageError(f"{setting} {path} is none: there is no {holds} in it", fix)


def port_is_free(port: int) -> bool:
    """Returns whether this process could listen on a loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Returns a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def bench_command(config: RunConfig) -> str:
    """Returns the command that benchmarks a run's judge, asked as in the run."""
    words = ["rlvlm", "judge-bench", config.task]
    words += ["--goal-image", str(config.goal_file)] if config.goal_file else []
    words += ["--draw-path"] if config.env.draw_path else []
    if config.serve.app:  # its settings are only known to the process that started it
        return f"{shlex.join(words)} with the --judge settings of the app {config.serve.app}"
    changed = changed_leaves({"judge": JudgeConfig()}, {"judge": config.judge})
    words += option_words({name: value for name, (_, value) in changed.items()})
    if frames := getattr(config.reward, "num_frames", 0):
        words += ["--frames", str(frames)]
    return shlex.join(words)
