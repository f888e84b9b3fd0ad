"""The page on judges of the same episodes: how alike they rank, and the frames where they part, in one look."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from rlvlm.core.steps import Frames
from rlvlm.judge_bench.figures import rank_correlation
from rlvlm.pages.charts import COLOURS, INK, STYLE
from rlvlm.pages.judge import small
from rlvlm.pages.judge_charts import WIDTH, shorten
from rlvlm.pages.page import Card, Picture, Section, Table
from rlvlm.plugins.agreement.outputs import Outputs

PEOPLE = "people"
"""Name of the mean of people's answers among the judges."""
_MAX_ROWS = 40
"""Maximum number of episodes in the chart of last frames."""


def part_most(outputs: Outputs, count: int) -> list[tuple[str, int]]:
    """Returns the frames where the highest and the lowest value of judges differ most: the widest of each episode
    first, then the others.
    """
    widest = sorted(outputs, key=lambda frame: (-_width(outputs[frame]), frame))
    firsts = {episode: frame for episode, frame in reversed(widest)}
    return sorted(widest, key=lambda frame: firsts[frame[0]] != frame[1])[:count]  # stable: each part stays in order


def agreement_sections(
    outputs: Outputs,
    images: Mapping[tuple[str, int], Frames],
    people: Mapping[tuple[str, int], Mapping[str, float]],
    count: int,
) -> list[Section]:
    """Returns the sections of the page, whose words are also the terminal's.

    Args:
        outputs: values of two or more judges.
        images: images [H, W, 3] to show, by frame; others are described in words.
        people: people's answers in [0, 1], by frame.
        count: number of frames to show.
    """
    means = {frame: {PEOPLE: float(np.mean([*said.values()]))} for frame, said in people.items()}
    persons = {person for said in people.values() for person in said}
    together = {frame: {**values, **means.get(frame, {})} for frame, values in outputs.items()}
    judges = sorted({judge for values in outputs.values() for judge in values})
    names = [*judges, *([PEOPLE] if people else [])]
    pairs = {pair: [(v[pair[0]], v[pair[1]]) for v in together.values() if {*pair} <= v.keys()]
             for pair in combinations(names, 2)}  # fmt: skip
    ranks = {pair: rank_correlation(*zip(*both, strict=True)) for pair, both in pairs.items() if len(both) > 1}
    lasts = {episode: together[episode, frame] for episode, frame in sorted(outputs)}
    apart = sum(_width({name: v[name] for name in judges if name in v}) > 0.5 for v in lasts.values())
    found = [rank for pair, rank in ranks.items() if {*pair} <= {*judges}]
    finding = f"In {apart:,} of {len(lasts):,} last frames the {len(judges)} judges part by over half of the scale."
    if found:
        finding += f" Their rank correlations over all frames go from {min(found):+.2f} to {max(found):+.2f}."
    rows = [
        (
            f"{left}, {right}",
            f"{ranks[left, right]:+.2f}" if (left, right) in ranks else "too few",
            f"{len(both):,}",
            f"{np.mean([abs(a - b) for a, b in both]):.2f}" if both else "-",
        )
        for (left, right), both in sorted(pairs.items(), key=lambda pair: ranks.get(pair[0], 2.0))
    ]
    shown = [*dict.fromkeys([*part_most(outputs, count), *sorted(people)])]
    cards = [_card(frame, outputs[frame], people.get(frame, {}), images.get(frame)) for frame in shown]
    counts = {"judges": len(judges), "episodes": len(lasts), "frames": len(outputs), PEOPLE: len(persons)}
    said = [f"{frame[0]}, frame {frame[1]}: {_said(together[frame])}" for frame in part_most(outputs, count)[:5]]
    with matplotlib.rc_context(STYLE):
        charts = {"the last frame of each episode": _draw_lasts(lasts, names)}
        charts["rank correlation"] = _draw_ranks(names, ranks)
    return [
        Section(finding=finding, tiles={name: f"{num:,}" for name, num in counts.items() if num}, charts=charts),
        Section(heading="Where they part most", points=[("", line) for line in said], cards=cards),
        Section(
            heading="How alike they rank",
            tables=[Table(heads=("judges", "rank correlation", "frames", "mean difference"), rows=rows)],
            notes_below=["Values are shares of a finished task. Frames count that both answered about."],
        ),
    ]


def _width(values: Mapping[str, float]) -> float:
    return max(values.values(), default=0.0) - min(values.values(), default=0.0)


def _said(values: Mapping[str, float]) -> str:
    return ", ".join(f"{judge} {value:.2f}" for judge, value in sorted(values.items()))


def _card(
    frame: tuple[str, int], values: Mapping[str, float], people: Mapping[str, float], image: Frames | None
) -> Card:
    lowest, highest = min(values.values()), max(values.values())
    tones = {lowest: "loss", highest: "gain"} if lowest < highest else {}
    title, badge = f"{frame[0]}, frame {frame[1]}", f"{highest - lowest:.2f} apart"
    facts = [f"people: {_said(people)}"] if people else []
    if image is None:
        return Card(title=title, badge=badge, facts=[_said(values), *facts])
    measures = [(judge, f"{value:.2f}", tones.get(value, "")) for judge, value in sorted(values.items())]
    picture = Picture(src=small(image), alt=title, measures=measures)
    return Card(title=title, badge=badge, facts=facts, pictures=[picture])


def _draw_lasts(lasts: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> Figure:
    """Draws what each judge says of the last frame of each episode: a row an episode, the widest at the top."""
    rows = sorted(lasts, key=lambda episode: _width(lasts[episode]))[-_MAX_ROWS:]
    figure = Figure(figsize=(WIDTH, 1.3 + 0.16 * max(len(rows), 5)), layout="constrained")
    axes = figure.subplots()
    for number, episode in enumerate(rows):
        values = lasts[episode].values()
        axes.plot([min(values), max(values)], [number, number], color="#d5dde0", linewidth=3, zorder=1)
    for place, name in enumerate(names):
        points = [(lasts[episode][name], number) for number, episode in enumerate(rows) if name in lasts[episode]]
        look = {"color": COLOURS[place % len(COLOURS)], "marker": "o"}
        look = {"color": INK, "marker": "D"} if name == PEOPLE else look
        axes.scatter(*np.array(points).reshape(-1, 2).T, label=shorten(name), s=26, zorder=2, alpha=0.9, **look)
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.7, len(rows) - 0.3), xlabel="share of the task that is done, they say")
    axes.set_yticks(range(len(rows)), [shorten(episode, 18) for episode in rows], fontsize=7)
    axes.set_title("One last image, and what each says of it")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _draw_ranks(names: Sequence[str], ranks: Mapping[tuple[str, str], float]) -> Figure:
    """Draws the rank correlation of each two judges: red where one ranks against the other."""
    table = np.full((len(names), len(names)), np.nan)
    for (left, right), value in ranks.items():
        table[names.index(left), names.index(right)] = table[names.index(right), names.index(left)] = value
    figure = Figure(figsize=(WIDTH, 1.3 + 0.34 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(table, cmap="RdYlGn", vmin=-1, vmax=1, aspect="auto")
    for row, column in np.argwhere(np.isfinite(table)).tolist():
        axes.text(column, row, f"{table[row, column]:+.2f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(names)), [shorten(name, 14) for name in names], rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), [shorten(name, 14) for name in names], fontsize=8)
    axes.grid(visible=False)
    axes.set_title("Do they rank frames alike?")
    return figure
