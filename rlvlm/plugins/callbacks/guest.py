"""What this guest adds: nothing to commands; `WatchCallback` for Stable-Baselines3 and for TRL's trainers."""

from rlvlm.core.guests import Guest

GUEST = Guest(about="the figures and alarms of a watched judge in SB3's and TRL's logs", docs="in_your_framework.md")
