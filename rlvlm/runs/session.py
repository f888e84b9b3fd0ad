"""What a run stands on while it works: Ray, the judge's Serve app, the algorithm; each ends with its context."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune.trainable import trainable

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.judge import Judge
from rlvlm.labels.store import LabelStore
from rlvlm.runs.config import RunConfig
from rlvlm.runs.doctor import check_judge_knows
from rlvlm.serving.apps import start_judge
from rlvlm.serving.client import ServedJudge
from rlvlm.serving.monitoring import MeteredCache
from rlvlm.vlms.config import ApiConfig


@contextmanager
def judge_session(
    config: RunConfig, open_store: Callable[[], LabelStore], ledger: Path
) -> Iterator[Callable[[], Judge] | None]:
    """What makes the judge's client, while its Serve app is up; None for runs that ask no judge.

    The client remembers: after a crash, what was asked since the last checkpoint is answered from the store, for
    nothing and in the same words; so is what any other run asked the same judge, where they share one.

    Args:
        config: of the run.
        open_store: opens the store of answers in the process that asks; must pickle.
        ledger: file in which a paid judge counts what it spends, unless `judge.api.ledger` names another: the run's
            budget holds across replicas and `rlvlm resume`.

    Raises:
        JudgeUnavailable: the judge cannot be loaded, or the app named in `serve.app` is not running.
        UsageError: that app's judge knows nothing of the task.
    """
    if not config.asks_judge:
        yield None
        return
    judge = replace(config.judge, api=reachable(config.judge.api, ledger))
    with start_judge(judge, config.serve, name=config.task) as running:
        if config.serve.app:
            backend, _, model = running.judge.stamp.judge.partition(":")
            if backend == "pocket":
                asked = replace(config.judge, backend=backend, model="" if model == backend else model)
                check_judge_knows(replace(config, judge=asked))
        yield lambda: MeteredCache(CachedJudge(running.judge, open_store()), config.task)


def fallback_judge(app: str) -> Callable[[], Judge] | None:
    """What makes the client of a running Serve app of that name; None where there is no name."""
    return partial(_answering, app) if app else None


def _answering(app: str) -> Judge:
    """The client of a Serve app that has answered once: it is needed when the run's own judge is gone.

    Raises:
        JudgeUnavailable: there is no such app, or it does not answer.
    """
    judge = ServedJudge(app)
    try:
        _ = judge.stamp
    except JudgeUnavailable as error:
        fix = "start it with `rlvlm serve`, or leave out --reward.fallback-judge"
        raise JudgeUnavailable(f"reward.fallback_judge: {error}", fix) from error
    return judge


def reachable(api: ApiConfig, ledger: Path) -> ApiConfig:
    """`api` with its files named so that a replica finds them from whatever folder it works in."""
    key_file = str(Path(api.key_file).expanduser().resolve()) if api.key_file else ""
    return replace(api, key_file=key_file, ledger=str(Path(api.ledger or ledger).expanduser().resolve()))


@contextmanager
def built(settings: AlgorithmConfig) -> Iterator[Algorithm]:
    """The algorithm that RLlib builds of `settings`; it is stopped when the context closes."""
    # RLlib makes an empty folder per algorithm, by default in the user's home, which may not even be writable.
    trainable.DEFAULT_STORAGE_PATH = ray.get_runtime_context().get_temp_dir()  # pyright: ignore[reportPrivateImportUsage]
    algorithm = settings.build_algo()
    try:
        yield algorithm
    finally:
        algorithm.stop()
        shutil.rmtree(str(algorithm.logdir), ignore_errors=True)
