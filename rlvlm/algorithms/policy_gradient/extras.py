"""The extra tensors that a loss of one's own asks of every episode, and their check before a run starts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlvlm.algorithms.policy_gradient.losses import Extras, find_policy_loss
from rlvlm.core.episodes import Observations, Reply, TokenEpisode
from rlvlm.core.errors import NumericsError, UsageError

_FIX = (
    "give one number for each turn, as episode.turn_rewards and episode.gains are (episode.env_rewards has one for "
    "each env step since the start), or an array for each turn as long as its answer, as episode.log_probs are"
)


def extras_of(episodes: Sequence[TokenEpisode], loss: str) -> list[dict[str, Any]]:
    """Returns the extra tensors of each episode by name: those it brings, and those that the loss asks of it.

    Raises:
        UsageError: one is missing in an episode, or has another length than the episode's turns or answers.
        NumericsError: one is not finite.
    """
    ask = find_policy_loss(loss).extras
    found = [{**episode.extras, **(_asked(ask, episode, loss) if ask else {})} for episode in episodes]
    for name in sorted({name for extras in found for name in extras}):
        for extras, episode in zip(found, episodes, strict=True):
            column, lengths = extras.get(name, ()), [len(log_probs) for log_probs in episode.log_probs]
            got = [np.size(each) for each in column]
            if got not in ([1] * len(episode), lengths):
                raise UsageError(
                    f"the extras {name} of algo.loss.policy {loss} have lengths {got}, for an episode of "
                    f"{len(episode)} turns whose answers have {lengths}",
                    _FIX,
                )
            if not all(np.isfinite(each).all() for each in column):
                raise NumericsError(f"the extras {name} of algo.loss.policy {loss} are not finite", "mend them")
    return found


def check_extras(loss: str, *, has_chunks: bool, is_piece: bool) -> None:
    """Asks the loss's function of a made-up episode, as rollouts will bring them.

    What it raises is passed over, as the numbers, texts and answers are not those of an env, unless it names what no
    episode has.

    Args:
        loss: value of `algo.loss.policy`.
        has_chunks: whether the episode is one of chunks, else of replies.
        is_piece: whether it is the later piece of one, as rollouts of a fixed number of turns are.

    Raises:
        UsageError: it asks for something else than an episode has, or returns what cannot be learned from.
    """
    ask, episode = find_policy_loss(loss).extras, _made_up(has_chunks, is_piece)
    if ask is None:
        return
    try:
        extras_of([episode], loss)
    except UsageError:
        raise
    except AttributeError as error:
        if getattr(error, "obj", None) is not episode:
            return
        raise UsageError(
            f"the function extras of algo.loss.policy {loss} asks for episode.{error.name}, which there is not",
            "docs/bring.md, *What a loss is given*, names what an episode has",
        ) from error
    except Exception:  # the user's own code, and no real episode
        return


def _asked(ask: Extras, episode: TokenEpisode, loss: str) -> Mapping[str, Any]:
    """Returns the tensors of a user's function by name."""
    found: object = ask(episode)
    if not isinstance(found, Mapping):
        raise UsageError(
            f"the function extras of algo.loss.policy {loss} returns a {type(found).__name__}",
            'return a dict: {"name": numbers}',
        )
    if odd := [name for name, column in found.items() if not hasattr(column, "__len__")]:
        raise UsageError(f"the extras {odd[0]} of algo.loss.policy {loss} are a single number", _FIX)
    return found


def _made_up(has_chunks: bool, is_piece: bool) -> TokenEpisode:
    """Returns an episode of three turns, with another length of everything that may have another length."""
    before, steps = 2 * is_piece, np.array([2, 2, 1] if has_chunks else [1, 1, 1])
    num_steps, num_turns = before + int(steps.sum()), len(steps)
    lengths = (6, 6, 6) if has_chunks else (5, 7, 6)
    numbers = np.linspace(0.1, 0.9, num_steps, dtype=np.float32)
    reply = Reply(text='{"action": "wait"}', thought="", action=0, action_span=(11, 17))
    return TokenEpisode(
        task="", seed=0, played_at=np.arange(num_turns), steps=steps, goals=("",) * num_turns,
        obs=Observations(texts=("",) * (num_turns + 1), snapshots=np.zeros((num_turns + 1, 1), np.float32)),
        snapshots=np.zeros((num_steps + 1, 1), np.float32),
        answers=tuple({"ids": np.arange(length)} for length in lengths),
        log_probs=tuple(np.full(length, -1.0, np.float32) for length in lengths),
        masks=tuple(np.ones(length, bool) for length in lengths),
        chunks=tuple(np.zeros((2, 3), np.float32) for _ in lengths) if has_chunks else (),
        values=np.zeros(num_turns, np.float32), versions=np.zeros(num_turns, np.int64),
        replies=() if has_chunks else (reply,) * num_steps, action_names=() if has_chunks else ("wait",) * num_turns,
        env_rewards=numbers, success=np.arange(num_steps) == num_steps - 1, progress=numbers,
        gains=np.linspace(0.1, 0.3, num_turns, dtype=np.float32),
        rewards=np.linspace(0.2, 0.4, num_turns, dtype=np.float32), is_over=True, terminated=True,
    )  # fmt: skip
