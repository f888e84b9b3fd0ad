"""What a run does in the way of its pipeline; everything else of a run is the same for all."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlvlm.algorithms.contract import RunAlgorithm
from rlvlm.algorithms.evaluation import Player
from rlvlm.core.console.panel import PanelRow
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.judges.judge import Judge
from rlvlm.runs.folder.run_folder import RunFolder

Draw = Callable[[FloatArray, int], Frames]
"""Makes images [N, H, W, 3] of snapshots [N, S]; takes the side wanted, in pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Players:
    """Who plays in `rlvlm eval`; none of them needs Ray or the judge."""

    own: Player
    """The policy of a checkpoint."""
    name: str = "policy"
    """What `own` is called beside the others."""
    draw: Draw
    """Of the snapshots of its episodes."""
    others: Mapping[str, Player] = field(default_factory=dict)
    """What it is compared with, by the name shown: another decoding, the policy before its training, baselines."""
    milestones: Mapping[str, float] = field(default_factory=dict)
    """What lies on the way to success, by its name, and the progress at which it is reached."""


class Recorder(Protocol):
    """Writes down a run's questions and answers, or whatever else its algorithm tells of."""

    def keep(self, records: Iterable[Any]) -> None:
        """Takes what `drain_records` gave."""
        ...


class Pipeline(Protocol):
    """One kind of run. `config` is always an instance of the pipeline's own config class.

    A pipeline of one's own needs no registration: the `pipeline` of its config is `package.module:CLASS`, a task's
    recipe returns such a config, and the class has it as `config_class`.
    """

    @property
    def rows(self) -> Sequence[PanelRow]:
        """What the panel shows."""
        ...

    def open_algorithm(
        self, config: Any, make_judge: Callable[[], Judge] | None
    ) -> AbstractContextManager[RunAlgorithm]:
        """The algorithm of a run, ready to train or to be restored; it is stopped when the context closes."""
        ...

    def open_recorder(self, folder: RunFolder, config: Any, draw: Draw) -> Recorder:
        """Takes what the algorithm asked others, and what they answered."""
        ...

    def write_pages(self, folder: RunFolder, config: Any) -> None:
        """Writes the pages that only this kind of run has, at its end."""
        ...

    def open_players(self, config: Any, checkpoint: Path) -> Players:
        """The policy in a checkpoint's folder, and what it is compared with."""
        ...
