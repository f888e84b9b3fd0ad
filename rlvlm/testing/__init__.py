"""Small stand-ins and contract checks; only tests (and benchmarks) import this room.

`envs` and `fakes` are what tests use in place of simulators and models, `contracts` holds every judge to its protocol
(the check of envs lives in `rlvlm.envs.check`, where `rlvlm check-task` finds it too), `chaos` breaks running
things on purpose (it needs Ray and is imported by its own name), such as a served `stub_judge`.
"""

from rlvlm.envs.check import check_step_env, check_turn_env
from rlvlm.testing.judges import FakeJudge, check_judge
from rlvlm.testing.tiny_env import TINY, TinyEnv

__all__ = ["TINY", "FakeJudge", "TinyEnv", "check_judge", "check_turn_env", "check_step_env"]
