"""Progress display of a command: an image that stays in place on a terminal, plain lines elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from rlvlm.core.foreign import visible


class QuietConsole(Console):
    """Console of all commands. It shows texts as they are, since names and paths are users': no markup is read, no
    `:boat:` becomes an image, no number is coloured; what is to be bold is a `Text`. Control characters are shown as
    escapes. It stops writing once its reader is gone, as with `| head`, without ending the process.

    Args:
        settings: of rich's console.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders as rich does, with control characters in texts made visible; rich's own are in separate segments."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def on_broken_pipe(self) -> None:
        """Stops all further writing. Rich's own method ends the process, and would redirect standard output."""
        self.quiet = True


def clock(steps: float, steps_per_s: float) -> str:
    """Returns the duration of `steps`, as h:mm:ss; empty if the speed is unknown."""
    return str(timedelta(seconds=round(max(steps, 0) / steps_per_s))) if steps_per_s else ""


class Screen(ABC):
    """Output stream for people, as a context manager: on a terminal it shows an image while it is open.

    The stream itself is asked whether it is a terminal: in notebooks and CI, FORCE_COLOR makes rich assume that.

    Args:
        stream: a terminal, or a file or pipe that gets plain lines.
        title: first line if there is no image.
    """

    def __init__(self, stream: TextIO, title: str) -> None:
        # soft_wrap: in a log a line stays one line, however long, so that grep finds it
        self._console = QuietConsole(file=stream, soft_wrap=True, force_terminal=stream.isatty())
        self._title = title
        self._live: Live | None = None  # set while the image is shown
        self._phase = ""

    @abstractmethod
    def render(self) -> RenderableType:
        """Returns the current image; called twice a second."""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=2)
            self._live.start()
        else:
            self.line(self._title)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, text: str) -> None:
        """Prints a line that stays, above the image if there is one."""
        self._console.print(Text(text))

    def phase(self, text: str, is_line: bool = True) -> None:
        """Shows the current phase; without an image only if `is_line`."""
        self._phase = text
        if self._live is None and is_line:
            self.line(text)
