"""What all figures share: captions, legends and names that come from files."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from kvsim.plots.style import (
    caption,
    legend_of,
    plain_text,
)


def lines(names):
    """A figure of 5 by 3 inches with a line for each name."""
    figure = Figure(figsize=(5, 3))
    axis = figure.subplots()
    for name in names:
        axis.plot([0, 1], label=name)
    return figure, axis


def widest(figure):
    """The share of the figure's width that its title and its legends take at most."""
    figure.draw_without_rendering()
    parts = [figure._suptitle] if figure._suptitle else []
    return max(one.get_window_extent().width for one in (*parts, *figure.legends)) / (
        figure.bbox.width
    )


@pytest.mark.parametrize(
    "name",
    ["x" * 5000, "walk " * 200, "a" * 90, "short", "$\\frac{", "\x1b[31m\u202e\ud800漢\x00", ""],
)
def test_the_caption_fits_and_keeps_its_fidelity(name):
    """Long lines go on below, endless ones are cut, and the label stays."""
    figure = Figure(figsize=(5, 3))

    caption(figure, f"{name}: layer 0\nsecond line", ["open", "exact", "open"])

    said = figure.get_suptitle()
    assert said.replace("\n", " ").endswith("second line (fidelity: exact, open)")
    assert said.isascii()
    assert said.replace("\n", "").isprintable()
    assert widest(figure) <= 1 + 1 / 500  # a pixel
    assert said.count("\n") < 10
    assert not figure._suptitle.get_parse_math()


@pytest.mark.parametrize("count", [1, 3, 11])
@pytest.mark.parametrize("size", [4, 24, 200])
def test_the_legend_fits_if_any_number_of_columns_does(count, size):
    """As many as requested, or as fit, and one at least; names are no mathematics."""
    names = [f"{i} $x" + "w" * size for i in range(count)]
    figure, axis = lines(names)

    legend_of(figure, dict(zip(names, axis.lines, strict=True)), columns=5)

    (legend,) = figure.legends
    across = legend._ncols
    assert [text.get_text() for text in legend.get_texts()] == names
    assert across == count or (count, size) not in {(1, 4), (3, 4)}
    if size < 200:
        assert widest(figure) <= 1
    else:
        assert across == 1


@given(st.text())
@example("Straße ist “schön”, 你好")
def test_plain_text_is_printable_and_says_what_it_was(text):
    """Characters of the font and line ends as they are, everything else by its number."""
    shown = plain_text(text)
    drawn = get_font(findfont(FontProperties())).get_charmap()

    assert shown.replace("\n", "").isprintable()
    assert all(c == "\n" or ord(c) in drawn for c in shown)
    kept = "".join(c for c in text if c == "\n" or (c.isprintable() and ord(c) in drawn))
    assert "Straße" not in text or ("Straße ist “schön”, " in shown and "你" not in shown)
    if kept == text:
        assert shown == text
    else:
        assert np.char.count(shown, "\\") > kept.count("\\")
