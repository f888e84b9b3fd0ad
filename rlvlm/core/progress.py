"""Counts this process's units of work, which tells slow from hung processes."""

_num_done = 0


def count_progress() -> None:
    """Counts another unit of work: a step of an env, a chunk, a reset."""
    global _num_done
    _num_done += 1  # two threads may count as one: it only has to change


def progress() -> int:
    """Returns the units of work so far, >= 0."""
    return _num_done
