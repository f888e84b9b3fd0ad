"""Reward models that answer with heads of their own on a Qwen3-VL, not with words: Robometer and RynnValue."""
