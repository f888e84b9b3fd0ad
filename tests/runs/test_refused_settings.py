"""Settings of one section that contradict each other; bounds and needs of single settings are in `test_bounds`, what
sections say of each other in `test_run_config`.
"""

import pytest

from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, PolicyGradientConfig
from rlvlm.judges.config import JudgeConfig, SimilarityConfig
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.rewards.config import MixtureConfig, MonitorConfig, StepRewardConfig, TurnRewardConfig
from rlvlm.serving.config import PlacementConfig, ServedEngineConfig
from rlvlm.vlms.config import ApiConfig

JUDGED = {"source": "judged"}
CALIBRATED = JUDGED | {"threshold": "calibrated"}
GROWING = JUDGED | {"clip": "growing"}
ONE_REPLICA = {"num_replicas": 1}
REFUSED = {
    AdvantageConfig: [
        ({"scorer_noise": -0.1}, "scorer_noise must be >= 0"),
    ],
    PolicyGradientConfig: [
        ({"num_learners": 65}, "never see a turn"),
        ({"num_learners": 2, "gpus_per_learner": 0.5}, "gpus_per_learner must be 1"),
        ({"num_learners": 2, "gpus_per_learner": 2.0}, "gpus_per_learner must be 1"),
        ({"num_learners": 1, "gpus_per_learner": 1.5}, "gpus_per_learner must be 1"),
        ({"num_learners": 1, "shard": True}, "num_learners >= 2"),
    ],
    TurnRewardConfig: [
        ({"source": "mixture"}, "needs one at least"),
        (JUDGED | {"mixture": MixtureConfig(judged=1.0)}, "weights go with the source mixture"),
        (JUDGED | {"teacher": "biased"}, "biased teacher is about episodes"),
        ({"threshold": 0.5}, "have no effect without scores"),
        (JUDGED | {"threshold": 0.0}, "threshold must be in"),
        (CALIBRATED | {"teacher": "random"}, "a calibrated threshold needs a judge"),
        (CALIBRATED | {"monitor": MonitorConfig(preflight=0)}, "needs a judge"),
        (GROWING | {"per": "episode"}, "goes with reward.per turn"),
        (GROWING | {"without_answer": "neutral"}, "a gain needs both scores"),
        (GROWING | {"success_weight": 0.5}, "success_weight is beside the score of a whole episode"),
        (GROWING | {"clip": "turn", "teacher": "progress"}, "set reward.per episode or reward.clip growing"),
        (GROWING | {"source": "environment"}, "reward.clip have no effect without scores"),
        ({"source": "environment", "shaping": "value"}, "learns from the outcomes of whole episodes"),
        (JUDGED | {"per": "turn", "shaping": "value"}, "reward.source success, or judged with"),
    ],
    StepRewardConfig: [
        ({"source": "score", "teacher": "mistake"}, "reward.teacher mistake compares and gives no scores")
    ],
    FlowConfig: [
        ({"noise": 1.5, "kernel": "cps"}, "policy.flow.noise must be <= 1"),
        ({"min_std": 0.5}, "min_std must be at most max_std"),
        ({"steps": 1, "ignore_last": True}, "leaves no step to learn from"),
        ({"steps": 1, "kernel": "cps"}, "leaves no step to learn from"),
    ],
    ServedEngineConfig: [
        (ONE_REPLICA | {"num_gpus": 0.5, "colocated": True}, "engine.num_gpus must be 0 with engine.colocated"),
        ({"colocated": True}, "no effect without engine.num_replicas"),
        ({"num_gpus": 0.5}, "no effect without engine.num_replicas"),
        ({"backend": "vllm"}, "no effect without engine.num_replicas"),
    ],
    PlacementConfig: [({"max_replicas": 1, "num_replicas": 2}, "serve.max_replicas must be 0 or >= num_replicas")],
    SimilarityConfig: [({"template": words}, "judge.similarity") for words in ("a drawer", "{goal} {x}")],
    JudgeConfig: [
        ({"temperature": value}, r"temperature must be 0 \(greedy\) or 0.01 to 2")
        for value in (1e-300, 0.009, 3.0, -1.0, float("nan"))
    ],
    ApiConfig: [({"max_cost_usd": 1.0}, "judge.api.max_cost_usd")],  # a cap without prices
}


@pytest.mark.parametrize(
    ("section", "settings", "said"), [(section, *row) for section, rows in REFUSED.items() for row in rows]
)
def test_settings_that_contradict_each_other_are_refused(section, settings, said):
    with pytest.raises(ValueError, match=said):
        section(**settings)
