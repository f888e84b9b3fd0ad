"""What a large policy takes of a learner's GPU, and of each node's main memory. Preflight, placement and `rlvlm slurm`
ask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvlm.core.errors import ModelUnavailable
from rlvlm.envs.registry import make_env
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.config import JUDGE_ROLE, Role, RunConfig

if TYPE_CHECKING:  # torch
    from rlvlm.algorithms.policy_gradient.memory_plan import Workload

_MAX_AT_ONCE = 256
"""Replies at once beyond which a replica is not advised to go, as vLLM by default does not."""
_PROCESS_GIB = 1.0
"""Main memory of a process that has imported Ray, torch and transformers, before it loads anything."""


def learner_memory(config: RunConfig) -> str:
    """What a learner's process takes of its GPU by the rule in `memory_plan`, in words; empty where the policy is
    small, or the files of its model are not here.
    """
    policy, algo = config.large_policy, config.algo
    if policy is None:
        return ""
    from rlvlm.algorithms.policy_gradient.memory_plan import plan, size_of, words_of

    try:
        folder = model_folder(policy)
    except ModelUnavailable:
        return ""
    return words_of(plan(size_of(policy, folder), policy, algo, on_gpu=True, workload=workload_of(config)))


def envs_advice(config: RunConfig) -> str:
    """The setting that fills the memory of what samples in turns, in words; empty where nothing is left, or where not
    enough is known: the card, the tokenizer, and a policy that computes on this machine.
    """
    policy, algo = config.large_policy, config.algo
    if not isinstance(policy, PolicyConfig):
        return ""
    from rlvlm.algorithms.policy_gradient.memory_plan import MARGIN, plan, size_of
    from rlvlm.vlms.devices import gpu_memory

    engine: Any = getattr(config, "engine", None)  # of runs in turns, whose policy this is
    card, work = gpu_memory(), workload_of(config)
    copies = config.num_engine_replicas or 1
    if card is None or not work.prompt_tokens or not (work.is_sampled or engine.num_gpus):
        return ""
    size, envs = size_of(policy, model_folder(policy)), algo.num_envs
    if not work.is_sampled:  # an engine holds weights and what it samples with; vLLM takes a share of the card
        card *= min(1.0, engine.num_gpus)
        card *= engine.vllm.memory_share if engine.backend == "vllm" else 1.0

    def fits(envs: int) -> bool:
        each = replace(algo, num_envs=envs // copies, rollout_turns=0, num_learners=0, shard=False)
        needs = plan(size, policy, each, on_gpu=True, workload=replace(work, is_sampled=True))
        total = needs.total if work.is_sampled else needs.context + needs.weights + needs.images + needs.sampling
        return total <= (1 - MARGIN) * card

    while 2 * envs <= _MAX_AT_ONCE * copies and fits(2 * envs):
        envs *= 2
    if envs == algo.num_envs:
        return ""
    turns = f" --algo.rollout-turns {envs}" if algo.rollout_turns % envs else ""
    advice = (
        f"the GPU has room for {envs} envs at once, whose replies are sampled together: --algo.num-envs {envs}{turns}"
    )
    if (episodes := min(envs, config.eval.episodes)) > max(algo.num_envs, config.eval.num_envs):
        advice += f"; in evaluations alone, whose episodes stay the same: --eval.num-envs {episodes}"
    return advice


def workload_of(config: RunConfig) -> "Workload":
    """What goes through a learner's policy beside updates, in a run with a large policy."""
    from rlvlm.algorithms.policy_gradient.memory_plan import Workload

    policy, algo, sft = config.large_policy, config.algo, getattr(config, "sft", None)
    plays_elsewhere = config.num_learners or config.num_engine_replicas or algo.env_runners
    return Workload(
        prompt_tokens=_prompt_tokens(config) if isinstance(policy, PolicyConfig) else 0,
        sft_rows=sft.batch_size if sft is not None and (config.plays_expert or sft.demonstrations) else 0,
        is_sampled=not plays_elsewhere,
        eval_envs=config.eval.num_envs,
    )


def _prompt_tokens(config: RunConfig) -> int:
    """Tokens of the first prompt of a task in turns with its images; 0 where the tokenizer is not here."""
    from transformers import AutoConfig

    from rlvlm.policies.vlm.backbone import prompt_ids
    from rlvlm.vlms.processors import load_processor

    policy = config.large_policy
    folder = Path(policy.model).expanduser()
    if not (folder / "tokenizer_config.json").is_file():  # of the hub: fetched later
        return 0
    env = make_env(config.task, config.env, config.seed)
    try:
        turn, _ = env.reset(seed=config.seed)
        processor = load_processor(folder, AutoConfig.from_pretrained(folder, trust_remote_code=False), policy)
        return len(prompt_ids(processor, turn.prompt, env.image_px, policy.history))
    except ModelUnavailable:
        return 0  # what loads the policy says so
    finally:
        env.close()


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
        taken += needs.adam * (role.learns and on_gpu and algo.offload)
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
