"""Files with a fault, as a disk or a network leaves them."""

from pathlib import Path


def damage(path: Path, at: int) -> None:
    """Flips a bit of byte `at`, counted from the start and on from there at the file's end."""
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)
