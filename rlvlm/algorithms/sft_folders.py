"""Folders of the supervised start of a policy with replies: demonstrations to learn from, and `sft.json`.

The latter stands beside the checkpoint in a folder of `rlvlm sft` and describes the training data, because weights
alone do not.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.core.disk import write_json
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_json
from rlvlm.demonstrations.folder import open_folder
from rlvlm.demonstrations.records import to_token_episode
from rlvlm.demonstrations.weighting import folder_weights
from rlvlm.envs.config import EnvConfig, current_settings
from rlvlm.envs.env import TurnEnv
from rlvlm.policies.vlm.config import HEAD_OF_ACTS, PolicyConfig

MANIFEST_FILE = "sft.json"
WEIGHT = "weight"
"""Name of a demonstrated turn's weight, among the extras of its episode, as in `Weights.rows`."""
_WHICH_EPISODES = ("split", "deals", "episode_steps", "num_envs", "physics")
"""Settings that decide which episodes there are, how long and how exact: what is right with one value is right with
any. Episodes held out by a split are left out separately. All other settings change observations, prompts or
answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTManifest:
    """Description of a policy's training data, for `sft.json` beside its weights, which alone do not contain it."""

    task: str
    action_names: tuple[str, ...]
    head: str
    """`PolicyConfig.head` of the policy."""
    new_words: tuple[str, ...]
    """`PolicyConfig.new_words` of the policy; a vector learned for one word means nothing for another."""
    env: Mapping[str, Any]
    """Settings of the env, by name, on which prompts and starts depend."""
    conditioned: bool = False
    """`PolicyConfig.conditioned` of the policy."""
    history: int = 1
    """`PolicyConfig.history` of the policy."""

    def lacks(self, wanted: "SFTManifest") -> list[str]:
        """Returns reasons why weights trained on this cannot be used for `wanted`, in words."""
        lacking = [name for name in wanted.action_names if name not in self.action_names]
        return [
            *([f"its actions are not {', '.join(map(repr, lacking))}"] if lacking else []),
            *([f"policy.head was {self.head}, not {wanted.head}"] if self.head != wanted.head else []),
            *(["policy.new_words were others"] if self.new_words != wanted.new_words else []),
            *([f"policy.conditioned was {self.conditioned}"] if self.conditioned != wanted.conditioned else []),
            *([f"policy.history was {self.history}"] if self.history != wanted.history else []),
        ]

    def differs(self, wanted: "SFTManifest") -> list[str]:
        """Returns other differences from `wanted`, in words."""
        before = self.env
        changed = [key for key, value in wanted.env.items() if before.get(key, value) != value]
        return [
            *([f"its task was {self.task}, not {wanted.task}"] if self.task != wanted.task else []),
            *(f"env.{key} was {before[key]}, not {wanted.env[key]}" for key in changed),
        ]


def sft_manifest_of(task: str, env: EnvConfig, policy: PolicyConfig, action_names: tuple[str, ...]) -> SFTManifest:
    """Returns the manifest of `policy` trained in an env of `task`."""
    return SFTManifest(
        task=task, action_names=action_names, head=policy.head, new_words=policy.new_words, env=asdict(env),
        conditioned=policy.conditioned, history=policy.history,
    )  # fmt: skip


def check_sft_manifest(folder: Path, wanted: SFTManifest, log: Callable[[str], None]) -> None:
    """Raises unless the weights in `folder` can be used for `wanted`; logs other differences.

    Raises:
        UsageError: they cannot, or their manifest is unreadable.
    """
    manifest = read_sft_manifest(folder)
    if manifest is None:
        return
    if lacking := manifest.lacks(wanted):
        raise UsageError(f"{folder} is of no use here: {'; '.join(lacking)}", f"train it with rlvlm sft {wanted.task}")
    for difference in manifest.differs(wanted):
        log(f"{folder} learned something else: {difference}")


def write_sft_manifest(folder: Path, manifest: SFTManifest) -> None:
    """Writes `sft.json`."""
    write_json(folder / MANIFEST_FILE, asdict(manifest))


def read_sft_manifest(folder: Path) -> SFTManifest | None:
    """Reads the manifest of the weights in `folder`; None if it has none.

    Raises:
        UsageError: it is unreadable.
    """
    file = folder / MANIFEST_FILE
    try:
        found = read_json(file)
        words = {name: tuple(found[name]) for name in ("action_names", "new_words")}
        conditioned, history = bool(found.get("conditioned")), int(found.get("history", 1))  # missing in those of 0.2
        env = current_settings(dict(found["env"]))
        head = found["head"] if "head" in found else HEAD_OF_ACTS[found["acts"]]  # its name and values in 0.2
        return SFTManifest(task=found["task"], head=head, env=env, conditioned=conditioned, history=history, **words)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"cannot read {file}: {error}", "restore the file, or train anew with rlvlm sft") from error


def load_demonstrations(
    folder: Path, env: TurnEnv, settings: EnvConfig, sft: ReplySFTConfig | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> list[TokenEpisode]:  # fmt: skip
    """Returns the episodes of a folder of `rlvlm collect` whose starts `env` may have: episodes held out by its split
    are not learned from, whatever split collected them.

    Args:
        folder: folder of the demonstrations.
        env: env of the task to learn.
        settings: settings of `env`.
        sft: settings with a judge's labels, which give each turn a weight, mean 1, as the extra `WEIGHT`; None: no
            weights.
        log: receives a line about the weights.

    Raises:
        UsageError: it is not such a folder, its episodes are of an env with other settings, actions or snapshots, or
            have no snapshots, or none is left; or the labels belong to other data, or make all weights 0.
    """
    opened = open_folder(folder)
    if opened.has_chunks:
        raise UsageError(f"{folder} holds {opened.kind} of {opened.task}, not turns", "rlvlm collect number_line")
    records = list(opened.episodes())
    # a task's envs may have snapshots of other sizes with other settings, e.g. larger grids
    sizes = {record.arrays["snapshots"].shape[1] for record in records if "snapshots" in record.arrays}
    if sizes - {env.snapshot_size} or opened.action_names != env.action_names:
        raise UsageError(
            f"{folder} holds demonstrations of {opened.task}, whose actions or snapshots are not those of this env",
            "collect this task's own, with the same --env options: rlvlm collect TASK",
        )
    try:
        episodes = [to_token_episode(record, env) for record in records]
    except ValueError as error:
        fix = "learn from what rlvlm collect played; imported chats can be shown, filtered and exported"
        raise UsageError(f"{folder} cannot be learned from: {error}", fix) from error
    wanted = {key: value for key, value in asdict(settings).items() if key not in _WHICH_EPISODES}
    if other := opened.differs(wanted):
        raise UsageError(
            f"{folder} holds demonstrations collected with {'; '.join(other)}",
            f"set these as there, or rlvlm collect {opened.task} with these --env options and another --out",
        )
    if sft is not None and sft.labels:
        weights = folder_weights(
            folder, sft.labels, [len(episode) for episode in episodes],
            sft.weighting, sft.min_worth, sft.advantage_steps,
        )  # fmt: skip
        log(weights.told())
        # with their turns, because not all episodes are learned from
        parts = np.split(weights.rows(), np.cumsum([len(episode) for episode in episodes])[:-1])
        pairs = zip(episodes, parts, strict=True)
        episodes = [replace(episode, extras={**episode.extras, WEIGHT: tuple(part)}) for episode, part in pairs]
    kept = [episode for episode in episodes if env.may_start(episode.snapshots[0])]
    if not kept:
        raise UsageError(
            f"{folder} has {len(episodes):,} episodes, and none on the side {env.split!r} of the split",
            "collect more with the same --env.split",
        )
    return kept
