"""`rlvlm labels agree` and `labels import --form csv | roboreason`: judges of others on the same frames."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.checks import PositiveInt, check_bounds
from rlvlm.core.console.arguments import parse
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.foreign import visible
from rlvlm.plugins.agreement.outputs import Form


@dataclass(frozen=True, kw_only=True)
class AgreeArguments:
    """Compare judges that others asked about the same episodes, without asking anybody: a summary here, and a page."""

    outputs: tyro.conf.Positional[Path]
    """A CSV file with the columns episode, frame, judge, value; or a folder of roboreason's model_outputs."""
    form: Form = "csv"
    """roboreason: only frames count that were asked about, and not the straight lines in between."""
    full: float | None = None
    """Value of a finished task, on the scale of all judges from 0 on; by default 1 for csv, 100 for roboreason."""
    data: Path | None = None
    """Recorded data with the episodes, as for `rlvlm score`, for the images on the page."""
    camera: str = ""
    """Camera of the data to show; by default the first that is not a wrist's."""
    people: Path | None = None
    """Label store in which people answered about these frames, see `labels import`; needs --data."""
    frames: PositiveInt = 12
    """Frames to show where judges part most, of different episodes first, >= 1."""
    out: Path = Path("agreement.html")
    """File of the page."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        if self.people is not None and self.data is None:
            raise ValueError("--people finds answers by the images that they are about, so it needs --data")


@dataclass(frozen=True, kw_only=True)
class ImportOutputsArguments:
    """Put the values of others' judges into a label store with the images that they are about, so that people can
    answer the same questions: `labels ask STORE`.
    """

    outputs: tyro.conf.Positional[Path]
    """A CSV file with the columns episode, frame, judge, value; or a folder of roboreason's model_outputs."""
    form: Form = "csv"
    """Kind of the outputs; there are others."""
    full: float | None = None
    """Value of a finished task, on the scale of all judges from 0 on; by default 1 for csv, 100 for roboreason."""
    data: Path
    """Recorded data with the episodes, as for `rlvlm score`."""
    camera: str = ""
    """Camera of the data to show; by default the first that is not a wrist's."""
    goal: str = ""
    """Goal in the questions, instead of the episodes' own sentences."""
    store: Path
    """Folder of the store; created if missing."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `labels agree OUTPUTS [--data DATA] [--people STORE]`: prints the summary and writes the page."""
    arguments = parse(AgreeArguments, words, prog)
    from rlvlm.core.disk import write_whole  # numpy and matplotlib: not needed for help
    from rlvlm.labels.store import open_store
    from rlvlm.pages.page import page, print_sections
    from rlvlm.plugins.agreement.images import images_of, people_of
    from rlvlm.plugins.agreement.outputs import read_outputs
    from rlvlm.plugins.agreement.page import agreement_sections, part_most

    outputs = read_outputs(arguments.outputs, arguments.form, arguments.full)
    num_judges = len({judge for values in outputs.values() for judge in values})
    if num_judges < 2:
        raise UsageError(f"{arguments.outputs} has answers of {num_judges} judges", "agreement is of two or more")
    people, images = {}, {}
    if arguments.data is not None:
        if arguments.people is not None:
            answers = people_of(open_store(arguments.people))
            asked = images_of(arguments.data, arguments.camera, outputs) if answers else ()
            people = {frame: answers[digest] for frame, _, digest in asked if digest in answers}
        chosen = [*dict.fromkeys([*people, *part_most(outputs, arguments.frames)])]
        images = {frame: image for frame, image, _ in images_of(arguments.data, arguments.camera, chosen)}
    sections = agreement_sections(outputs, images, people, arguments.frames)
    write_whole(arguments.out, page("Where judges agree, and where they part", sections))
    print_sections(sections)
    sys.stdout.write(visible(f"look at {arguments.out}\n"))
    return EXIT_DONE


def import_command(words: Sequence[str], prog: str) -> int:
    """Runs `labels import OUTPUTS --data DATA --store STORE`: prints how many answers about how many frames."""
    arguments = parse(ImportOutputsArguments, words, prog)
    from rlvlm.labels.store import LabelStore
    from rlvlm.plugins.agreement.images import keep_outputs
    from rlvlm.plugins.agreement.outputs import read_outputs

    outputs = read_outputs(arguments.outputs, arguments.form, arguments.full)
    store = LabelStore(arguments.store)
    count, num_frames = keep_outputs(outputs, arguments.data, arguments.camera, arguments.goal, store)
    note = f", people answer about them with: rlvlm labels ask {arguments.store}"
    sys.stdout.write(visible(f"{count:,} answers about {num_frames:,} frames in {arguments.store}{note}\n"))
    return EXIT_DONE
