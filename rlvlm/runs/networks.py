"""What a large policy takes of a learner's GPU, and of each node's main memory. Preflight, placement and `rlvlm slurm`
ask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlvlm.core.errors import ModelUnavailable
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.config import JUDGE_ROLE, Role, RunConfig

_PROCESS_GIB = 1.0
"""Main memory of a process that has imported Ray, torch and transformers, before it loads anything."""


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


def main_memory(
    config: RunConfig, roles: Sequence[Role], where: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, float]]:
    """GiB of main memory that processes with a large policy take at least, by node and role; empty where the policy is
    small, or the files of its model are not here.

    Args:
        config: of the run.
        roles: its processes.
        where: the node of each process, by role, as `placement.place` gives it.
    """
    policy, algo = config.large_policy, config.algo
    if policy is None:
        return {}
    from rlvlm.algorithms.policy_gradient.memory_plan import plan, size_of

    try:
        size = size_of(policy, model_folder(policy))
    except ModelUnavailable:
        return {}
    found: dict[str, dict[str, float]] = {}
    for role in roles:
        is_replica = role.is_served and role.name != JUDGE_ROLE
        if not (role.is_own or role.learns or is_replica or role.gpu_setting):
            continue
        # a replica that asks for no GPU of its own is colocated with the learners
        on_gpu = role.gpus > 0 or (is_replica and not role.gpu_setting and algo.gpus_per_learner > 0)
        needs = plan(size, policy, algo if role.learns else replace(algo, shard=False), on_gpu=on_gpu)
        # on their way to a GPU the weights are read into main memory, as many as the process holds
        taken = needs.total if role.learns and not on_gpu else needs.weights
        for node in where[role.name]:
            own = found.setdefault(node, {})
            own[role.name] = own.get(role.name, 0.0) + _PROCESS_GIB + taken / 2**30
    return found


def sent_bytes(config: RunConfig) -> int:
    """Bytes of weights that lie in Ray's object store at a time while learners send theirs to those who play: two
    versions in float32. 0 where the policy is small, or plays where it learns.
    """
    policy = config.large_policy
    is_sent = config.num_learners or config.num_engine_replicas or getattr(config.algo, "env_runners", 0)
    if policy is None or not is_sent:
        return 0
    from rlvlm.algorithms.policy_gradient.memory_plan import size_of

    try:
        return 2 * 4 * size_of(policy, model_folder(policy)).learned
    except ModelUnavailable:
        return 0


def model_folder(policy: PolicyConfig | VLAConfig) -> Path:
    """The folder of a policy's model; of one of the hub, the place of its config, which says how large it is.

    Raises:
        ModelUnavailable: the hub does not have it, or cannot be reached.
    """
    from rlvlm.vlms.files import fetched  # torch is for those alone who name a model

    folder = Path(policy.model).expanduser()
    return folder if folder.is_dir() else fetched(policy.model, policy.revision, ("config.json",), "policy")
