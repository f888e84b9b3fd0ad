"""Policies that answer in tokens and learn by policy gradients: PPO, GRPO, RLOO, GiGPO are presets of one algorithm."""
