"""Turns of envs that are talked to: an image and words in, text out."""

from dataclasses import dataclass

from rlvlm.core.steps import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a player is given when it is its turn."""

    snapshot: FloatArray
    """[S] everything that can change the image; the env can draw it."""
    prompt: str
    """The user's words of this turn, without any mark for the image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a player wrote, and what the env read in it."""

    text: str
    """As it was written; untrusted."""
    thought: str
    """The members of the reply's JSON object that stand before its action, as written; empty where there are none."""
    action: int | None
    """Index into the env's `action_names`; None: nothing could be read, or the action is not legal now."""
    action_span: tuple[int, int] | None
    """First and one past the last character of `text` that make up the action's value, its quotes left out; None where
    there is no such value."""
