"""From a judge's config to a judge. Serving, experiments and notebooks start here."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlvlm.errors import JudgeUnavailable
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge
from rlvlm.judges.pocket import weights_folder


def build_judge(config: JudgeConfig) -> Judge:
    """The judge that `config` describes, loaded and ready.

    Raises:
        JudgeUnavailable: its weights are missing or cannot be loaded.
    """
    return BUILDERS[config.backend](config)


def _transformers(config: JudgeConfig) -> Judge:
    from rlvlm.judges.chat import ChatJudge  # torch and transformers load only when a judge is wanted

    return ChatJudge(config)


def _pocket(config: JudgeConfig) -> Judge:
    from rlvlm.judges.chat import ChatJudge
    from rlvlm.judges.loading import load_vlm

    folder = Path(config.model) if config.model else weights_folder()
    if not folder.is_dir():
        raise JudgeUnavailable(f"the pocket judge's weights are not in {folder}",
                               "reinstall rlvlm, or make them anew with python -m rlvlm.judges.pocket.train")
    return ChatJudge(config, load_vlm(replace(config, model=str(folder))))


def _backend(name: str, config: JudgeConfig) -> Judge:
    """The judge of `rlvlm.judges.backends.NAME`, whose `build` takes the config."""
    return importlib.import_module(f"rlvlm.judges.backends.{name}").build(config)


BUILDERS: dict[str, Callable[[JudgeConfig], Judge]] = {
    "pocket": _pocket,
    "transformers": _transformers,
    **{name: partial(_backend, name) for name in ("vllm", "openai", "gemini", "clip", "blip2", "cached")},
}
"""One builder per `JudgeConfig.backend`."""
