"""Trains the networks from the replay it holds. RLlib builds one; the algorithm calls it between turns of acting."""

from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from torch import Tensor
from torch.optim import Adam

from rlvlm import metrics
from rlvlm.algorithms.label import label_on_draw
from rlvlm.algorithms.replay import Batch, Replay
from rlvlm.algorithms.sac_pebble import losses
from rlvlm.algorithms.sac_pebble.module import SACModule
from rlvlm.errors import NumericsError
from rlvlm.rewards.source import RewardSource


class SACLearner(TorchLearner):
    """SAC with the replay at its side: batches are gathered from contiguous tensors and nothing is copied between.

    Source: Haarnoja et al. 2018, arXiv:1812.05905. As in PEBBLE, the critics can start anew while the replay,
    policy and temperature stay.
    """

    networks: SACModule
    replay: Replay

    def build(self) -> None:
        """Makes networks, optimisers and an empty replay."""
        super().build()
        sac = self.config.sac
        self.networks = self.module[DEFAULT_MODULE_ID]
        self.replay = Replay(sac.replay_capacity, self.device)
        self.num_updates = 0
        self._generator = torch.Generator(self.device).manual_seed(self.config.seed)
        self._optimizers = {name: self.get_optimizer(DEFAULT_MODULE_ID, name) for name in ("actor", "critic", "alpha")}
        self._latest: dict[str, float] = {}

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Registers Adam for policy, critics and temperature; RLlib calls it during `build`."""
        networks, sac = self.module[module_id], self.config.sac
        groups = {"actor": (list(networks.policy.parameters()), sac.actor_lr),
                  "critic": (list(networks.critic.parameters()), sac.critic_lr),
                  "alpha": ([networks.log_alpha], sac.alpha_lr)}
        for name, (parameters, lr) in groups.items():
            self.register_optimizer(module_id=module_id, optimizer_name=name, params=parameters,
                                    optimizer=Adam(parameters, lr=lr, fused=True))

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """RLlib's own path from episodes to a loss, which this learner does not take.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("SACLearner trains from its own replay; call `learn`")

    def learn(self, num_updates: int, source: RewardSource) -> None:
        """Makes gradient updates on batches from the replay.

        Args:
            num_updates: how many, >= 0.
            source: relabels each batch if it moves with every step.

        Raises:
            NumericsError: a loss of the last update is not finite.
        """
        if num_updates == 0:
            return
        for _ in range(num_updates):
            rows = torch.randint(len(self.replay), (self.config.sac.batch_size,), generator=self._generator,
                                 device=self.device)
            statistics = self._update(self.replay.draw(rows, label_on_draw(self.replay, rows, source)))
        self.num_updates += num_updates
        self._latest = {name: value.item() for name, value in statistics.items()}
        self._check_finite()

    def _update(self, batch: Batch) -> dict[str, Tensor]:
        """One update of critics, policy, temperature and target; returns what is worth logging, unread."""
        sac, networks = self.config.sac, self.networks
        noise = torch.randn(2, *batch.actions.shape, generator=self._generator, device=self.device)
        alpha = networks.log_alpha.detach().exp()
        with torch.no_grad():
            next_actions, next_log_density = networks.policy.sample(batch.next_obs, noise[0])
            next_q = networks.target(batch.next_obs, next_actions)
            target = losses.td_target(batch.rewards, batch.terminated, next_q, next_log_density, alpha, sac.gamma)
        q = networks.critic(batch.obs, batch.actions)
        critic_loss = losses.critic_loss(q, target)
        self._descend("critic", critic_loss)
        actions, log_density = networks.policy.sample(batch.obs, noise[1])
        actor_loss = losses.actor_loss(networks.critic(batch.obs, actions), log_density, alpha)
        self._descend("actor", actor_loss)
        self._descend("alpha", losses.temperature_loss(networks.log_alpha, log_density, -batch.actions.shape[1]))
        losses.move_towards(list(networks.target.parameters()), list(networks.critic.parameters()), sac.tau)
        return {metrics.CRITIC_LOSS: critic_loss.detach(), metrics.ACTOR_LOSS: actor_loss.detach(),
                metrics.ALPHA: alpha, metrics.ENTROPY: -log_density.detach().mean(), metrics.Q_MEAN: q.detach().mean()}

    def _descend(self, name: str, loss: Tensor) -> None:
        """One optimiser step; only the gradients of that optimiser's own parameters are computed."""
        parameters = self._optimizers[name].param_groups[0]["params"]
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        self._optimizers[name].step()

    def _check_finite(self) -> None:
        """Stops a run whose losses have become NaN or infinite: one such update spoils every weight behind it."""
        total = torch.tensor(list(self._latest.values())).sum()
        if not total.isfinite():
            raise NumericsError(f"a loss is not finite after {self.num_updates} updates: {self._latest}",
                                "resume from the last checkpoint with smaller --algo.actor-lr and --algo.critic-lr")

    def restart_critics(self) -> None:
        """Critics, targets and the critics' optimiser start anew; policy, temperature and replay stay."""
        self.networks.restart_critics(self._generator)
        self._optimizers["critic"].state.clear()

    def report(self) -> dict[str, float]:
        """Losses of the newest update (none before the first) and the number of updates so far."""
        return {**self._latest, metrics.UPDATES: float(self.num_updates)}

    def save_tree(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs, as a state tree."""
        return {
            "networks": {name: value.cpu().numpy() for name, value in self.networks.state_dict().items()},
            "optimizers": {name: _optimizer_tree(optimizer) for name, optimizer in self._optimizers.items()},
            "replay": self.replay.get_state(),
            "generator": self._generator.get_state().numpy(),
            "num_updates": self.num_updates,
            "latest": self._latest,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned; learning rates stay those of the present config."""
        self.networks.load_state_dict({name: torch.as_tensor(value) for name, value in tree["networks"].items()})
        for name, optimizer in self._optimizers.items():
            _restore_optimizer(optimizer, tree["optimizers"][name])
        self.replay.set_state(tree["replay"])
        self._generator.set_state(torch.as_tensor(tree["generator"]))
        self.num_updates, self._latest = tree["num_updates"], dict(tree["latest"])


def _optimizer_tree(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Adam's moments and step count per parameter, in order; empty dicts before the first step."""
    parameters = optimizer.param_groups[0]["params"]
    return [{name: value.cpu().numpy() for name, value in optimizer.state.get(parameter, {}).items()}
            for parameter in parameters]


def _restore_optimizer(optimizer: torch.optim.Optimizer, states: list[dict[str, Any]]) -> None:
    optimizer.state.clear()
    for parameter, state in zip(optimizer.param_groups[0]["params"], states, strict=True):
        if state:
            optimizer.state[parameter] = {name: torch.tensor(value, device=parameter.device)
                                          for name, value in state.items()}
