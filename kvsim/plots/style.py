"""Shared parts of figures: colours, panels, means over prompts, captions, legends, files."""

from __future__ import annotations

import io
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import (
    EngFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    StrMethodFormatter,
    SymmetricalLogLocator,
)

from kvsim.analysis.arrays import Floats
from kvsim.analysis.results import labelled
from kvsim.analysis.significance import FEWEST
from kvsim.analysis.summaries import Interval, averages
from kvsim.analysis.table import OF_RECORD, TYPES, columns_of
from kvsim.core.record import Record
from kvsim.errors import OutputError, PolicyError, local_path
from kvsim.files import check_output, write_file
from kvsim.schema import size_in_bytes

#: Okabe and Ito's colours (2008, jfly.uni-koeln.de/color), which colour-blind readers distinguish;
#: without the pale yellow. Black is for means and references; `_MORE` is for many series.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
_MORE = ("#332288", "#880000", "#005f5f", "#4466ee")
#: For the second and third round through the colours, so that lines differ in print too.
LINES, MARKERS = ("-", "--", ":"), ("o", "s", "^", "D", "v", "<", ">")
#: For lines that have no room for markers; dots alone are for references.
DASHES = ("-", (0, (5, 1.5)), (0, (7, 1.5, 1, 1.5)), (0, (2.5, 1)), (0, (7, 1, 1, 1, 1, 1)))
GRID = "#e6e6e6"
_UNIT = re.compile(r"(\d) (?=%)")
#: Entries that a row sees, evicted ones, and evicted ones that a row would attend to.
KEPT, UNREAD, GONE, MISSED = "#7a9cc6", "#c9d8ea", "#f0ede6", "#c8102e"
#: Selection layers and gold tokens; lines that stand back.
SELECTED, NEUTRAL = "#c8102e", "#9aa5b1"
#: Keywords of pictures whose cells are numbers: not smoothed, and stretched over the panel.
CELLS: Final[dict[str, Any]] = {"aspect": "auto", "interpolation": "nearest"}


#: Formats of files, each with the entry of its metadata that changes from run to run.
_STAMPS: Final = {"pdf": "CreationDate", "png": "Software", "svg": "Date"}


def save(figure: Figure, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a figure as PNG, SVG or PDF without a date in it: equal figures are equal files.

    overwrite: replace a file at `path`. Raises OutputError where something is there otherwise, for
    another format, or if the system refuses.
    """
    target = local_path(path, OutputError)
    form = target.suffix.lower().lstrip(".")
    if form not in _STAMPS:
        raise OutputError(f"{target} ends in {target.suffix!r}; expected .png, .svg or .pdf")
    check_output(target, overwrite=overwrite, advice="give another path, or overwrite=True")
    write_file(target, picture(figure, form), overwrite=overwrite)
    return target


def picture(figure: Figure, form: str) -> bytes:
    """Return the content of a figure's file; form: ``png``, ``svg`` or ``pdf``."""
    content = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kvsim"}):  # names inside an SVG are random otherwise
        figure.savefig(content, format=form, metadata={_STAMPS[form]: None})
    return content.getvalue()


def means_of(table: pl.DataFrame, by: Sequence[str] = (), *, needs: str) -> pl.DataFrame:
    """Return the means that have a value; PolicyError, with `needs`, where there is none."""
    means = averages(table, by).filter(pl.col("mean").is_not_null()) if table.height else table
    if not means.height:
        raise PolicyError(f"the table has no {needs}")
    return means


def record_labels(records: Sequence[Record]) -> list[str]:
    """Return a label for each record: its policy, and parameters where several of it differ."""
    rows = [columns_of(record) for record in records]
    return labelled(pl.DataFrame(rows, {x: TYPES[x] for x in OF_RECORD}))["policy"].to_list()


def series(names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Colour, line and marker for each name in turn; colours for 11 names, all for 33 differ."""
    colours = (*COLOURS, *_MORE)
    return {
        name: {
            "color": colours[place % len(colours)],
            "linestyle": LINES[again % len(LINES)],
            "marker": MARKERS[(place + again) % len(MARKERS)],
        }
        for place, name in enumerate(names)
        for again in [place // len(colours)]
    }


def mean_line(axis: Axes, places: Floats, values: Sequence[Floats], **style: object) -> Floats:
    """Draw and return the mean over prompts of values [n] over `at` [n], its interval as a band."""
    ends = Interval.of_each(list(np.stack(list(values)).T))
    lines: Floats = np.array([(end.mean, end.low, end.high) for end in ends], dtype=np.float64)
    mean, low, high = lines.T
    (line,) = axis.plot(places, mean, **style)  # type: ignore[arg-type]  # what `series` holds
    step: Literal["post"] | None = "post" if line.get_drawstyle() == "steps-post" else None
    axis.fill_between(places, low, high, color=line.get_color(), alpha=0.15, lw=0, step=step)
    return lines[:, 0]


def counted(counts: Iterable[int]) -> str:
    """Return the number of prompts behind means, in words; counts: of each mean."""
    numbers = sorted(set(counts))
    if numbers == [1]:
        return "one prompt"
    count = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    interval = ", with 95 % interval" if numbers[-1] >= FEWEST else ""
    return f"{count} prompts{interval}"


def requested_order(budgets: Sequence[str]) -> list[str]:
    """Requested budgets, from the smallest; entries, shares, then bytes."""

    def order(size: str) -> tuple[bool, bool, float, str]:
        number: float | None = size_in_bytes(size.partition("@")[0])
        number = float(size.partition("%")[0]) if number is None else number
        return not size.isdecimal(), "%" not in size, number, size

    return sorted(set(budgets), key=order)


def plain_text(text: str) -> str:
    """Escape characters that the font does not have or that do not print; keep line ends."""
    return "".join(
        c if c == "\n" or (c.isprintable() and ord(c) in _drawable()) else escaped(c) for c in text
    )


@cache
def _drawable() -> frozenset[int]:
    """Code points of the font's characters."""
    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def short_text(text: str, most: int) -> str:
    """Plain text on one line, cut to at most `most` characters."""
    shown = plain_text(text[: most + 1]).replace("\n", "\\n")
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def escaped(character: str) -> str:
    """A character as a string of Python would have it, by its number."""
    return character.encode("unicode_escape").decode("ascii")


def trace_label(traces: Iterable[str]) -> str:
    """Return the name of the only trace, or the number of traces."""
    names = list(dict.fromkeys(traces))
    return names[0] if len(names) == 1 else f"{len(names)} traces"


def panels(
    count: int,
    *,
    columns: int = 4,
    size: tuple[float, float] = (2.3, 2.1),
    share: Literal["all", "row", "none"] = "all",
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels of a size in inches, at most `columns` in a row.

    share: which of them have the same limits.
    """
    across = min(columns, count)
    rows = math.ceil(count / across)
    shape = (max(4.8, size[0] * across + 0.5), size[1] * rows + 1.1)
    figure = Figure(figsize=shape, dpi=150, layout="constrained")
    grid = figure.subplots(rows, across, squeeze=False, sharex=share, sharey=share)
    for axis in grid.flat[count:]:
        axis.remove()
    for axis in grid.flat[:count]:
        plain(axis)
    for axis in grid.flat[count - across : count]:
        axis.tick_params(labelbottom=True)
    return figure, list(grid.flat[:count])


def label(figure: Figure, across: str, up: str) -> None:
    """Name the axes that all panels share, with their units."""
    figure.supxlabel(across, fontsize=8)
    figure.supylabel(up, fontsize=8)


def is_crowded(rising: Sequence[float]) -> bool:
    """Whether half of ascending values fill a fifth of an axis, or a quarter of them a tenth."""
    places = (5, len(rising) // 2), (10, (len(rising) - 1) // 4)
    return any(0 < times * rising[place] < rising[-1] for times, place in places if rising)


def log_if_crowded(
    axis: Axes, values: Iterable[float], *, across: bool = False, share: bool = False
) -> None:
    """Make the vertical axis, or that `across`, logarithmic where values are `is_crowded`.

    It is linear below a thousandth of the largest value. share: values are shares, and the axis is
    linear.
    """
    rising = sorted(values)
    if share or not is_crowded(rising):
        return
    name = "x" if across else "y"
    least, scale = rising[-1] / 1000, getattr(axis, f"set_{name}scale")
    if rising[0] >= least:
        scale("log")
        log_ticks(getattr(axis, f"{name}axis"))
    else:
        scale("symlog", linthresh=least)
        getattr(axis, f"set_{name}lim")(min(rising[0], -least / 2))
        locator = SymmetricalLogLocator(linthresh=least, base=10, subs=_SUBS)
        log_ticks(getattr(axis, f"{name}axis"), locator)


_SUBS = (1.0, 2.0, 5.0)


def log_ticks(axis: Axis, locator: Locator | None = None, unit: str = "") -> None:
    """Put ticks of a logarithmic axis at 1, 2, 5, 10 and so on, as full numbers."""
    axis.set_major_locator(locator or LogLocator(subs=_SUBS))
    axis.set_major_formatter(EngFormatter(unit=unit) if unit else StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def single_panel(width: float, height: float) -> tuple[Figure, Axes]:
    """Build a figure of constrained layout with one panel, in inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    return figure, figure.subplots()


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
    figure: Figure, mappable: ScalarMappable, axes: Axes | Sequence[Axes], label: str, **layout: Any
) -> Axes:
    """Draw a colour bar beside panels and return its axes."""
    bar = figure.colorbar(mappable, ax=axes, **layout)
    bar.set_label(label, fontsize=7.5)
    bar.ax.tick_params(labelsize=7)
    return bar.ax


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
    joined = _UNIT.sub("\\1\0", line)  # plain text has no NUL
    parts = textwrap.wrap(joined, width, break_on_hyphens=False)
    return [part.replace("\0", " ") for part in parts]


def finish(
    figure: Figure, axis: Axes, text: str, fidelities: Iterable[str], *, columns: int
) -> None:
    """Draw a caption, and the legend of one panel below all, each name once."""
    caption(figure, text, fidelities)
    handles, names = axis.get_legend_handles_labels()
    legend_of(figure, dict(zip(names, handles, strict=True)), columns=columns)


def legend_of(figure: Figure, handles: Mapping[str, Artist], *, columns: int) -> None:
    """Draw a figure's legend in as many columns as fit, at most `columns`."""
    shown = [plain_text(name) for name in handles]
    loc = "outside lower center" if figure.get_layout_engine() else "lower center"
    look: dict[str, Any] = {"fontsize": 7.5, "frameon": False, "loc": loc}
    for across in range(max(1, min(columns, len(shown))), 0, -1):
        legend = figure.legend(list(handles.values()), shown, ncols=across, **look)
        for text in legend.get_texts():
            text.set_parse_math(False)
        if across == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()


def draw_in_notebooks() -> None:
    """Let a notebook show figures as pictures, as after an import of pyplot."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):
        return
    png = shell.display_formatter.formatters["image/png"]
    if Figure not in png.type_printers:
        png.for_type(Figure, _shown)


def _shown(figure: Figure) -> tuple[bytes, dict[str, int]]:
    pixels = (96 * figure.get_size_inches()).round().astype(int).tolist()
    return picture(figure, "png"), dict(zip(("width", "height"), pixels, strict=True))


def cell_means(
    table: pl.DataFrame, rows: Sequence[str], column: str, columns: Sequence[Any], value: str
) -> Floats:
    """Means of `value` by the columns `rows`, in their order, and by `column`; NaN if missing."""
    means = table.group_by(*rows, column, maintain_order=True).agg(pl.col(value).mean())
    names = {name: place for place, name in enumerate(dict.fromkeys(means.select(rows).rows()))}
    out = np.full((len(names), len(columns)), np.nan)
    for *name, at, mean in means.drop_nulls(value).iter_rows():
        out[names[tuple(name)], columns.index(at)] = mean
    return out
