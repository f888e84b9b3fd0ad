"""The small Qwen3-VL that ships with rlvlm, and any folder made like it."""

from dataclasses import replace
from pathlib import Path

from rlvlm.errors import JudgeUnavailable
from rlvlm.judges.abilities import Abilities
from rlvlm.judges.backends.transformers import TransformersModel
from rlvlm.judges.chat import ChatJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.vlms.loading import load_vlm
from rlvlm.vlms.shipped import weights_folder

ABILITIES = Abilities(score=frozenset({"progress"}), goal_pictures=False)
"""What the pocket judge was trained on (`pocket.judge.texts`): every comparison, and the percentage."""


def build(config: JudgeConfig) -> ChatJudge:
    """The pocket judge, or the one in the folder `config.model`.

    Raises:
        UnsupportedQuestion: it is to be asked what it was never taught.
        JudgeUnavailable: its weights are missing or cannot be loaded.
    """
    ABILITIES.check(config)
    folder = Path(config.model) if config.model else weights_folder()
    if not folder.is_dir():
        raise JudgeUnavailable(
            f"the pocket judge's weights are not in {folder}",
            "reinstall rlvlm, or make them anew as rlvlm/pocket/judge/CARD.md says",
        )
    return ChatJudge(config, TransformersModel(load_vlm(replace(config, model=str(folder))), config), ABILITIES)
