"""Runs of a vision-language-action policy: demonstrations, a supervised start, GRPO, evaluation."""
