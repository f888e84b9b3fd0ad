"""What this guest adds: nothing to commands; `JudgeReward` for Gymnasium's envs and `JudgeVecReward` for SB3's."""

from rlvlm.core.guests import Guest

GUEST = Guest(about="a judge's score as the reward of a Gymnasium env, alone or in SB3", docs="in_your_framework.md")
