"""Rewards: a `RewardSource` labels steps, a `Scorer` scores turns and episodes.

`source` defines sources of step rewards, `build` makes one by name; `scorers` score turns and episodes, and `monitor`
watches a judge that does. Used by preferences and algorithms.
"""
