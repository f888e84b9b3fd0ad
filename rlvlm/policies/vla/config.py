"""Size of the pocket VLA; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PocketVLAConfig:
    """The pocket VLA's widths; the defaults make 0.6 million parameters."""

    image_px: int = 32
    """Side of the square images it looks at, even."""
    channels: tuple[int, int] = (16, 24)
    """Of its two convolutions; the first halves the image."""
    hidden: int = 256
    """Width of the trunk."""
    token_width: int = 32
    """Width of an action token before it meets the table of bins."""
    vocabulary: int = 1_024
    """Rows of the table of words; words and pairs of words are hashed into it."""
    word_width: int = 32
    """Width of the table of words."""

    def __post_init__(self) -> None:
        sizes = (self.image_px, *self.channels, self.hidden, self.token_width, self.vocabulary, self.word_width)
        if min(sizes) < 1 or self.image_px % 2:
            raise ValueError(f"all sizes must be >= 1 and image_px even, got {self}")
