"""What the figures share: colours that everyone tells apart, lines by name, captions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: Okabe and Ito's colours (2008, jfly.uni-koeln.de/color), which readers without red or green tell
#: apart; the pale yellow is left out, and black is for means and references.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
#: For the second and third round through the colours, so that lines differ in print too.
LINES, MARKERS = ("-", "--", ":"), ("o", "s", "^", "D", "v", "<", ">")
GRID = "#e6e6e6"


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


def plain(axis: Axes) -> None:
    """Small ticks and a faint grid behind the data."""
    axis.tick_params(labelsize=7)
    axis.grid(color=GRID, linewidth=0.5)
    axis.set_axisbelow(True)


def caption(figure: Figure, text: str, fidelities: Iterable[str]) -> None:
    """The title, with how far the numbers can be trusted."""
    known = ", ".join(sorted(set(fidelities)))
    figure.suptitle(f"{text} (fidelity: {known})" if known else text, fontsize=10)


def legend_below(figure: Figure, axis: Axes, *, columns: int) -> float:
    """One legend under all panels, with the entries of one; returns the height that it takes."""
    handles, names = axis.get_legend_handles_labels()
    rows = -(-len(names) // columns)
    figure.legend(handles, names, fontsize=7.5, frameon=False, ncols=columns, loc="lower center")
    return (0.2 * rows + 0.1) / float(figure.get_figheight())


def asked_order(budgets: Sequence[str]) -> list[str]:
    """Budgets as they were asked for, from the smallest; entries before shares."""
    return sorted(set(budgets), key=lambda one: (one.endswith("%"), float(one.rstrip("%"))))
