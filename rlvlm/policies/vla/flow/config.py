"""Settings of a flow policy's denoising and exploration; imports nothing heavy so that the CLI starts at once."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rlvlm.core.checks import Bound, PositiveInt, Share, check_bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowConfig:
    """Settings of denoising chunks, and of the noise that is added for exploration."""

    section: ClassVar[str] = "policy.flow"
    """Prefix of these fields on the command line, for messages."""

    steps: PositiveInt = 1
    """K, the number of equal steps from noise to action, >= 1. Published: 4 to 10."""
    kernel: Literal["sde", "learned", "cps"] = "sde"
    """Kind of a noisy step. sde: noise with a drift that preserves the distribution (Flow-GRPO, pi_RL); learned: noise
    with a learned standard deviation, added to the ODE (ReinFlow); cps: part of the remaining noise is replaced by
    fresh noise."""
    noise: Annotated[float, Bound("[0, 10]")] = 0.3
    """Noise level a of `sde`, >= 0, or the part that `cps` replaces, in [0, 1]; `algo.temperature` multiplies it, as it
    does learned noise. Published: 0.5 to 0.7. In units of normalised actions."""
    start_std: Share = 0.0
    """Standard deviation in [0, 1] of the noise from which sampled chunks are denoised; 1 as in training. This noise
    has no log-prob: it is part of the state, so no credit is assigned to it. Greedy chunks start from 0."""
    min_std: Annotated[float, Bound("(0, 10]")] = 0.08
    """Minimum standard deviation of a step with `learned` noise, > 0, in units of normalised actions."""
    max_std: Annotated[float, Bound("(0, 10]")] = 0.16
    """Maximum standard deviation of a step with `learned` noise, in units of normalised actions."""
    learn: Literal["one", "all", "last"] = "all"
    """Steps of a chunk that get noise and are trained. all; one: drawn anew for each chunk; last: the last that may
    have noise. A single step costs a K-th of the update, and `kl_target` then measures only that step."""
    ignore_last: bool = False
    """Whether the last step stays without noise, which would remain in the executed action."""
    draws: PositiveInt = 4
    """Noises and times per chunk in an update of the supervised start, >= 1; images are encoded once."""
    normalisation: Literal["mean_std", "quantiles"] = "mean_std"
    """Scaling of actions and proprioception by the demonstrations: to mean 0 and standard deviation 1, or the 1st
    and the 99th percentile to -1 and 1. A checkpoint has its own."""

    def __post_init__(self) -> None:
        check_bounds(self, self.section)
        if self.kernel == "cps" and self.noise > 1:
            raise ValueError(f"{self.section}.noise must be <= 1 with kernel cps, got {self.noise}")
        if self.min_std > self.max_std:
            raise ValueError(
                f"{self.section}.min_std must be at most max_std, got {self.min_std} and {self.max_std}; swap them"
            )
        if self.num_candidates < 1:
            raise ValueError(
                f"{self.section}.steps {self.steps} leaves no step to learn from where the last one has no noise "
                f"(kernel {self.kernel}, ignore_last {self.ignore_last}); take at least 2 steps"
            )

    @property
    def num_candidates(self) -> int:
        """Number of steps that may be noisy; the last one of `cps` never is."""
        return self.steps - (self.ignore_last or self.kernel == "cps")

    @property
    def num_learned(self) -> int:
        """K', the steps of a chunk that are noisy, stored and trained."""
        return self.num_candidates if self.learn == "all" else 1
