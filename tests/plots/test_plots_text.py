"""The text of a trace as a figure and as HTML, hostile tokens included, and bars of lift."""

from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

import kvsim
from apps.dashboard.html_text import kl_html, token_html
from kvsim.analysis.kept.states import TOKEN_STATES as STATES
from kvsim.analysis.kept.states import token_states
from kvsim.analysis.kept.text import retention_lift, spaced
from kvsim.analysis.live.table import kl_by_token, measure_live
from kvsim.core.outcome import Forced, Outcome
from kvsim.plots.records import lift_bars
from kvsim.plots.text import kl_text, token_text
from traces import random_trace

HOSTILE = [
    "<script>alert(1)</script>",
    "</pre>",
    "</span>",
    '" onmouseover="alert(1)',
    "' style='x",
    "<!--",
    "]]>",
    "&lt;b&gt;",
    "&#60;",
    "$x^2$",
    r"\n",
    "\n",
    "\x00",
    "\u202e",
    "\ud800",
    "漢",
    "%s{0}",
]


def made(text, n=90, name="small"):
    """A random trace of two layers whose tokens are `text` again and again, or have none."""
    words = None if text is None else [text[i % len(text)] for i in range(n)]
    return random_trace(n=n, prompt_len=30, name=name, token_text=words)


@pytest.fixture(scope="module")
def trace():
    """Tokens that try to be markup."""
    return made(HOSTILE)


@pytest.fixture(scope="module")
def record(trace):
    """A policy with events, the last of them before the end."""
    return kvsim.replay(trace, kvsim.policy("tova"), budget=20, interval=25)


class Read(HTMLParser):
    """Tags with their attributes, and the text beside the title of the span around it."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.tags, self.other, self.runs = [], [], []

    def handle_starttag(self, tag, attrs):
        """A tag of the page."""
        self.tags.append((tag, sorted(name for name, _ in attrs)))
        if tag == "span":
            self.runs.append((dict(attrs)["title"], ""))

    def handle_data(self, data):
        """Text of the span that is open."""
        title, text = self.runs[-1]
        self.runs[-1] = title, text + data

    def handle_comment(self, data):
        """What is neither tag nor text."""
        self.other.append(data)

    handle_decl = unknown_decl = handle_pi = handle_comment


def shown(token):
    """What a reader sees of a token on the page."""
    said = {"\n": "\\n\n", "\x00": "\\x00", "\u202e": "\\u202e", "\ud800": "\\ud800"}
    return said.get(token, token)


def states(record, layer, head, row):
    """The state of each position: a loop over them."""
    gone = record.evicted_at[layer, head].tolist()
    return [
        "not yet scored" if p > row else "retained" if gone[p] > row else "evicted"
        for p in range(record.n_pos)
    ]


def test_states_are_those_of_the_head_after_the_event(trace, record):
    """The layer's last event by default, or the row that is asked for."""
    last = max(record.events)

    found = token_states(trace, record)
    early = token_states(trace, record, layer=0, head=1, row=60)

    assert found.row == last < 89
    assert [STATES[code] for code in found.codes] == states(record, 1, 0, last)
    assert [STATES[code] for code in early.codes] == states(record, 0, 1, 60)
    assert len({*found.codes}) == 3


@given(st.lists(st.text(max_size=8), min_size=1, max_size=6))
def test_whatever_the_tokens_are_the_page_has_its_own_tags_alone(words):
    """Every angle bracket and quote of the page is one that the page itself wrote."""
    trace = made(words, n=40)
    record = RECORD

    page = token_html(trace, record)
    bare = token_html(made(["x"], n=40), record)

    for mark in "<>\"'":
        assert page.count(mark) == bare.count(mark)


RECORD = kvsim.replay(made(None, n=40), kvsim.policy("tova"), budget=10, interval=7)


def test_the_figure_places_every_token_in_the_style_of_its_state(trace, record):
    """In reading order, printable and escaped, never as mathematics; a newline ends a line."""
    figure = token_text(trace, record)

    (axis,) = figure.axes
    tokens = axis.texts
    assert len(tokens) == 90
    assert not any(one.get_parse_math() for one in tokens)
    words = [one.get_text() for one in tokens[: len(HOSTILE)]]
    assert words[:10] == HOSTILE[:10]
    assert words[11:16] == ["\\n", "\\x00", "\\u202e", "\\ud800", "\\u6f22"]
    colours = {"evicted": "#8a8a8a", "retained": "#0072b2", "not yet scored": "#009e73"}
    expected = [colours[state] for state in states(record, 1, 0, max(record.events))]
    assert [to_hex(one.get_color()) for one in tokens] == expected
    places = [(one.get_position()[1], one.get_position()[0]) for one in tokens]
    assert places == sorted(places)
    assert all(x + len(t.get_text()) <= 100 for t, (_, x) in zip(tokens, places, strict=True))
    assert places[12][0] > places[11][0]  # behind the newline
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    counts = [states(record, 1, 0, max(record.events)).count(name) for name in STATES]
    assert labels == [f"{n} ({c})" for n, c in zip(STATES, counts, strict=True)][:3]
    assert "layer 1, KV head 0\nafter row 79 (fidelity: open)" in figure.get_suptitle()
    figure.draw_without_rendering()


def judged(trace, *policies, seed=0):
    """A Table of made-up KL of each token, and the values [policy, R]: KL, then changes."""
    rng, count = np.random.default_rng(seed), trace.n_pos - trace.prompt_len
    records = [kvsim.replay(trace, name, budget=20, interval=25) for name in policies]
    kl = np.exp(rng.normal(-2, 2, (len(records), count)))
    same = (rng.random(kl.shape) > kl / 5).astype(float)
    forced = [
        Forced(a, a, a, b, np.zeros((trace.n_layers, count))) for a, b in zip(kl, same, strict=True)
    ]
    names = ["response_kl", "response_kl_tokens"]
    return measure_live(trace, records, map(Outcome, forced), names), kl, 1 - same


def test_tokens_of_the_response_are_coloured_by_their_kl():
    """A class each by half a decade; a frame around the first that changes, a line below others."""
    trace = made(HOSTILE, name="$x^2$ <b>")
    table, kl, changed = judged(trace, "tova", "knorm")

    figure = kl_text(trace, table)

    (axis,) = figure.axes
    (shades, frames) = ([x for x in axis.patches if x.get_fill() is fill] for fill in (True, False))
    expected = [sum(x > end for end in (0.03, 0.1, 0.3, 1, 3)) for x in kl[:, 1:].ravel()]
    colours = [to_hex(x.get_facecolor(), keep_alpha=True) for x in shades]
    by_class = dict(zip(expected, colours, strict=True))
    assert colours == [by_class[x] for x in expected]
    alphas = [int(by_class[x][-2:], 16) for x in sorted(by_class)]
    assert alphas == sorted({*alphas})
    assert len(by_class) == 6
    counts = changed[:, 1:].sum(1).astype(int)
    firsts = [int(np.flatnonzero(x[1:])[0]) + 1 for x in changed]
    edges = [shades[n * 59 + first - 1].get_xy() for n, first in enumerate(firsts)]
    assert [frame.get_xy() for frame in frames] == edges
    assert len(axis.lines) == sum(counts) - 2
    headings = [t.get_text() for t in axis.texts if t.get_fontweight() == "bold"]
    assert headings == [
        f"{name}, budget 20: {of[1:].mean():.3g} nats a token, {count} of 59 changed, "
        f"first at position {30 + first}"
        for name, of, count, first in zip(("tova", "knorm"), kl, counts, firsts, strict=True)
    ]
    of_first, words, read = kl_by_token(table, trace)["tova", "20"], spaced(HOSTILE * 6), Read()
    read.feed(kl_html(words, of_first))
    names = ("up to 0.03", "> 0.03", "> 0.1", "> 0.3", "> 1", "> 3 nats")
    assert "".join(text for _, text in read.runs) == "".join(map(shown, words[31:90]))
    assert {title for title, _ in read.runs} == {f"KL {names[x]}" for x in expected[:59]}
    assert {tag for tag, _ in read.tags} == {"pre", "span"}
    assert "fidelity: judged" in figure.get_suptitle()
    figure.draw_without_rendering()
    assert figure.bbox.width < 1280


def test_bars_are_lifts_with_wilsons_interval(monkeypatch):
    """The largest and the smallest, of strings that are frequent enough; 1 is as all."""
    trace = made(["a", "b", "<i>$", "c", "d\n", "a"])
    record = kvsim.replay(trace, kvsim.policy("tova"), budget=60, interval=10)

    monkeypatch.setattr("kvsim.plots.records._TOKENS", 1)
    figure = lift_bars(trace, record)

    (axis,) = figure.axes
    table = retention_lift(trace, record, 1, sink=4, recent=32)[[0, -1]]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx(table["lift"].to_list())
    (whiskers,) = (c for c in axis.collections if hasattr(c, "get_segments"))
    ends = np.array([[x for x, _ in part] for part in whiskers.get_segments()])
    mean = table["mean"][0]
    np.testing.assert_allclose(ends, table.select("low", "high").to_numpy() / mean)
    names = [tick.get_text() for tick in axis.get_yticklabels()]
    assert [name.split()[1] for name in names] == [f"({n})" for n in table["count"]]
    assert "share of the token kept / share of all kept" in axis.get_xlabel()
    assert axis.get_ylabel() == "token (positions)"
    assert "layer 1, all heads, with 95 % interval (fidelity: open)" in figure.get_suptitle()
    lift_bars(trace, record).draw_without_rendering()  # no token is taken for mathematics
