"""Memory of a large policy on a learner's GPU and in each node's main memory; for preflight, placement and SLURM."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlvlm.core.errors import ModelUnavailable
from rlvlm.envs.registry import make_env
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.settings.answers_run import AnswersRun
from rlvlm.runs.settings.config import JUDGE_ROLE, Role, RunConfig
from rlvlm.runs.settings.turns_run import TurnsRun

if TYPE_CHECKING:  # torch
    from rlvlm.runs.start.memory_plan import ModelSize, Workload

_MAX_AT_ONCE = 256
"""Number of concurrent replies beyond which a replica should not go, vLLM's default."""
_PROCESS_GIB = 1.0
"""Main memory of a process that has imported Ray, torch and transformers, before it loads anything, GiB."""


def learner_memory(config: RunConfig) -> str:
    """Returns, in words, a learner process's GPU memory by the rule in `memory_plan`; empty if the policy is small or
    the files of its model are not here.
    """
    policy = config.large_policy
    size = _size_of(policy)
    if policy is None or size is None or not isinstance(config, AnswersRun):
        return ""
    from rlvlm.runs.start.memory_plan import plan, words_of

    return words_of(plan(size, policy, config.algo, on_gpu=True, workload=workload_of(config)))


def envs_advice(config: RunConfig) -> str:
    """Returns, in words, the setting that fills the memory of a sampler in turns; empty if nothing is left, or if too
    little is known: the GPU, the tokenizer, or whether the policy computes on this machine.
    """
    policy = config.large_policy
    if policy is None or not isinstance(config, TurnsRun):
        return ""
    from rlvlm.runs.start.memory_plan import MARGIN, plan, size_of
    from rlvlm.vlms.devices import gpu_memory

    algo, engine = config.algo, config.engine
    card, work = gpu_memory(), workload_of(config)
    copies = config.num_engine_replicas or 1
    if card is None or not work.prompt_tokens or not (work.is_sampled or engine.num_gpus):
        return ""
    size, envs = size_of(policy, model_folder(policy)), algo.num_envs
    if not work.is_sampled:  # an engine holds weights and its cache; vLLM takes a share of the GPU
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


def workload_of(config: AnswersRun) -> "Workload":
    """Returns what a learner's policy computes besides updates, in a run with a large policy."""
    from rlvlm.runs.start.memory_plan import Workload

    policy, algo, sft = config.large_policy, config.algo, config.sft
    plays_elsewhere = algo.num_learners or config.num_engine_replicas or algo.env_runners
    return Workload(
        prompt_tokens=_prompt_tokens(config, policy) if isinstance(policy, PolicyConfig) else 0,
        sft_rows=sft.batch_size if sft.plays_expert or sft.demonstrations else 0,
        is_sampled=not plays_elsewhere,
        eval_envs=config.eval.num_envs,
    )


def _prompt_tokens(config: RunConfig, policy: PolicyConfig) -> int:
    """Returns the tokens of a turn task's first prompt with its images; 0 if the tokenizer is not here."""
    from transformers import AutoConfig

    from rlvlm.policies.vlm.backbone import prompt_ids
    from rlvlm.vlms.processors import load_processor

    folder = Path(policy.model).expanduser()
    if not (folder / "tokenizer_config.json").is_file():  # a hub model, fetched later
        return 0
    env = make_env(config.task, config.env, config.seed)
    try:
        turn, _ = env.reset(seed=config.seed)
        processor = load_processor(folder, AutoConfig.from_pretrained(folder, trust_remote_code=False), policy)
        return len(prompt_ids(processor, turn.prompt, env.image_px, policy.history))
    except ModelUnavailable:
        return 0  # the policy's loader reports this error
    finally:
        env.close()


def main_memory(
    config: RunConfig, roles: Sequence[Role], where: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Returns the minimum main memory, GiB, of processes with a large policy, by node and role; empty if the policy is
    small or the files of its model are not here.

    Args:
        config: config of the run.
        roles: its processes.
        where: the node of each process, by role, as returned by `placement.place`.
    """
    policy = config.large_policy
    size = _size_of(policy)
    if policy is None or size is None or not isinstance(config, AnswersRun):
        return {}
    from rlvlm.runs.start.memory_plan import plan

    algo = config.algo
    found: dict[str, dict[str, float]] = {}
    for role in roles:
        is_replica = role.is_served and role.name != JUDGE_ROLE
        if not (role.is_own or role.learns or is_replica or role.gpu_setting):
            continue
        # a replica without a GPU of its own shares the learners'
        on_gpu = role.gpus > 0 or (is_replica and not role.gpu_setting and algo.gpus_per_learner > 0)
        needs = plan(size, policy, algo if role.learns else replace(algo, shard=False), on_gpu=on_gpu)
        # weights pass through main memory on their way to a GPU, as many as the process holds
        taken = needs.total if role.learns and not on_gpu else needs.weights
        taken += needs.adam * (role.learns and on_gpu and algo.offload)
        for node in where[role.name]:
            own = found.setdefault(node, {})
            own[role.name] = own.get(role.name, 0.0) + _PROCESS_GIB + taken / 2**30
    return found


def sent_bytes(config: RunConfig) -> int:
    """Returns the bytes of weights in Ray's object store while learners send theirs to the samplers: two versions in
    float32. 0 if the policy is small, or samples where it learns.
    """
    is_sent = config.algo.num_learners or config.num_engine_replicas or config.algo.env_runners
    size = _size_of(config.large_policy) if is_sent else None
    return 0 if size is None else 2 * 4 * size.learned


def _size_of(policy: PolicyConfig | VLAConfig | None) -> "ModelSize | None":
    """Returns the size of a large policy; None if it is small, or the files of its model are not here."""
    if policy is None:
        return None
    from rlvlm.runs.start.memory_plan import size_of

    try:
        return size_of(policy, model_folder(policy))
    except ModelUnavailable:
        return None


def model_folder(policy: PolicyConfig | VLAConfig) -> Path:
    """Returns the folder of a policy's model; for a hub model, the folder of its config, which shows its size.

    Raises:
        ModelUnavailable: the hub does not have it, or cannot be reached.
    """
    from rlvlm.vlms.files import fetched  # torch is only for those who name a model

    folder = Path(policy.model).expanduser()
    return folder if folder.is_dir() else fetched(policy.model, policy.revision, ("config.json",), "policy")
