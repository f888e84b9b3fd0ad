"""Plain SAC in one file, written from the paper alone: the reference for tests of `rlvlm.algorithms.sac_pebble`.

    python examples/sac_in_one_file.py      # a mass on a line learns to come to rest at 0, in under a minute

Haarnoja et al. 2018, arXiv:1812.05905, with two critics and a learned temperature. It shares no code with rlvlm, uses
`torch.distributions` and ordinary layers, and is not fast. Noise and batches are arguments, so that both can be fed
the same ones.
"""

import copy
import math

import torch
from torch import nn
from torch.distributions import Normal
from torch.distributions.transforms import TanhTransform


def mlp(size_in, hidden, size_out):
    sizes = [size_in, *hidden, size_out]
    layers = []
    for index in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[index], sizes[index + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class SAC:
    def __init__(self, obs_size, action_size, hidden=(256, 256), lr=3e-4, gamma=0.99, tau=0.005, alpha=0.1):
        self.actor = mlp(obs_size, hidden, 2 * action_size)
        self.q1 = mlp(obs_size + action_size, hidden, 1)
        self.q2 = mlp(obs_size + action_size, hidden, 1)
        self.gamma, self.tau, self.target_entropy = gamma, tau, -action_size
        self.log_alpha = torch.tensor(math.log(alpha), requires_grad=True)
        self.q_optimizer = torch.optim.Adam([*self.q1.parameters(), *self.q2.parameters()], lr=lr)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=lr)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=lr)
        self.copy_targets()

    def copy_targets(self):
        self.q1_target, self.q2_target = copy.deepcopy(self.q1), copy.deepcopy(self.q2)

    def act(self, obs, noise):
        mean, raw = self.actor(obs).chunk(2, dim=-1)
        std = torch.exp(-5 + 3.5 * (torch.tanh(raw) + 1))
        before = mean + std * noise
        squash = TanhTransform()
        action = squash(before)
        density = Normal(mean, std).log_prob(before) - squash.log_abs_det_jacobian(before, action)
        return action, density.sum(-1, keepdim=True)

    def update(self, obs, actions, next_obs, terminated, rewards, next_noise, noise):
        alpha = self.log_alpha.exp().item()
        with torch.no_grad():
            next_action, next_density = self.act(next_obs, next_noise)
            both = torch.cat([next_obs, next_action], 1)
            smaller = torch.min(self.q1_target(both), self.q2_target(both))
            target = rewards[:, None] + self.gamma * (1 - terminated[:, None]) * (smaller - alpha * next_density)
        both = torch.cat([obs, actions], 1)
        critic_loss = nn.functional.mse_loss(self.q1(both), target) + nn.functional.mse_loss(self.q2(both), target)
        self.q_optimizer.zero_grad()
        critic_loss.backward()
        self.q_optimizer.step()

        action, density = self.act(obs, noise)
        both = torch.cat([obs, action], 1)
        actor_loss = (alpha * density - torch.min(self.q1(both), self.q2(both))).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()

        alpha_loss = (-self.log_alpha.exp() * (density.detach() + self.target_entropy)).mean()
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()

        with torch.no_grad():
            for target_net, net in ((self.q1_target, self.q1), (self.q2_target, self.q2)):
                for slow, fast in zip(target_net.parameters(), net.parameters(), strict=True):
                    slow.copy_((1 - self.tau) * slow + self.tau * fast)
        return {
            "critic_loss": critic_loss.item(),
            "actor_loss": actor_loss.item(),
            "alpha": alpha,
            "entropy": -density.mean().item(),
        }


def main(steps=4_000, episode_steps=40, seed=0):
    """A mass is pushed to 0 and held there; the reward is how near it is."""
    torch.manual_seed(seed)
    agent, memory, returns = SAC(2, 1, hidden=(64, 64)), [], []
    state, total = torch.zeros(2), 0.0
    for step in range(steps):
        if step % episode_steps == 0:
            returns, total = [*returns, total], 0.0
            state = torch.tensor([float(torch.rand(()) * 2 - 1), 0.0])
        with torch.no_grad():
            action = agent.act(state[None], torch.randn(1, 1))[0][0]
        speed = 0.8 * state[1] + 0.1 * action[0]
        after = torch.stack([(state[0] + speed).clamp(-2, 2), speed])
        reward = 1 - abs(float(after[0]))
        memory.append((state, action, after, torch.zeros(()), torch.tensor(reward)))
        state, total = after, total + reward
        if step >= 200:
            drawn = [memory[index] for index in torch.randint(len(memory), (64,))]
            batch = [torch.stack(column) for column in zip(*drawn, strict=True)]
            agent.update(*batch, torch.randn(64, 1), torch.randn(64, 1))
        if step % 1_000 == 999:
            print(f"step {step + 1}: return {sum(returns[-10:]) / 10:.1f} of {episode_steps}")
    return returns[1:]


if __name__ == "__main__":
    main()
