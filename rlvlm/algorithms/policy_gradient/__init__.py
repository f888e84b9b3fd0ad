"""Policies that answer in tokens and learn by policy gradients: PPO, GRPO, RLOO, GiGPO are presets of one algorithm.

To be read in the order of a round, which is `PolicyGradient.training_step` in `algorithm`: `source` has episodes played
(`runner`, `rollouts`, `env_workers`), scored (`rewards`) and those kept that teach something; `learner` makes a `batch`
of them with their `advantages` and descends `losses`. `supervised_start` is what comes before the first round, `player`
what evaluations play.
"""
