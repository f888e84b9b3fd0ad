"""Policies with sampled answers, trained by policy gradients: PPO, GRPO, RLOO, GiGPO are presets of one algorithm.

Best read in the order of a round, which is `PolicyGradient.training_step` in `algorithm`: `source` gets episodes played
(`runner`, `rollouts`, `env_workers`), scored (`rewards`) and filtered for useful ones; `learner` turns them into a
`batch` with `advantages` and descends `losses`. `supervised_start` comes before the first round; `player` plays the
evaluations.
"""
