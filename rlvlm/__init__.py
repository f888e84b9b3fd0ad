"""rlvlm: reinforcement learning whose reward comes from vision-language models, on Ray.

A run is one sentence: an env yields episodes, a reward source labels them, an algorithm learns from them,
an experiment compares the sources. Start at `rlvlm.runs.recipes`; the map of the house is in the README.
"""

__version__ = "0.1.0"
