"""Supervised fine-tuning as a job of its own: Ray Train's `TorchTrainer` around Hugging Face's `Trainer`.

One worker on a bare machine, one per GPU on a cluster; FSDP and DeepSpeed are configs that are passed on. The loss
looks at the reply's tokens alone, which the policy itself marks off: prompts end where the chat template hands over.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer, TrainingArguments

from rlvlm.algorithms.policy_gradient.slots import EnvSlot
from rlvlm.algorithms.sft import grouped_by_length
from rlvlm.algorithms.sft_config import JobConfig, ReplySFTConfig
from rlvlm.algorithms.sft_folders import BODY_FILE, HEADS_FILE, load_trained, save_trained
from rlvlm.algorithms.sft_replies import held_out_loss, split, validate
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.yaml_text import read_yaml
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.imitation import Example, examples_of, lengths_of
from rlvlm.policies.vlm.policy import VLMPolicy

_MEASURES_FILE = "measures.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainLoopConfig:
    """Arguments of every worker; pickled."""

    make_policy: Callable[[], VLMPolicy]
    make_slot: Callable[[], EnvSlot]
    """Draws the images of the episodes and reads replies."""
    load_episodes: Callable[[], Sequence[TokenEpisode]]
    """Loads the demonstrations, from a folder that every worker can see."""
    sft: ReplySFTConfig
    job: JobConfig
    seed: int


def run_sft(loop_config: TrainLoopConfig, folder: Path) -> dict[str, float]:
    """Trains, or goes on where an earlier job in `folder` was stopped; returns what the validation measured.

    `folder` then holds `body.safetensors`, `heads.safetensors` and, in `job/`, the checkpoints.

    Raises:
        UsageError: `job.arguments` names nothing of Hugging Face's trainer.
        Exception: whatever a worker raised.
    """
    job = loop_config.job
    if unknown := sorted(job.arguments.keys() - {field.name for field in fields(TrainingArguments)}):
        raise UsageError(
            f"Hugging Face's trainer has no arguments {', '.join(unknown)}",
            "--job.arguments takes names and values of transformers.TrainingArguments, e.g. bf16 true",
        )
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"loop_config": loop_config},
        scaling_config=ScalingConfig(
            num_workers=job.num_workers,
            use_gpu=job.gpus_per_worker > 0,
            resources_per_worker={"CPU": job.cpus_per_worker}
            | ({"GPU": job.gpus_per_worker} if job.gpus_per_worker else {}),
        ),
        run_config=RunConfig(
            name="job", storage_path=str(folder.absolute()), checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None, "the last update is always saved"
    with result.checkpoint.as_directory() as saved:
        inner = Path(saved) / RayTrainReportCallback.CHECKPOINT_NAME
        for name in (BODY_FILE, HEADS_FILE):
            shutil.copyfile(inner / name, folder / name)
        return json.loads((inner / _MEASURES_FILE).read_text())


class Imitation(nn.Module):
    """The policy as Hugging Face's trainer wants it: examples in, a loss out.

    Args:
        policy: is trained.
        reply_weight: as in `imitation_loss`.
    """

    def __init__(self, policy: VLMPolicy, reply_weight: float) -> None:
        super().__init__()
        self.policy = policy
        self._reply_weight = reply_weight

    def forward(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """The mean loss of some turns."""
        return {"loss": self.policy.imitation_loss(examples, self._reply_weight)}


class ImitationTrainer(Trainer):
    """Hugging Face's trainer with batches grouped by length, and checkpoints that hold what is trained alone."""

    def __init__(self, *, loop_config: TrainLoopConfig, held_out: Sequence[TokenEpisode], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._loop_config = loop_config
        self._held_out = held_out

    @property
    def _policy(self) -> VLMPolicy:
        unwrapped = self.accelerator.unwrap_model(self.model)
        assert isinstance(unwrapped, Imitation)
        return unwrapped.policy

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of about equal length; with several workers each takes its share of them."""
        examples: Any = self.train_dataset
        sft = self._loop_config.sft
        batches = LengthBatches(lengths_of(self._policy, examples), sft.batch_size, self._loop_config.seed)
        loader = DataLoader(examples, batch_sampler=batches, collate_fn=collate)
        # with several workers accelerate deals the batches out
        return self.accelerator.prepare(loader)

    def evaluate(self, *arguments: Any, **unused: Any) -> dict[str, float]:
        """Validation on held-out episodes: loss, equal actions, replies that can be read."""
        loop_config = self._loop_config
        sft, env = loop_config.sft, loop_config.make_slot().env
        engine = PolicyEngine(self._policy, sft.batch_size)
        measured = validate(engine, env, self._held_out, sft, loop_config.job.max_reply_tokens)
        if measured:
            loss = held_out_loss(self._policy, env, self._held_out, sft.batch_size)
            measured[metrics.SFT_HELD_OUT_LOSS] = loss
        self.log(measured)
        return measured

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_trained(self._policy, folder)
        # the newest of ours; names without a slash are the trainer's own
        measured = {key: value for log in self.state.log_history for key, value in log.items() if "/" in key}
        (folder / _MEASURES_FILE).write_text(json.dumps(measured))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_trained(self._policy, Path(resume_from_checkpoint))


class LengthBatches(Sampler[list[int]]):
    """Batches grouped by length; every epoch has another order, which a resumed job finds again.

    Args:
        lengths: [M] tokens of each example.
        batch: examples in a batch.
        seed: of the orders.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self._lengths, self._batch, self._seed = lengths, batch, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order; the trainer calls it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._lengths) // self._batch)

    def __iter__(self) -> Iterator[list[int]]:
        # drawn from the seed and the epoch's number alone, so that no state of it has to be saved
        noise = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(6, self._epoch)))
        return grouped_by_length(self._lengths, self._batch, noise)


def collate(examples: Sequence[Example]) -> dict[str, Any]:
    """A batch as `Imitation.forward` takes it; the policy pads it itself."""
    return {"examples": list(examples)}


def _worker(config: dict[str, Any]) -> None:
    """The work of each process; runs in Ray Train."""
    loop_config: TrainLoopConfig = config["loop_config"]
    policy, slot = loop_config.make_policy(), loop_config.make_slot()
    learned, held_out = split(loop_config.load_episodes(), loop_config.sft.held_out)
    examples = examples_of(policy, slot.env, learned)
    own = tempfile.mkdtemp(prefix="rlvlm-sft-")  # of this process alone; Ray Train keeps the checkpoints
    trainer = ImitationTrainer(
        loop_config=loop_config,
        held_out=held_out,
        model=Imitation(policy, loop_config.sft.reply_weight),
        args=training_arguments(loop_config, own),
        train_dataset=examples,
        eval_dataset=[],  # asked for by the trainer; `evaluate` has its own
        data_collator=collate,
        callbacks=[RayTrainReportCallback()],
    )
    trainer = prepare_trainer(trainer)
    checkpoint: Checkpoint | None = ray.train.get_checkpoint()
    try:
        if checkpoint is None:
            trainer.train()
            return
        with checkpoint.as_directory() as saved:
            trainer.train(resume_from_checkpoint=str(Path(saved) / RayTrainReportCallback.CHECKPOINT_NAME))
    finally:
        shutil.rmtree(own, ignore_errors=True)


def training_arguments(loop_config: TrainLoopConfig, folder: str) -> TrainingArguments:
    """Hugging Face's, by the job's config; what `job.arguments` says goes before."""
    sft, job = loop_config.sft, loop_config.job
    return TrainingArguments(
        **{
            "output_dir": folder,
            "max_steps": sft.updates,
            "per_device_train_batch_size": sft.batch_size,
            "learning_rate": sft.lr,
            "lr_scheduler_type": "cosine",
            "warmup_steps": max(sft.updates // 10, 1),
            "weight_decay": 0.01,
            "adam_beta2": 0.98,
            "max_grad_norm": sft.max_grad_norm,
            "eval_strategy": "steps",
            "eval_steps": job.save_every,
            "save_strategy": "steps",
            "save_steps": job.save_every,
            "save_total_limit": 1,
            "logging_steps": max(job.save_every // 5, 1),
            "remove_unused_columns": False,
            "label_names": [],
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": job.gpus_per_worker == 0,
            "seed": loop_config.seed,
        }
        | {name: read_yaml(value, name) for name, value in job.arguments.items()}
    )
