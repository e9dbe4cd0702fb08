"""The page of retention: its numbers are those of kvsim, every control works, tokens are text."""

import json
from itertools import pairwise

import numpy as np
import pytest

import kvsim
from kvsim.samples import sample_trace

FIRST = {"layer": "1", "head": "2", "budget": "96", "interval": "64"}


@pytest.fixture
def page(opened, folder):
    """The page of the sample, or of what its link says."""

    def run(**link):
        return opened(folder, "retention", **{"trace": "sample.zarr", **link})

    return run


def texts(app):
    """The texts by state."""
    return [one.proto.body for one in app.get("html") if one.proto.body.startswith("<pre")]


def said(app):
    """The sentences, in one text."""
    return " ".join(one.value for one in app.text)


def spoken(app):
    """All that may hold markup."""
    kinds = ("markdown", "caption", "header", "subheader", "info", "warning", "error")
    return [one.value for kind in kinds for one in app.get(kind)]


def test_text_has_the_states_of_the_event(page):
    """Runs of tokens by what became of them, and how many there are, by a plain loop."""
    app = page(**FIRST, event="353", beside="none")
    trace = kvsim.open_trace(sample_trace())
    record = kvsim.replay(trace, kvsim.policy("tova"), 96, interval=64, layers=[1])

    (text,) = texts(app)
    weights = trace.attention(1, slice(0, 472))[4:6].amax(0).tolist()
    gone = record.evicted_at[0, 2].tolist()
    states = [
        "later" if p > 353
        else "retained" if gone[p] > 353
        else "missed" if any(weights[row][p] >= 0.05 for row in range(gone[p] + 1, 472))
        else "evicted"
        for p in range(472)
    ]  # fmt: skip
    changes = 1 + sum(a != b for a, b in pairwise(states))
    assert text.count("<span") == changes
    assert text.count('title="not yet scored"') == 1
    missed = states.count("missed")
    assert 0 < missed < 258
    assert f"tova keeps 96 of 354 tokens and misses {missed} that" in said(app)


def test_sparse_attention_shows_what_rows_read_of_what_is_held(page):
    """Map, sentence and text of the row behind the chosen one follow from the account."""
    link = {
        "policy": "full",
        "policy_reader": "quest",
        "policy_quantizer": "int8",
        "beside": "none",
    }
    app = page(**FIRST, **link, set="dense_layers=0", event="400")
    trace = kvsim.open_trace(sample_trace())
    policy = kvsim.policy("quest+int8", dense_layers=0)
    record = kvsim.replay(trace, policy, 96, interval=64, prefill=True, layers=[1])
    bits = np.unpackbits(record.reads.bits[0, 4:6, 401 - record.prompt_len], axis=-1).any(0)
    read = np.repeat(bits, 16)[:402]

    assert not app.exception
    assert [one.value for one in app.subheader] == ["quest+int8", "Text"]
    assert len(app.get("plotly_chart")) == 1, "no map of events"
    unread = int((~read[:401]).sum())
    assert 0 < unread < 401
    assert f"quest+int8 keeps 401 of 401 tokens, of which the next row does not read {unread}," in (
        said(app)
    )
    assert texts(app)[0].count('title="held, not read"') == np.count_nonzero(
        np.diff((~read[:401]).astype(int), prepend=0) == 1
    )

    both = page(**FIRST, policy_reader="quest", beside="none", set="dense_layers=0", event="353")
    assert len(both.get("plotly_chart")) == 2
    assert "quest keeps 96 of 354 tokens" in said(both)


def test_typed_parameters_reach_the_policies_that_have_them(page):
    """Beside what fits the trace; what nobody has, and what could name a file, is refused."""
    app = page(**FIRST, set="min_quota=3 window=8")
    shown = {key: value for one in app.json for key, value in json.loads(one.value).items()}
    assert (shown["min_quota"], shown["window"]) == (3, 8)
    assert shown["max_segment"] == kvsim.policy("ams@scaled").params["max_segment"]
    assert "max_segment=48 instead of 256" in said(app)
    for typed, reason in (
        ("nonsense=1", "has a parameter 'nonsense'"),
        ("window", "expected KEY=VALUE"),
        ("calibration=/etc/passwd", "cannot be set here"),
        ("scorer.calibration=/etc/passwd", "cannot be set here"),
    ):
        app.text_input(key="set").set_value(typed)
        app.run()
        assert not app.exception
        assert app.error[0].value == "The parameters cannot be read."
        assert reason in app.text[0].value


def test_a_link_names_no_policy_beyond_the_catalogue(page):
    """Nothing is imported for a link."""
    app = page(policy="os:getcwd", beside="x+y")

    assert not app.exception
    assert app.selectbox(key="policy").value == "tova"
    assert app.selectbox(key="beside").value == "ams"
