"""What a run needs of any algorithm. The run loop knows nothing else of it; Tune and users get RLlib's life cycle."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlvlm.algorithms.evaluation import Evaluation, PlayedEpisode
from rlvlm.core.steps import FloatArray, Frames


class RunAlgorithm(Protocol):
    """An algorithm as a run sees it: it is trained in rounds, looked at, saved, and gone on with.

    A continuation is exact: after `load_checkpoint` everything but wall-clock time repeats to the bit.
    """

    @property
    def env_steps(self) -> int:
        """Env steps so far, of all envs together."""
        ...

    def prepare(self, log: Callable[[str], None]) -> bool:
        """What comes before the first round of a new run: demonstrations and a supervised start, where there are any.

        Args:
            log: takes a line on what is being done now.

        Returns:
            Whether there is something to look at already: the run then evaluates the policy at step 0 and saves it.
        """
        ...

    def train(self) -> Any:
        """One round. Evaluations and checkpoints come between rounds, so a round lasts seconds."""
        ...

    def flush_pending(self) -> None:
        """Learns from rollouts that are under way, where there are any: called before an evaluation or a checkpoint, so
        that both are of one moment.
        """
        ...

    def finish(self) -> None:
        """Waits for answers that are still to come; called once, after the last round."""
        ...

    def report(self) -> dict[str, float]:
        """The newest numbers by their names in `rlvlm.core.metrics`."""
        ...

    def evaluate_policy(self, num_episodes: int) -> Evaluation:
        """Episodes of the present policy on the true task."""
        ...

    def rewarded(self, episodes: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
        """The first of the last evaluation's episodes, about to be filmed: with what the reward source makes of each
        moment, where it was not asked when they were played.

        Raises:
            JudgeUnavailable: it does not answer.
        """
        ...

    def drain_records(self) -> list[Any]:
        """What others were asked and answered since the last call; the run's pipeline knows how to write it down."""
        ...

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Images [N, H, W, 3] of `snapshots` [N, S]; `size_px` is the side wanted, for envs that have no size."""
        ...

    def save_checkpoint(self, checkpoint_dir: str) -> Any:
        """Writes everything that an exact continuation needs; complete or not at all."""
        ...

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Goes on from a checkpoint of the same config."""
        ...

    def stop(self) -> None:
        """Frees processes, envs and memory."""
        ...
