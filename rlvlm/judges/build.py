"""From a judge's config to a judge. Serving, experiments and notebooks start here."""

import importlib

from rlvlm.errors import JudgeUnavailable, ModelUnavailable
from rlvlm.judges.both_orders import BothOrders
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge


def build_judge(config: JudgeConfig) -> Judge:
    """The judge that `config` describes, loaded and ready.

    Raises:
        JudgeUnavailable: its weights are missing or cannot be loaded.
        UnsupportedQuestion: it cannot be asked as `config` says.
        ImportError: the package its backend stands on is not installed.
    """
    # torch and transformers load only when a judge is wanted, and only the ones that it needs
    try:
        judge = importlib.import_module(f"rlvlm.judges.backends.{config.backend}").build(config)
    except ModelUnavailable as error:
        raise JudgeUnavailable(str(error), error.fix) from error
    return BothOrders(judge) if config.both_orders else judge
