"""What tests of one's own judges and envs need: a small env, a judge of known answers, and the contract checks.

`check_judge` holds a judge to its protocol; the checks of envs are those of `rlvlm check-task`.
"""

from rlvlm.envs.check import check_chunk_env, check_step_env, check_turn_env
from rlvlm.testing.judges import FakeJudge, check_judge
from rlvlm.testing.tiny_env import TINY, TinyEnv

__all__ = ["TINY", "FakeJudge", "TinyEnv", "check_chunk_env", "check_judge", "check_step_env", "check_turn_env"]
