"""What the figures share: colours, lines by name, captions, legends."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

#: Okabe and Ito's colours (2008, jfly.uni-koeln.de/color), which colour-blind readers distinguish;
#: without the pale yellow. Black is for means and references.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
#: For the second and third round through the colours, so that lines differ in print too.
LINES, MARKERS = ("-", "--", ":"), ("o", "s", "^", "D", "v", "<", ">")
#: For lines that have no room for markers; dots alone are for references.
DASHES = ("-", (0, (5, 1.5)), (0, (7, 1.5, 1, 1.5)), (0, (2.5, 1)), (0, (7, 1, 1, 1, 1, 1)))
GRID = "#e6e6e6"
_UNIT = re.compile(r"(\d) (?=%)")
#: Selection layers and gold tokens; lines that stand back.
SELECTED, NEUTRAL = "#c8102e", "#9aa5b1"
#: Keywords of pictures whose cells are numbers: not smoothed, and stretched over the panel.
CELLS: Final[dict[str, Any]] = {"aspect": "auto", "interpolation": "nearest"}


def palette(count: int) -> list[str]:
    """Colours for a count of series; from the eighth on they repeat."""
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def series(names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Colour, line and marker for each name in turn, all different for up to 21."""
    return {
        name: {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": LINES[again % len(LINES)],
            "marker": MARKERS[(place + again) % len(MARKERS)],
        }
        for place, name in enumerate(names)
        for again in [place // len(COLOURS)]
    }


def bare_series(names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """As `series`, distinguished by dashes instead of markers."""
    return {
        name: {**style, "marker": "", "linestyle": DASHES[place % len(DASHES)]}
        for place, (name, style) in enumerate(series(names).items())
    }


def plain(axis: Axes, x: str | None = None, y: str | None = None, title: str | None = None) -> None:
    """Draw small ticks and a faint grid behind the data; name the axes and the panel."""
    name_axes(axis, x, y)
    if title is not None:
        axis.set_title(title, fontsize=9)
    axis.grid(color=GRID, linewidth=0.5)
    axis.set_axisbelow(True)


def name_axes(axis: Axes, x: str | None = None, y: str | None = None) -> None:
    """Name the axes of a panel, with their units; their ticks are small."""
    if x is not None:
        axis.set_xlabel(x, fontsize=8)
    if y is not None:
        axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=7)


def whole_ticks(*axes: Axis) -> None:
    """Put ticks at whole numbers only, and at least one."""
    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def colour_bar(
    figure: Figure, of: ScalarMappable, axes: Axes | Sequence[Axes], label: str, **layout: Any
) -> Axes:
    """Draw a colour bar beside panels and return its axes."""
    bar = figure.colorbar(of, ax=axes, **layout)
    bar.set_label(label, fontsize=7.5)
    bar.ax.tick_params(labelsize=7)
    return bar.ax


def plain_text(text: str) -> str:
    """Printable ASCII, line ends kept: fonts lack the rest, and what is not is escaped."""
    return "".join(
        c if c == "\n" or (c.isascii() and c.isprintable()) else escaped(c) for c in text
    )


def short_text(text: str, most: int) -> str:
    """Plain text on one line, cut to at most `most` characters."""
    shown = plain_text(text).replace("\n", "\\n")
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def escaped(character: str) -> str:
    """A character as a string of Python would have it, by its number."""
    return character.encode("unicode_escape").decode("ascii")


def caption(figure: Figure, text: str, fidelities: Iterable[str]) -> None:
    """Set the title, with the fidelity of the numbers; wrap lines that are wider than the figure.

    Names in it come from files: they are escaped, cut where they fill three lines, and never read
    as mathematics. A line is not broken between a number and its unit (`95 %`).
    """
    levels = ", ".join(sorted(set(fidelities)))
    label = f" (fidelity: {levels})" if levels else ""
    lines = plain_text(text).split("\n")
    title = figure.suptitle("\n".join(lines) + label, fontsize=10, parse_math=False)
    room = 0.98 * figure.bbox.width / title.get_window_extent().width
    if room < 1:
        fits = int(room * max(len(lines[-1] + label), *map(len, lines)))
        kept = [line if len(line) <= 3 * fits else f"{line[: 3 * fits]} ..." for line in lines]
        kept[-1] += label
        title.set_text("\n".join(part for line in kept for part in _wrapped(line, fits)))


def _wrapped(line: str, width: int) -> list[str]:
    """A line in parts of at most `width` characters, broken at blanks but not before units."""
    joined = _UNIT.sub("\\1\0", line)  # plain text has no NUL
    parts = textwrap.wrap(joined, width, break_on_hyphens=False)
    return [part.replace("\0", " ") for part in parts]


def legend_below(figure: Figure, axis: Axes, *, columns: int) -> float:
    """Draw one legend under all panels, with the entries of one; return its height as a share."""
    handles, names = axis.get_legend_handles_labels()
    across = legend_of(figure, handles, names, columns=columns, loc="lower center")
    rows = -(-len(names) // across)
    return (0.2 * rows + 0.1) / float(figure.get_figheight())


def finish(
    figure: Figure, axis: Axes, text: str, fidelities: Iterable[str], *, columns: int
) -> None:
    """Draw a caption and the legend of one panel, and make room for both."""
    caption(figure, text, fidelities)
    height = legend_below(figure, axis, columns=columns)
    figure.tight_layout(rect=(0, height, 1, 1))


def legend_of(
    figure: Figure,
    handles: Sequence[Artist],
    names: Sequence[str],
    *,
    columns: int,
    loc: Literal["lower center", "outside lower center"],
) -> int:
    """Draw a figure's legend in as many columns as fit, at most `columns`; return their number."""
    shown = [plain_text(name) for name in names]
    for across in range(max(1, min(columns, len(shown))), 0, -1):
        legend = figure.legend(handles, shown, fontsize=7.5, frameon=False, ncols=across, loc=loc)
        for text in legend.get_texts():
            text.set_parse_math(False)
        if across == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    return across


def asked_order(budgets: Sequence[str]) -> list[str]:
    """Budgets as they were requested, from the smallest; entries before shares."""
    return sorted(set(budgets), key=lambda size: (size.endswith("%"), float(size.rstrip("%"))))
