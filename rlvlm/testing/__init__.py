"""Small stand-ins and contract checks; only tests (and benchmarks) import this room.

`worlds` and `fakes` are what tests use in place of simulators and models, `contracts` holds every judge to its protocol
(the check of worlds lives in `rlvlm.envs.contracts`, where `rlvlm check-task` finds it too), `chaos` breaks running
things on purpose (it needs Ray and is imported by its own name), such as a served `stub_judge`.
"""

from rlvlm.envs.contracts.steps import check_world
from rlvlm.envs.contracts.turns import check_turn_world
from rlvlm.testing.contracts import check_judge
from rlvlm.testing.fakes import FakeJudge
from rlvlm.testing.worlds import TINY, TinyWorld

__all__ = ["TINY", "FakeJudge", "TinyWorld", "check_judge", "check_turn_world", "check_world"]
