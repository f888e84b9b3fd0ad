"""What supervised fine-tuning reads from folders and leaves in them."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from rlvlm.demonstrations.folder import open_folder
from rlvlm.demonstrations.records import to_turn_episode
from rlvlm.envs.turns import TurnWorld
from rlvlm.errors import UsageError
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.types.turns import TurnEpisode

BODY_FILE, HEADS_FILE = "body.safetensors", "heads.safetensors"
"""What was trained: the adapter (or all weights of the language model), and apart from it the heads."""


def load_demonstrations(folder: Path, world: TurnWorld) -> list[TurnEpisode]:
    """The episodes of a folder that `rlvlm collect` made whose starts `world` may have: what its split holds out is not
    learned from, whoever collected it.

    Raises:
        UsageError: it is no such folder, its episodes keep no snapshots, or none of them is left.
    """
    opened = open_folder(folder)
    try:
        episodes = [to_turn_episode(record, opened.action_names) for record in opened.episodes()]
    except ValueError as error:
        fix = "learn from what rlvlm collect played; imported chats can be shown, filtered and exported"
        raise UsageError(f"{folder} cannot be learned from: {error}", fix) from error
    kept = [episode for episode in episodes if world.may_start(episode.snapshots[0])]
    if not kept:
        raise UsageError(
            f"{folder} has {len(episodes):,} episodes, and none on the side {world.split!r} of the split",
            "collect more with the same --env.split",
        )
    return kept


def load_trained(policy: VLMPolicy, folder: Path) -> None:
    """Gives `policy` what `save_trained` wrote.

    Raises:
        UsageError: nothing is there, or the weights are of another policy.
    """
    try:
        policy.load_trained_state(load_file(folder / BODY_FILE) | load_file(folder / HEADS_FILE))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} holds no weights for this policy: {error}",
            "make them with rlvlm sft and the same --policy options",
        ) from error


def save_trained(policy: VLMPolicy, folder: Path) -> None:
    """Writes what is trained of `policy` into `folder`, the heads apart."""
    state = {name: value.cpu().contiguous() for name, value in policy.trained_state().items()}
    heads = {name: value for name, value in state.items() if name.startswith(("value_head.", "action_head."))}
    save_file(heads, folder / HEADS_FILE)
    save_file({name: value for name, value in state.items() if name not in heads}, folder / BODY_FILE)
