"""Figures without the search for a layout."""

from __future__ import annotations

from collections.abc import Callable


def leave_out_layouts(replace: Callable[[object, str, object], None]) -> None:
    """Draw figures once and where their parts are, which takes half of the time.

    replace: `setattr`, or what undoes it later. matplotlib draws twice, the first time for the
    layout alone, with a renderer whose methods do nothing.
    """
    from matplotlib.figure import Figure

    savefig, draw = Figure.savefig, Figure.draw

    def save(figure, *arguments, **options):
        figure.set_layout_engine("none")
        savefig(figure, *arguments, **options)

    def draw_once(figure, renderer):
        if "open_group" not in vars(renderer):
            draw(figure, renderer)

    replace(Figure, "savefig", save)
    replace(Figure, "draw", draw_once)
