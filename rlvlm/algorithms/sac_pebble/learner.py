"""Trains the networks from its replay. RLlib builds a learner; the algorithm calls it between turns of acting."""
# pyright: reportAttributeAccessIssue=false
# RLlib types configs and modules by their base classes

from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from torch import Tensor

from rlvlm.algorithms.learners import ManualLearner
from rlvlm.algorithms.sac_pebble import losses
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sac_pebble.dense import ParameterBlock, fast_products, flatten
from rlvlm.algorithms.sac_pebble.label import label_on_draw
from rlvlm.algorithms.sac_pebble.module import SACModule
from rlvlm.algorithms.sac_pebble.replay import Replay, ReplayBatch
from rlvlm.algorithms.sac_pebble.update import UPDATES, CriticValues, PolicyValues
from rlvlm.core import metrics
from rlvlm.core.errors import NumericsError
from rlvlm.core.finite import check_finite
from rlvlm.rewards.source import RewardSource

_FIX = "lower algo.actor_lr and algo.critic_lr in the run's config.yaml, then `rlvlm resume`"


class SACLearner(ManualLearner):
    """SAC with the replay in the same process: batches are gathered from contiguous tensors, without copies in between.

    Source: Haarnoja et al. 2018, arXiv:1812.05905. As in PEBBLE, the critics can be restarted while the replay,
    policy and temperature stay.
    """

    networks: SACModule
    replay: Replay
    _sac: SACConfig

    def build(self) -> None:
        """Makes networks, their training memory and an empty replay."""
        super().build()
        self._sac = sac = self.config.sac
        self.networks = self.module[DEFAULT_MODULE_ID]
        self.replay = Replay(sac.replay_capacity, self.device)
        self.num_updates = 0
        assert self.config.seed is not None, "SACPebbleConfig always has a seed"
        self._generator = torch.Generator(self.device).manual_seed(self.config.seed)
        self._latest: dict[str, float] = {}
        self._blocks = {
            "actor": ParameterBlock(self.networks.policy.parameters(), sac.actor_lr),
            "critic": ParameterBlock(self.networks.critic.parameters(), sac.critic_lr),
            "alpha": ParameterBlock([self.networks.log_alpha], sac.alpha_lr),
        }
        self._target_values = flatten(self.networks.target.parameters())
        self._sac_update = UPDATES[sac.update](self.networks, sac)

    @property
    def policy_values(self) -> Tensor:
        """[P] weights of the policy, the same memory that updates change."""
        return self._blocks["actor"].values

    def learn(self, num_updates: int, source: RewardSource, bonus_weight: float = 0.0) -> None:
        """Makes gradient updates on batches from the replay.

        Args:
            num_updates: number of updates, >= 0.
            source: relabels each batch if it changes with every step.
            bonus_weight: weight of the stored bonuses relative to the stored rewards.

        Raises:
            NumericsError: a loss of the last update is not finite.
        """
        if num_updates == 0 or not len(self.replay):  # a judge may not have answered yet
            return
        if self._sac.is_calibrated and not self.num_updates:
            self.networks.calibrate(self.replay.obs)
        critic_values = policy_values = batch = None
        for _ in range(num_updates):
            rows = torch.randint(
                len(self.replay), (self._sac.batch_size,), generator=self._generator, device=self.device
            )
            batch = self.replay.draw(rows, label_on_draw(self.replay, rows, source, bonus_weight))
            with fast_products():
                critic_values, moved = self._improve(batch)
            policy_values = moved or policy_values
            self.num_updates += 1
        if critic_values:
            q, target = critic_values
            self._latest |= {metrics.CRITIC_LOSS: losses.critic_loss(q, target).item(), metrics.Q_MEAN: q.mean().item()}
        if policy_values:
            q, log_density, alpha = policy_values
            self._latest[metrics.ACTOR_LOSS] = losses.actor_loss(q, log_density, alpha).item()
            self._latest |= {metrics.ALPHA: alpha.item(), metrics.ENTROPY: -log_density.mean().item()}
        # only the last update's gradients: a non-finite one spoils every weight, and with them all later updates
        if not torch.tensor(list(self._latest.values())).sum().isfinite():
            assert batch is not None, "there was an update"
            raise NumericsError(
                f"a loss is not finite after {self.num_updates} updates: {self._latest}",
                _FIX,
                {name: getattr(batch, name).cpu().numpy() for name in ("obs_and_actions", "next_obs", "rewards")},
            )

    def check_weights(self) -> None:
        """Raises unless all weights and the newest gradients are finite.

        Raises:
            NumericsError: some are not; the message says which.
        """
        looked_at = {"weights of the target": self._target_values}
        for name, block in self._blocks.items():
            looked_at |= {f"weights of the {name}": block.values, f"gradients of the {name}": block.gradients}
        # one number for all of them; only if it is not finite, search for the vector
        if not torch.stack([vector.sum() for vector in looked_at.values()]).sum().isfinite():
            check_finite(f"after {self.num_updates} updates", _FIX, looked_at)

    def _improve(self, batch: ReplayBatch) -> tuple[CriticValues, PolicyValues | None]:
        """Makes one update of critics and target and, when due, of policy and temperature."""
        # the policy's noise at the next states and at these: both updates use the same, however gradients are computed
        noise = torch.randn(2, *batch.actions.shape, generator=self._generator, device=self.device)
        critic_values, policy_values = self._sac_update.critic_gradients(batch, noise), None
        self._blocks["critic"].step()
        if self.num_updates % self._sac.actor_every == 0:
            policy_values = self._sac_update.policy_gradients(batch, noise)
            self._blocks["actor"].step()
            self._blocks["alpha"].step()
        with torch.no_grad():
            # target <- target + tau (critic - target)
            self._target_values.lerp_(self._blocks["critic"].values, self._sac.tau)
        return critic_values, policy_values

    def restart_critics(self, bonus_weight: float = 0.0) -> None:
        """Restarts critics, targets and the critics' optimiser; policy, temperature and replay stay.

        Calibrated ones see states scaled by those in the replay, and begin at the value of its mean reward: comparisons
        leave a constant of the reward undetermined, which critics take thousands of updates to learn. Bonuses are
        multiplied by `bonus_weight`.
        """
        obs, value = None, 0.0
        if self._sac.is_calibrated:
            # V = r + gamma p V, with p the share of steps after which the episode continues
            p_on = 1 - float(self.replay.terminated.mean())
            reward = float(self.replay.rewards.mean()) + bonus_weight * float(self.replay.bonuses.mean())
            value = reward / (1 - self._sac.gamma * p_on)
            obs = self.replay.obs if self.num_updates else None  # the first update scales the inputs of all networks
        self.networks.restart_critics(self._generator, obs, value)
        self._blocks["critic"].forget()

    def report(self) -> dict[str, float]:
        """Returns losses of the newest update (none before the first) and the number of updates so far."""
        return {**self._latest, metrics.UPDATES: float(self.num_updates)}

    def save_tree(self) -> dict[str, Any]:
        """Returns everything needed for a bit-identical continuation, as a state tree."""
        return {
            "networks": {name: value.cpu().numpy() for name, value in self.networks.state_dict().items()},
            "adam": {name: block.get_state() for name, block in self._blocks.items()},
            "replay": self.replay.get_state(),
            "generator": self._generator.get_state().numpy(),
            "num_updates": self.num_updates,
            "latest": self._latest,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned; learning rates stay those of the present config."""
        self.networks.load_state_dict({name: torch.as_tensor(value) for name, value in tree["networks"].items()})
        for name, block in self._blocks.items():
            block.set_state(tree["adam"][name])
        self.replay.set_state(tree["replay"])
        self._generator.set_state(torch.as_tensor(tree["generator"]))
        self.num_updates, self._latest = tree["num_updates"], dict(tree["latest"])
