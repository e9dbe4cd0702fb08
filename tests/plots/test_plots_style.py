"""What all figures share: captions, legends and names that come from files."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from kvsim.plots.style import (
    Panels,
    bare_series,
    caption,
    clip_far,
    far_off,
    finish,
    legend_below,
    plain_text,
    series,
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
    ("values", "most"),
    [
        ([0.1, 0.2, 0.15, 1.9], 0.2),
        ([0.1, 0.2, 1.9, 2.0], 0.2),
        ([0.1, 1.7, 1.8, 1.9], None),  # it is the other one that differs
        ([0.1, 0.2, 0.5, 1.4], None),
        ([0.0, 0.0, 0.0, 0.3], None),
        ([0.2, None, float("nan"), 0.9], 0.2),
        ([0.4], None),
        ([], None),
    ],
)
def test_values_are_far_off_above_a_gap(values, most):
    """More than three times the next smaller one, which is the largest of at least half of all."""
    assert far_off(values) == most


def test_a_line_that_is_far_off_is_named_at_the_edge():
    """The axis ends above the others, and the text has the value."""
    _, axis = lines(["a", "b"])
    points = [("a", 0, 0.1), ("a", 1, 0.2), ("b", 0, 0.15), ("b", 1, 7.0)]

    clip_far(axis, points, series(["a", "b"]), ends=[0.25, 9.0])

    low, high = axis.get_ylim()
    assert low < 0.1
    assert 0.25 < high < 0.3
    assert [text.get_text() for text in axis.texts] == ["above: b 7"]


@pytest.mark.parametrize("share", [False, True])
def test_what_is_far_off_in_most_lines_stays_in_view(share):
    """A smaller budget, at which every policy loses more, is no line far off."""
    _, axis = lines(["a", "b"])
    points = [("a", 0, 0.3), ("a", 1, 0.07), ("b", 0, 0.29), ("b", 1, 0.07)]
    axis.plot([value for _, _, value in points])

    clip_far(axis, points, series(["a", "b"]), share=share)

    assert axis.get_ylim()[1] > 0.3
    assert not axis.texts


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


@pytest.mark.parametrize("width", range(3, 9))
def test_a_caption_is_not_broken_before_a_unit(width):
    """`95 %` stays on one line, whatever the width of the figure."""
    figure = Figure(figsize=(width, 3))
    text = "Where kept entries lie: layer 11, KV head 3, mean over 12 prompts, with 95 % interval"

    caption(figure, text, ["exact", "open"])

    said = figure.get_suptitle()
    assert "95 %" in said
    assert widest(figure) <= 1


@pytest.mark.parametrize("count", [1, 3, 11])
@pytest.mark.parametrize("size", [4, 24, 200])
def test_the_legend_fits_if_any_number_of_columns_does(count, size):
    """As many as requested, or as fit, and one at least; names are no mathematics."""
    names = [f"{i} $x" + "w" * size for i in range(count)]
    figure, axis = lines(names)

    height = legend_below(figure, axis, columns=5)

    (legend,) = figure.legends
    across = legend._ncols
    assert [text.get_text() for text in legend.get_texts()] == names
    assert height == pytest.approx((0.2 * -(-count // across) + 0.1) / 3)
    assert across == count or (count, size) not in {(1, 4), (3, 4)}
    if size < 200:
        assert widest(figure) <= 1
    else:
        assert across == 1


def test_panels_share_one_legend_that_fits():
    """With each name once, below all panels."""
    panels = Panels(2)
    for axis in panels.axes:
        for i in range(6):
            axis.plot([0, 1], label=f"a rather long name of a line {i % 3}")

    finish(panels.figure, panels.axes[0], "two panels", [], columns=6)

    assert len(panels.figure.legends[0].get_texts()) == 3
    assert widest(panels.figure) <= 1


def test_many_series_differ_in_colour():
    """Eleven have colours of their own, and 33 a colour and a line that no other has."""
    styles = list(series(map(str, range(33))).values())

    assert len({style["color"] for style in styles[:11]}) == 11
    assert len({(style["color"], style["linestyle"]) for style in styles}) == 33


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([0.1, 0.1, 0.12, 0.15, 0.3, 0.6, 0.9], "log"),  # one line presses the others down
        ([0, 0.1, 0.12, 0.15, 0.3, 0.6, 0.9], "symlog"),  # 0 has a place too
        ([0.02, 0.05, 0.1, 0.2, 0.5, 0.6, 0.8, 0.9], "log"),  # few, and yet a decade
        ([0.3, 0.4, 0.6, 0.9], "linear"),
        ([0.1, 0.1, 0.1, 0.9], "linear"),  # clipped
        ([0, 0, 0, 0.9], "linear"),
    ],
)
def test_values_that_others_press_down_have_a_logarithmic_axis(values, scale):
    """Unless they are shares; every value is in view, and ticks are full numbers."""
    figure, axis = lines([])
    axis.plot(values)
    points = [("a", place, value) for place, value in enumerate(values)]
    clip_far(axis, points, series(["a"]))

    assert axis.get_yscale() == scale
    if scale != "linear":
        low, high = axis.get_ylim()
        figure.draw_without_rendering()
        texts = [text.get_text() for text in axis.get_yticklabels()]
        assert low <= min(values) < max(values) <= high
        assert {"0.1", "0.2", "0.5"} <= set(texts)
        assert not any(
            "-" in text or "e" in text
            for text, at in zip(texts, axis.get_yticks(), strict=True)
            if low <= at <= high
        )
        figure, axis = lines([])
        clip_far(axis, points, series(["a"]), share=True)
        assert axis.get_yscale() == "linear"


def test_lines_without_markers_differ_in_dashes():
    """All five that the dashes tell apart, and in colours as other figures."""
    names = [*map(str, range(5))]

    bare, marked = bare_series(names), series(names)

    assert len({str(one["linestyle"]) for one in bare.values()}) == 5
    assert {one["marker"] for one in bare.values()} == {""}
    assert [one["color"] for one in bare.values()] == [one["color"] for one in marked.values()]


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
