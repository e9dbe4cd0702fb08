"""Figures without ticks and without the search for a layout."""

from collections.abc import Callable


def leave_out_layouts(replace: Callable[[object, str, object], None]) -> None:
    """Draw what figures show once and where it is, without the ticks, which take most of the time.

    replace: `setattr`, or what undoes it later. matplotlib draws twice, the first time for the
    layout alone, with a renderer whose methods do nothing, and a panel has hundreds of parts of
    ticks, which it also measures to move the titles.
    """
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    savefig, draw = Figure.savefig, Figure.draw

    def save(figure, *arguments, **options):
        figure.set_layout_engine("none")
        savefig(figure, *arguments, **options)

    def draw_once(figure, renderer):
        if "open_group" not in vars(renderer):
            draw(figure, renderer)

    def nothing(*_, **__):
        pass

    replace(Figure, "savefig", save)
    replace(Figure, "draw", draw_once)
    replace(Figure, "tight_layout", nothing)
    replace(Axis, "draw", nothing)
    replace(Axes, "_update_title_position", nothing)
