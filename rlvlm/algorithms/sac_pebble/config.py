"""Hyperparameters of SAC+PEBBLE; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rlvlm.core.checks import Bound, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds

_GPU_UNITS = 1_024
"""Width of the widest layer from which a GPU is worth its transfers and kernel launches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SACConfig:
    """Soft actor-critic (Haarnoja 2018, arXiv:1812.05905) as PEBBLE uses it (Lee 2021, arXiv:2106.05091)."""

    preset: ClassVar[str] = ""
    num_learners: ClassVar[int] = 0
    """What other algorithms can set: it has no presets, and learns in the run's own process."""
    hidden: tuple[PositiveInt, ...] = (256, 256)
    """Units of each hidden layer, in actor and critics."""
    actor_lr: PositiveFloat = 3e-4
    """Learning rate of the actor."""
    critic_lr: PositiveFloat = 3e-4
    """Learning rate of both critics."""
    alpha_lr: PositiveFloat = 3e-4
    """Learning rate of the temperature."""
    initial_alpha: PositiveFloat = 0.1
    """Temperature at the start, > 0."""
    gamma: Annotated[float, Bound("[0, 1)")] = 0.99
    """Discount per env step, in [0, 1)."""
    tau: Annotated[float, Bound("(0, 1]")] = 0.005
    """Share of the critic in each soft update of the target critics, in (0, 1]."""
    batch_size: PositiveInt = 256
    """Transitions per update."""
    updates_per_step: PositiveFloat = 1.0
    """Gradient updates per env step."""
    actor_every: PositiveInt = 1
    """Critic updates per update of policy and temperature; 2 saves a sixth of the time."""
    is_calibrated: bool = False
    """Whether networks see states normalised by those of random play, and restarted critics by those in the replay, at
    whose mean reward they begin; otherwise raw states and critics near 0, as in PEBBLE. For tasks in which a centimetre
    matters."""
    turn_steps: PositiveInt = 10
    """Steps of each env between phases of updates; an episode's last phase may be shorter."""
    seed_steps: PositiveInt = 2_000
    """Env steps with uniform random actions at the start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of networks and replay. auto: the CPU if no layer has 1,024 units, because it is faster there (with the
    default layers 157 env steps a second on two cores, 94 to 123 on an H100); else a GPU that Ray or SLURM assigned to
    the process, if there is one. cuda: the first visible GPU."""
    update: Literal["by_hand", "autograd"] = "by_hand"
    """Computation of gradients: by_hand is faster; autograd is plain torch, for changes of the losses."""
    replay_capacity: PositiveInt = 1_000_000
    """Maximum number of transitions kept; memory is taken as they come."""
    novelty_neighbour: PositiveInt = 5
    """k of the k-NN state entropy that rewards exploration before the first labels."""
    critic_reset_updates: NonNegativeInt = 100
    """Updates right after the first feedback, when the critics are reset."""
    threads: PositiveInt = 1
    """CPU threads of torch in this process; matrices of this size gain little from a second one."""
    env_runners: NonNegativeInt = 0
    """Processes that step env.num_envs envs each while the learner learns; 0 steps them in the learner's process."""

    def __post_init__(self) -> None:
        check_bounds(self, "algo")
        if not self.hidden:
            raise ValueError("algo.hidden needs at least one layer, got none")

    @property
    def placed_on(self) -> str:
        """Returns `device`, with `auto` resolved for networks of this size."""
        return "cpu" if self.device == "auto" and max(self.hidden) < _GPU_UNITS else self.device

    def turns(self, episode_steps: int) -> list[int]:
        """Returns the steps of each env per turn; together they make one episode."""
        full, rest = divmod(episode_steps, self.turn_steps)
        return [self.turn_steps] * full + [rest] * (rest > 0)

    def updates_due(self, now: int, new_steps: int) -> int:
        """Returns the number of updates after a turn: none during random steps, then `updates_per_step` on average.

        Args:
            now: env steps so far, including the turn's.
            new_steps: env steps of the turn, of all envs.
        """
        before, after = (
            int(max(steps - self.seed_steps, 0) * self.updates_per_step) for steps in (now - new_steps, now)
        )
        return after - before
