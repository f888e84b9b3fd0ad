"""Builds a judge from its config. Serving, runs and notebooks start here."""

import socket
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from rlvlm.core.errors import JudgeUnavailable, ModelUnavailable, UsageError
from rlvlm.core.foreign import read_json
from rlvlm.core.guests import guest_of, load
from rlvlm.core.install import check_train
from rlvlm.judges.asking import AsyncAsker, BatchAsker
from rlvlm.judges.cache import StoredJudge, pick_stamp
from rlvlm.judges.chat import ChatJudge
from rlvlm.judges.config import POCKET_FIX, SHOW_NO_GOAL, Abilities, JudgeConfig, backends
from rlvlm.judges.judge import Judge, PatientJudge
from rlvlm.judges.prompts import MAX_IMAGES
from rlvlm.judges.votes import BothOrders
from rlvlm.labels.store import open_store
from rlvlm.pocket.models import shipped_folder, weights_folder
from rlvlm.vlms.engines.http_client import Proxy

CONNECT_S = 10.0
"""Longest wait for a server to accept a connection, in seconds."""
PERSON = "human"
"""Backend of people."""
ABILITIES_FILE = "abilities.json"
"""File in a small model's folder that says what it was trained on: the fields of `Abilities`."""
POCKET_ABILITIES = Abilities(score=frozenset({"progress"}), goal_pictures=False)
"""Training of the pocket judge (`pocket_models.judge`): every form of comparison, and the percentage."""


def build_judge(config: JudgeConfig) -> Judge:
    """Returns the judge that `config` describes, loaded and ready.

    Raises:
        JudgeUnavailable: the weights are missing or cannot be loaded.
        UnsupportedQuestion: the judge cannot be asked as `config` says.
        MachineError: the backend needs the train extra, which is not installed.
    """
    check_installed(config)
    # torch, transformers and the providers' clients load only when a judge that needs them is wanted
    try:
        judge: Judge = load(config.declared.build)(config)
    except ModelUnavailable as error:  # the loaders know models; callers that wait for a judge catch its error
        raise JudgeUnavailable(str(error), error.fix) from error
    return BothOrders(judge) if config.both_orders else judge


def open_person(config: JudgeConfig, folder: Path) -> PatientJudge:
    """Returns the people who answer through the label store in `folder`, whatever judge `config` names.

    Raises:
        UsageError: the guest that asks people is not installed.
    """
    if PERSON not in backends():
        raise UsageError(f"no judge asks people{guest_of('judges', PERSON)}", "choose another teacher")
    return load(backends()[PERSON].build)(replace(config, store=str(folder)))


def abilities_of(backend: str, model: str) -> Abilities:
    """Returns the forms of question that a judge supports, as far as is known before anything is loaded.

    Raises:
        JudgeUnavailable: the abilities file cannot be read.
    """
    if backend != "pocket":
        known = backends().get(backend)
        return Abilities(goal_pictures=known is None or known.sees_goal_images)
    # from the abilities file in its folder, else those of the pocket judge
    file = (shipped_folder(model) or (Path(model) if model else weights_folder())) / ABILITIES_FILE
    if not file.exists():
        return POCKET_ABILITIES
    try:
        known = read_json(file)
        forms, scores = frozenset(known["compare"]), frozenset(known["score"])
        return Abilities(compare=forms, score=scores, goal_pictures=bool(known["goal_pictures"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JudgeUnavailable(f"{file} cannot be read: {error}", "restore it, or make the weights anew") from error


def check_goal_image(backend: str, model: str, score: str) -> None:
    """Checks that a judge accepts an image of the goal.

    Args:
        backend: backend of the judge.
        model: model of the judge.
        score: form of the score; empty if the judge compares, or if the form is not known.

    Raises:
        UsageError: the judge does not.
    """
    abilities = abilities_of(backend, model)
    if not abilities.goal_pictures or score in SHOW_NO_GOAL:
        who = f"judge.score {score}" if abilities.goal_pictures else f"judge.backend {backend}"
        other = "another --judge.score" if abilities.goal_pictures else "a general model with --judge.backend"
        what = f"goal_image: {who} was never shown an image of the goal in its training"
        raise UsageError(what, f"leave out --goal-image, or use {other}")


def check_installed(config: JudgeConfig) -> None:
    """Checks that the packages of the judge's backend are there: those with networks need the train extra.

    Raises:
        MachineError: they are not.
    """
    if config.declared.needs_train:
        check_train(f"judge.backend {config.backend}")


def check_reachable(config: JudgeConfig) -> None:
    """Checks that the judge can be asked: its packages are there, and a server listens at `judge.api.base_url`. Sends
    nothing, and tries nothing behind a proxy.

    Raises:
        MachineError: its packages are not installed.
        JudgeUnavailable: no server listens there.
    """
    check_installed(config)
    address = urlsplit(config.api.base_url)
    if not config.is_remote or not address.hostname or Proxy.of(config.api.base_url).url:
        return
    port = address.port or {"https": 443}.get(address.scheme, 80)
    try:
        socket.create_connection((address.hostname, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise JudgeUnavailable(
            f"nothing listens at {config.api.base_url}: {error.strerror or error}",
            "start the server first, or correct --judge.api.base-url",
        ) from error


def chat_judge(config: JudgeConfig, model: str = "", abilities: Abilities | None = None) -> ChatJudge:
    """Returns a chat model in transformers that judges.

    Args:
        config: settings of the judge.
        model: folder of the weights; empty for `config.model`.
        abilities: forms of question that it was trained on; None for those of a general chat model.
    """
    from rlvlm.vlms.engines.transformers import TransformersEngine
    from rlvlm.vlms.loading import load_vlm

    vlm = load_vlm(replace(config, model=model or config.model))
    return ChatJudge(config, BatchAsker(TransformersEngine(vlm, config), config), abilities)


def vllm_judge(config: JudgeConfig) -> ChatJudge:
    """Returns a chat model in vLLM that judges."""
    from rlvlm.vlms.engines.vllm import VllmEngine

    engine = VllmEngine(config, config.engine, max_requests=config.batch_size, max_images=MAX_IMAGES)
    return ChatJudge(config, AsyncAsker(engine, config))


def remote_judge(config: JudgeConfig) -> ChatJudge:
    """Returns a chat model behind the HTTP API of the provider that the backend names."""
    from rlvlm.vlms.engines.remote import RemoteEngine

    return ChatJudge(config, AsyncAsker(RemoteEngine(config.model, config.api, config.backend, config.seed), config))


def store_judge(config: JudgeConfig) -> Judge:
    """Returns a judge that answers from a label store."""
    try:
        store = open_store(Path(config.cached.store).expanduser())
        return StoredJudge(store, pick_stamp(store, config.cached.judge, config.cached.prompt))
    except UsageError as error:
        raise JudgeUnavailable(str(error), error.fix) from error


def pocket_judge(config: JudgeConfig) -> ChatJudge:
    """Returns a small Qwen3-VL that ships with rlvlm, or one from a folder of the same form."""
    # a shipped name first, then a folder of the user's, then the default weights
    folder = shipped_folder(config.model) or (Path(config.model) if config.model else weights_folder())
    if not folder.is_dir() and config.model:
        raise JudgeUnavailable(
            f"no judge at {config.model}: the folder does not exist",
            "give --judge.model a folder with the weights, or a hub name such as Qwen/Qwen3-VL-8B-Instruct",
        )
    if not folder.is_dir():
        raise JudgeUnavailable(
            f"the pocket judge's weights are not in {folder}",
            POCKET_FIX,
        )
    abilities = abilities_of(config.backend, config.model)
    abilities.check(config)
    return chat_judge(config, str(folder), abilities)
