"""What this guest adds: nothing to commands; verl's custom reward function, `compute_score` of `reward.py`."""

from rlvlm.core.guests import Guest

GUEST = Guest(about="a judge's score as verl's custom reward function", docs="in_your_framework.md")
