"""What a learner's network takes of its GPU. Preflight and placement ask."""

from pathlib import Path

from rlvlm.core.errors import ModelUnavailable
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.config import RunConfig


def learner_memory(config: RunConfig) -> str:
    """What a learner takes of its GPU by the rule in `memory_plan`, in words; empty where the policy is small, or the
    files of its model are not here.
    """
    policy, algo = config.large_policy, config.algo
    if policy is None:
        return ""
    from rlvlm.algorithms.policy_gradient.memory_plan import plan, size_of, words_of

    try:
        folder = model_folder(policy)
    except ModelUnavailable:
        return ""
    return words_of(plan(size_of(policy, folder), policy, algo, on_gpu=True))


def model_folder(policy: PolicyConfig | VLAConfig) -> Path:
    """The folder of a policy's model; of one of the hub, the place of its config, which says how large it is.

    Raises:
        ModelUnavailable: the hub does not have it, or cannot be reached.
    """
    from rlvlm.vlms.files import fetched  # torch is for those alone who name a model

    folder = Path(policy.model).expanduser()
    return folder if folder.is_dir() else fetched(policy.model, policy.revision, ("config.json",), "policy")
