"""Users' own judges: `--judge.backend my_file:NAME`, without a fork. docs/judges.md has an example."""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.references import load_object, needed_parameters
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge
from rlvlm.judges.numeric import NumericJudge
from rlvlm.judges.similarity import Pixels, SimilarityModel

_FIX = "see docs/judges.md: a judge of one's own"


def load_maker(reference: str) -> tuple[Callable[..., Any], bool]:
    """Returns the object that `module:NAME` refers to, and whether it takes images and a goal instead of a config.

    Raises:
        JudgeUnavailable: it cannot be imported, or takes neither; says what was found.
    """
    try:
        function = load_object(reference, "judge.backend")
        needed = needed_parameters(function)
    except (UsageError, TypeError, ValueError) as error:  # errors of `inspect` about an object that is no function
        fix = error.fix if isinstance(error, UsageError) else _FIX
        raise JudgeUnavailable(f"cannot load the judge {reference!r}: {error}", fix) from error
    if len(needed) not in (1, 2):
        what = f"{reference!r} takes {', '.join(needed) or 'nothing'}"
        raise JudgeUnavailable(f"{what}; a judge of one's own takes a config, or images and a goal", _FIX)
    # told apart by the number of parameters, so that a plain function needs no class and no decorator
    return function, len(needed) == 2


def build(config: JudgeConfig) -> Judge:
    """Returns the judge that `config.backend` names as `module:NAME`.

    NAME is a function that takes a `JudgeConfig` and returns a `Judge`, or takes images and a goal and returns scores.

    Raises:
        JudgeUnavailable: it cannot be imported, or takes neither; says what was found.
        UnsupportedQuestion: a function of images is asked a form of question that it does not support.
    """
    reference = config.backend
    function, takes_images = load_maker(reference)
    if takes_images:
        model = SimilarityModel(config, _FunctionRater(reference, function))
        model.prompt = "function/1"
        return NumericJudge(config, model)
    judge = function(config)
    if not isinstance(judge, Judge):  # checked now, by name, and not as an AttributeError in a replica
        missing = [member for member in ("stamp", "compare", "score") if not hasattr(judge, member)]
        raise JudgeUnavailable(f"what {reference!r} returns is no judge: it has no {', '.join(missing)}", _FIX)
    return judge


class _FunctionRater:
    """Rater that calls a plain function on images [N, H, W, 3], as rewards do: once per goal and image size.

    Its revision is a hash of the function's source file.
    """

    traits, sees_goal_images = "", False

    def __init__(self, reference: str, function: Callable[..., object]) -> None:
        self._reference = reference
        self._function = function
        # answers are cached by revision: a changed function must not be answered from memory
        file = inspect.getsourcefile(function)
        self.revision = hashlib.sha256(open(file, "rb").read()).hexdigest()[:16] if file else ""

    def rate(self, images: Sequence[Pixels], goals: Sequence[str | Pixels]) -> NDArray[np.float64]:
        scores = np.full(len(images), np.nan)
        kinds = [(str(goal), image.shape) for goal, image in zip(goals, images, strict=True)]
        for kind in dict.fromkeys(kinds):
            # one call per goal, or a function that is a network would see one image at a time
            indices = [index for index, other in enumerate(kinds) if other == kind]
            given = np.asarray(self._function(np.stack([images[index] for index in indices]), kind[0]), np.float64)
            if given.shape != (len(indices),) or not ((given >= 0) & (given <= 1)).all():  # also false for NaN
                raise ValueError(
                    f"{self._reference} must return one number in [0, 1] per image, got {np.shape(given)} numbers from "
                    f"{given.min(initial=np.inf):g} to {given.max(initial=-np.inf):g} for {len(indices)} images"
                )
            scores[indices] = given
        return scores
