"""PPO and its kin for policies that look, think and act in text."""
