"""Counts the pieces of work that this process has done: what waits for it tells slow from hung by that."""

_num_done = 0


def count_progress() -> None:
    """Notes that another piece of work is done: a step of an env, a chunk, a reset."""
    global _num_done
    _num_done += 1  # two threads may count as one: what matters is that it moves


def progress() -> int:
    """Pieces of work so far, >= 0."""
    return _num_done
