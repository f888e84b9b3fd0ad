"""Tools to test your own judges and envs: a small env, a judge with known answers, and the contract checks.

`check_judge` checks a judge's protocol; the checks of envs are those of `rlvlm check-task`.
"""

from rlvlm.envs.check import check_chunk_env, check_step_env, check_turn_env
from rlvlm.testing.judges import FakeJudge, check_judge
from rlvlm.testing.tiny_env import TINY, TinyEnv

__all__ = ["TINY", "FakeJudge", "TinyEnv", "check_chunk_env", "check_judge", "check_step_env", "check_turn_env"]
