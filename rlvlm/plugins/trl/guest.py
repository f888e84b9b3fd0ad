"""What this guest adds: nothing to commands; a reward function for TRL's trainers, which `rewards.py` makes."""

from rlvlm.core.guests import Guest

GUEST = Guest(about="a judge's score as a reward function of TRL", docs="in_your_framework.md")
