"""Runs of a vision-language model that acts: demonstrations, a supervised start, PPO, evaluation."""
