"""The View: what a policy sees of the live entries, whole, ragged, and after evictions."""

import pytest
import torch

import kvsim
from kvsim.core import view as view_module
from kvsim.core.entries import Entries
from kvsim.core.view import Setting, View
from kvsim.engine.source import TraceSource
from traces import random_trace


@pytest.fixture
def trace():
    """One layer, two KV heads, groups of three."""
    torch.manual_seed(0)
    rope = kvsim.Rope.default(8)
    plain = torch.randn(1, 6, 20, 8, dtype=torch.float64)
    q, meta = rope.rotate(plain, torch.arange(20)), {"plain": plain.tolist()}
    return random_trace(layers=1, group=3, n=20, dtype=torch.float64, prompt_len=5, q=q, meta=meta)


def make_view(trace, *, row=14, since=-1, keep=None):
    """The View after `row`; keep bool [1, 2, row + 1] says which entries are still there."""
    source = TraceSource(trace, [0], torch.device("cpu"))
    entries = Entries(1, 2, {"acc": 0.5}, like=source.keys)
    entries.append(0, row + 1)
    if keep is not None:
        entries.compress(keep)
    return View(
        source,
        entries,
        Setting(budget=4, prompt_len=5, interval=1, n_layers=1),
        row=row,
        since=torch.tensor([since]),
        layers=torch.tensor([0]),
    )


@pytest.fixture
def ragged():
    """Head 0 holds five entries and head 1 three."""
    keep = torch.zeros(1, 2, 15, dtype=torch.bool)
    keep[0, 0, [0, 3, 9, 13, 14]] = True
    keep[0, 1, [2, 13, 14]] = True
    return keep


def test_ragged_heads_are_padded_on_the_left(trace, ragged):
    """Pads have position -1, are not live, and their keys and values are exactly 0."""
    view = make_view(trace, keep=ragged)

    assert view.pos.tolist() == [[[0, 3, 9, 13, 14], [-1, -1, 2, 13, 14]]]
    assert view.live.tolist() == [[[True] * 5, [False, False, True, True, True]]]
    assert view.count.tolist() == [[5, 3]]
    for name, stored in (("keys", trace.read("k")), ("values", trace.read("v"))):
        seen = getattr(view, name)
        assert torch.equal(seen[0, 0], stored[0, 0, [0, 3, 9, 13, 14]])
        assert torch.equal(seen[0, 1, 2:], stored[0, 1, [2, 13, 14]])
        assert bool((seen[0, 1, :2] == 0).all())


def test_columns_go_with_their_entries(trace, ragged):
    """A column starts at its initial value and is gathered with the entries."""
    view = make_view(trace, keep=ragged)

    assert view["acc"].shape == (1, 2, 5)
    assert bool((view["acc"][view.live] == 0.5).all())


@pytest.mark.parametrize("last", [1, 4, 15])
def test_attention_of_a_window_is_the_softmax_over_live_entries_up_to_each_row(trace, ragged, last):
    """Each row at its own position; pads and later entries have weight 0; blind rows are all 0."""
    attention = make_view(trace, keep=ragged).attn(last)

    assert attention.shape == (1, 2, 3, last, 5)
    for head, held in enumerate([[0, 3, 9, 13, 14], [2, 13, 14]]):
        for g in range(3):
            for i, row in enumerate(range(15 - last, 15)):
                seen = [p for p in held if p <= row]
                expected = torch.zeros(5, dtype=torch.float64)
                if seen:
                    z = (
                        trace.read("k")[0, head, seen]
                        @ trace.read("q")[0, head * 3 + g, row]
                        * trace.formulas[0].scale
                    )
                    first = 5 - len(held)
                    expected[first : first + len(seen)] = z.softmax(0)
                torch.testing.assert_close(attention[0, head, g, i], expected)


def test_a_larger_window_answers_a_smaller_one(trace, monkeypatch):
    """Attention of an event is computed once."""
    view = make_view(trace)
    whole = view.attn(8)
    monkeypatch.setattr(View, "_weights_of", lambda *_: pytest.fail("computed again"))

    assert torch.equal(view.attn(3), whole[..., -3:, :])
    assert torch.equal(view.attn(8, group="max"), whole.amax(2))
    assert torch.equal(view.attn(3, group="mean"), whole[..., -3:, :].mean(2))


@pytest.mark.parametrize("bytes_", [1, 1 << 20])
def test_received_adds_up_attention_of_all_rows_since_the_last_event(trace, monkeypatch, bytes_):
    """Summed over rows and group, whatever the size of a block of rows."""
    monkeypatch.setattr(view_module, "LOGIT_BYTES", bytes_)

    for since in (-1, 6, 13):
        view = make_view(trace, since=since)
        expected = view.attn(14 - since).sum((2, 3))
        torch.testing.assert_close(make_view(trace, since=since).received(), expected)


def test_received_after_an_eviction_counts_the_retained_and_the_new(trace):
    """The retained entries and the new ones, each row over what was there for it."""
    keep = torch.ones(1, 2, 15, dtype=torch.bool)
    keep[0, 0, [1, 2]] = keep[0, 1, [0, 5]] = False
    view = make_view(trace, since=7, keep=keep)

    torch.testing.assert_close(view.received(), view.attn(7).sum((2, 3)))


def test_queries_are_those_of_the_last_rows_rotated_and_not(trace):
    """A window never reaches beyond the first row."""
    view = make_view(trace)
    plain = torch.tensor(trace.meta["plain"], dtype=torch.float64)

    assert torch.equal(view.queries(4).flatten(1, 2), trace.read("q")[:, :, 11:15])
    assert view.queries(100).shape[3] == 15
    torch.testing.assert_close(
        view.queries(range(11, 15), rotated=False).flatten(1, 2), plain[:, :, 11:15]
    )
