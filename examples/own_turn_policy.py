"""A policy of your own for envs in turns: small convolutions that pick one of the env's actions.

python -m rlvlm.run empty_random_6x6 --policy.head own_turn_policy:SmallNet --algo.lr 1e-3
"""

import zlib

import numpy as np
import torch
from torch import nn

from rlvlm.core.episodes import SampledReply
from rlvlm.policies.protocol import Imitation, Prediction
from rlvlm.policies.reply_policy import ReplyPolicy


class SmallNet(ReplyPolicy):
    """Looks at the image, and at the prompt as a bag of words; its answer is the number of an action.

    `value_head` is asked only where a run's estimator has a critic of the policy's own.
    """

    def __init__(self, env, width="128"):
        super().__init__()
        size, num_actions = int(width), len(env.action_names)
        self.see = nn.Sequential(
            nn.AdaptiveAvgPool2d(48), nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 12 * 12, size), nn.ReLU(),
        )  # fmt: skip
        self.hear = nn.EmbeddingBag(1024, size, mode="mean")
        self.act_head = nn.Sequential(nn.Linear(2 * size, size), nn.ReLU(), nn.Linear(size, num_actions))
        self.value_head = nn.Sequential(nn.Linear(2 * size, size), nn.ReLU(), nn.Linear(size, 1))

    def forward(self, obs, detach_values=False):
        """Logits [B, A] of the actions and values [B] of `obs`, whose images it was shown."""
        pixels = torch.from_numpy(np.stack(self.images.get(obs.images))).to(self.device)
        words = [[zlib.crc32(word.encode()) % 1024 for word in text.split()] for text in obs.texts]
        begins = torch.tensor(np.cumsum([0, *map(len, words[:-1])]), device=self.device)
        ids = torch.tensor([number for row in words for number in row], device=self.device)
        seen = self.see(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1)
        hidden = torch.cat([seen, self.hear(ids, begins)], dim=1)
        return self.act_head(hidden), self.value_head(hidden.detach() if detach_values else hidden)[:, 0]

    @torch.no_grad()
    def sample(self, obs, seeds, sampling):
        """An action for each of `obs`, drawn by the seed of each."""
        logits, values = self(obs)
        table = (logits / sampling.temperature).log_softmax(-1)
        picked = sampling.pick(table, seeds)
        found = table.gather(1, picked[:, None]).cpu().numpy()
        return [
            SampledReply(answer={"action": np.array([action])}, log_probs=row, action=action, value=value)
            for action, row, value in zip(picked.tolist(), found, values.tolist(), strict=True)
        ]

    def log_probs(self, obs, answers, reading):
        """The log-prob of each action, under the weights as they are now."""
        logits, values = self(obs, reading.detach_values)
        table = (logits / reading.temperature).log_softmax(-1)
        picked = torch.from_numpy(np.stack([answer["action"] for answer in answers])).to(self.device)
        return Prediction(
            log_probs=table.gather(1, picked),
            values=values,
            entropies=-(table.exp() * table).sum(1, keepdim=True),
            token_values=values[:, None] if reading.with_token_values else None,
        )

    def values(self, obs):
        """[B] before any answer."""
        return self(obs)[1]

    def imitation(self, shown, env, sft, rng, log):
        """Minus the log-prob of the demonstrated action, of the turns whose action can be read."""
        obs, replies = self.demonstrated(shown, env)
        readable = np.array([row for row, reply in enumerate(replies) if reply.action is not None], np.int64)
        wanted = torch.tensor([replies[row].action for row in readable], device=self.device)

        def loss(rows, weights):
            logits, _ = self(obs.at(readable[rows.numpy()]))
            each = nn.functional.cross_entropy(logits, wanted[rows], reduction="none")
            return (each if weights is None else each * weights.to(each)).mean()

        return Imitation(loss=loss, shown=readable)
