"""What a judge can be asked, as data that comes with it; a question beyond it is refused before it is put."""

from dataclasses import dataclass
from typing import get_args

from rlvlm.errors import UnsupportedQuestion
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.prompts import Mode, ScoreMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """The forms of question that a model's training covers."""

    compare: frozenset[Mode] = frozenset(get_args(Mode))
    """Values of `JudgeConfig.prompt`."""
    score: frozenset[ScoreMode] = frozenset(get_args(ScoreMode))
    """Values of `JudgeConfig.score`."""
    goal_pictures: bool = True
    """Whether it may be shown a picture of the goal."""

    def check(self, config: JudgeConfig) -> None:
        """Passes when the model can be asked as `config` says.

        Raises:
            UnsupportedQuestion: its training does not cover one of the two forms.
        """
        for field, wanted, known in (("prompt", config.prompt, self.compare), ("score", config.score, self.score)):
            if wanted not in known:
                raise UnsupportedQuestion(
                    f"this judge cannot be asked with judge.{field} {wanted}, it knows {', '.join(sorted(known))}",
                    f"use --judge.{field} {sorted(known)[0]}, or a general model with --judge.backend transformers",
                )


ANYTHING = Abilities()
"""Of a general chat model."""
