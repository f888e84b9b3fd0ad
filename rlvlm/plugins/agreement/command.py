"""`rlvlm labels agree`: rank correlation of each two judges, and the frames where they part most."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import tyro

from rlvlm.core.console.arguments import parse
from rlvlm.core.console.tables import plain_console
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.foreign import visible
from rlvlm.plugins.agreement.outputs import Form, read_outputs


@dataclass(frozen=True, kw_only=True)
class AgreeArguments:
    """Compare judges that others asked about the same episodes, without asking anybody."""

    outputs: tyro.conf.Positional[Path]
    """A CSV file with the columns episode, frame, judge, value; or a folder of roboreason's model_outputs."""
    form: Form = "csv"
    """roboreason: only frames count that were asked about, and not the straight lines in between."""
    frames: int = 5
    """Number of frames to list where judges part most, >= 0."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `labels agree OUTPUTS [--form roboreason]`."""
    arguments = parse(AgreeArguments, words, prog)
    from rlvlm.judge_bench.figures import rank_correlation  # numpy: not needed for help

    outputs = read_outputs(arguments.outputs, arguments.form)
    judges = sorted({judge for values in outputs.values() for judge in values})
    if len(judges) < 2:
        raise UsageError(f"{arguments.outputs} has answers of {len(judges)} judges", "agreement is of two or more")
    lines = [f"{len(outputs):,} frames of {len({episode for episode, _ in outputs}):,} episodes"]
    for one, other in combinations(judges, 2):
        both = [(values[one], values[other]) for values in outputs.values() if {one, other} <= values.keys()]
        # within no scale: judges rank, and each has a scale of its own
        said = f"{rank_correlation(*zip(*both, strict=True)):+.2f}" if len(both) > 1 else "too few frames"
        lines.append(f"{one}, {other}: rank correlation {said} of {len(both):,} frames")
    parted = sorted(outputs.items(), key=lambda row: min(row[1].values()) - max(row[1].values()))
    for (episode, frame), values in parted[: arguments.frames]:
        shown = ", ".join(f"{judge} {value:g}" for judge, value in sorted(values.items()))
        lines.append(f"part most: {episode}, frame {frame}: {shown}")
    plain_console(soft_wrap=True).print(visible("\n".join(lines)), markup=False, highlight=False)
    return EXIT_DONE
