"""The networks of a run's own process, and what a learner's takes of its GPU. Preflight and placement ask."""

from pathlib import Path

from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core.errors import ModelUnavailable
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.config import RunConfig


def networks_of(config: RunConfig) -> dict[str, tuple[str, str, str]]:
    """Networks in the run's own process, by the section of the command line that names each: device, model (a hub name
    or a folder; empty where it needs none) and the model's revision.
    """
    algo, policy, found = config.algo, config.policy, {}
    if isinstance(algo, SACConfig):
        found["algo"] = (algo.device, "", "")
        if config.reward_model and isinstance(config.reward, StepRewardConfig) and config.reward.is_learned:
            found["reward-model"] = (config.reward_model.device, "", "")
    elif isinstance(policy, PolicyConfig):  # it plays in the run's own process even where others learn
        found["policy"] = (policy.device, policy.model, policy.revision)
    elif isinstance(policy, VLAConfig):
        if not algo.num_learners:
            found["algo"] = (algo.device, "", "")
        if policy.model:  # likewise
            found["policy.openvla"] = (policy.openvla.device, "", "")
            found["policy"] = ("auto", policy.model, policy.revision)
    return found


def learner_memory(config: RunConfig) -> str:
    """What a learner takes of its GPU by the rule in `memory_plan`, in words; empty where the policy is small, or the
    files of its model are not here.
    """
    policy, algo = config.policy, config.algo
    if policy is None or not policy.model or isinstance(algo, SACConfig):
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
