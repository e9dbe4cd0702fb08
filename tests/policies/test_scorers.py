"""Calibration, CriticalKV around other scorers, and pooled neighbours."""

import math
from dataclasses import replace

import pytest
import torch

import kvsim
from kvsim.core.entries import Entries
from kvsim.core.parts import by_query_head
from kvsim.core.view import Setting, View
from kvsim.engine.source import TraceSource
from kvsim.errors import PolicyError
from kvsim.policies.calibration import Calibrated
from kvsim.policies.qfilter import QFilter
from kvsim.policies.triattention import TriAttention
from kvsim.policies.window import over_heads, smooth
from kvsim.schema import NEVER

LAYERS, HEADS, GROUP, N, DIM, HIDDEN = 2, 2, 3, 40, 8, 5
PROMPT = 12


def make_trace(seed=0, *, rope=None, **arrays):
    """Two layers, two KV heads, groups of three, float64; `arrays` replace what is drawn."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    drawn = {
        "q": normal(LAYERS, HEADS * GROUP, N, DIM) + 0.5,
        "k": normal(LAYERS, HEADS, N, DIM),
        "v": normal(LAYERS, HEADS, N, DIM),
        "o_proj": normal(LAYERS, HEADS * GROUP, DIM, HIDDEN),
    } | arrays
    return kvsim.Trace.from_arrays(
        **drawn,
        prompt_len=PROMPT,
        rope=rope or kvsim.Rope((1.0, 0.3, 0.01), attention_scaling=1.2),
        name=f"seed{seed}",
    )


def view_of(trace, row=N - 5, *, keep=None, budget=6, interval=8, clairvoyant=False):
    """The View after `row`; keep bool [layers, heads, row + 1] says what is still there."""
    source = TraceSource(trace, range(trace.n_layers), torch.device("cpu"))
    columns = {"acc": 0.0, "projected": math.nan}
    entries = Entries(trace.n_layers, trace.n_heads, columns, like=source.keys)
    entries.append(0, row + 1)
    if keep is not None:
        entries.compress(keep)
    return View(
        source,
        entries,
        Setting(
            budget=budget,
            prompt_len=trace.prompt_len,
            interval=interval,
            n_layers=trace.n_layers,
            clairvoyant=clairvoyant,
        ),
        row=row,
        since=torch.full((trace.n_layers,), -1),
        layers=torch.arange(trace.n_layers),
    )


def scores(scorer, view):
    """Values of the scorer, float64, NaN on pads."""
    answer = scorer.score(view)
    values = answer if isinstance(answer, torch.Tensor) else answer.values
    assert values.shape == view.pos.shape
    assert bool(values[view.live].isfinite().all())
    return values.masked_fill(~view.live, torch.nan)


def test_calibrations_compare_and_show_by_what_they_are(tmp_path):
    """A prefix by its text, a trace by its name and content, wherever it lies."""
    trace = make_trace(1)
    stored = QFilter(kvsim.save_trace(trace, tmp_path / "one.zarr"))

    assert QFilter("prefix:64") == QFilter("prefix:064") != QFilter("prefix:65")
    assert repr(QFilter("prefix:64")) == "QFilter(calibration='prefix:64')"
    assert QFilter(trace) == stored == QFilter(stored.calibration)
    assert hash(QFilter(trace)) == hash(stored)
    assert QFilter(trace) != QFilter(make_trace(2))
    assert repr(stored) == f"QFilter(calibration='seed1@{trace.digest[7:19]}')"


@pytest.mark.parametrize("held", [1, 1 << 24])
@pytest.mark.parametrize("scorer", [QFilter, TriAttention])
def test_prefix_oracle_and_trace_are_the_same_queries(scorer, held, monkeypatch):
    """The whole trace as a prefix, looked at ahead, or given as another trace, scores alike."""
    monkeypatch.setattr("kvsim.policies.calibration.LOGIT_BYTES", held)  # a row at a time, or all
    trace = make_trace()
    ahead = scores(scorer("oracle"), view_of(trace, clairvoyant=True))

    other = scores(scorer(trace), view_of(trace))
    last = N - 1
    prefix = scores(scorer(f"prefix:{N}"), view_of(trace, row=last))
    torch.testing.assert_close(other, ahead)
    torch.testing.assert_close(prefix, scores(scorer(trace), view_of(trace, row=last)))
    assert not torch.allclose(scores(scorer("prefix:3"), view_of(trace)), ahead)


def test_another_trace_serves_one_set_per_query_head_and_a_part_of_the_layers():
    """Filters go by query head and by the layer's place in the trace."""
    trace, other = make_trace(), make_trace(1)
    each = scores(QFilter(other), view_of(by_query_head(trace)))
    keys = trace.read("k").repeat_interleave(GROUP, dim=1)[:, :, : N - 4]
    filters = QFilter(other).learned(view_of(trace))[0].flatten(1, 2)
    torch.testing.assert_close(each, (keys @ filters.unsqueeze(-1)).squeeze(-1))

    source = TraceSource(trace, [1], torch.device("cpu"))
    entries = Entries(1, HEADS, {}, like=source.keys)
    entries.append(0, 10)
    setting = Setting(budget=5, prompt_len=5, interval=1, n_layers=LAYERS)
    view = View(source, entries, setting, row=9, since=torch.tensor([-1]), layers=torch.tensor([1]))
    expected = scores(QFilter(other), view_of(trace, row=9))[1:]
    torch.testing.assert_close(scores(QFilter(other), view), expected)


class _Quantile(Calibrated):
    """A scorer of the user's own, whose parameter decides about what it learns."""

    quantile: float = 0.5
    rotated = True

    def learn(self, blocks, rope):
        return (torch.cat(list(blocks), dim=-2).quantile(self.quantile, dim=-2),)

    def score(self, view):
        return (view.keys * self.learned(view)[0].mean(2).unsqueeze(-2)).sum(-1)


def test_scorers_that_share_a_calibration_learn_what_is_their_own():
    """One with another parameter does not take what the first has learned."""
    low = _Quantile(calibration=make_trace(1), quantile=0.1)
    scores(low, view_of(make_trace()))
    high = replace(low, quantile=0.9)
    alone = _Quantile(calibration=make_trace(1), quantile=0.9)

    assert torch.equal(scores(high, view_of(make_trace())), scores(alone, view_of(make_trace())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": 1}, r"seed3@.* is of a model \(1 layers.* of a model \(2 layers"),
        ({"q": (slice(None), slice(0, 4))}, "of 4 query heads and .* of 6 query heads"),
        ({"q": (..., slice(0, 6))}, "the same model"),
        ({"rope": kvsim.Rope((1.0,))}, "the same model"),
        ({"layer_ids": (1, 2)}, "the same model"),
    ],
)
def test_a_trace_of_another_model_is_refused(change, message):
    """With both models, and before any work."""
    arrays = {name: make_trace(3).read(name) for name in "qkv"}
    index = change.get("q")
    if index == 1:
        arrays = {name: array[:1] for name, array in arrays.items()}
    elif index is not None and index[0] is ...:
        arrays = {name: array[index] for name, array in arrays.items()}
    elif index is not None:
        arrays["q"] = arrays["q"][index]
    if "layer_ids" in change:
        arrays |= change
    other = make_trace(3, rope=change.get("rope"), **arrays, o_proj=None)

    with pytest.raises(PolicyError, match=message):
        kvsim.replay(make_trace(), kvsim.policy("qfilter", calibration=other), budget=4)


@pytest.mark.parametrize("group", [3, 7, 8, 14])
def test_neighbours_that_a_max_pool_makes_equal_stay_equal(group):
    """Many heads to add up, and no rounding between entries that are equal in all of them."""
    unequal = 0
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        pooled = smooth(torch.rand(2, 2, group, 101 + seed, generator=draw), "max", 9)
        same = (pooled[..., 1:] == pooled[..., :-1]).all(2)
        total = over_heads(pooled, 2)

        assert same.any()
        assert (total[..., 1:] == total[..., :-1])[same].all()
        assert torch.allclose(total, pooled.sum(2), rtol=1e-6)
        plain = pooled.sum(2)
        unequal += int((plain[..., 1:] != plain[..., :-1])[same].sum())
    if group == 7:  # what a plain sum does
        assert unequal


@pytest.mark.parametrize(("budget", "floor", "safe"), [(8, 0.2, 1), (9, 0.2, 1), (7, 0.5, 3)])
def test_the_safe_share_of_adakv_is_rounded_down(budget, floor, safe):
    """A head that wins nothing keeps its share, also where that is half an entry less or more."""
    k = torch.ones(1, 2, 20, 4)
    k[:, 1] *= 100  # knorm keeps the smallest norms
    k += torch.rand(k.shape, generator=torch.Generator().manual_seed(0)) / 100
    trace = kvsim.Trace.from_arrays(k, k, k, prompt_len=20, rope=kvsim.Rope(torch.ones(2)))
    record = kvsim.replay(trace, kvsim.policy("adakv+knorm", floor=floor), budget, prefill=True)

    assert (record.evicted_at[0] == NEVER).sum(-1).tolist() == [2 * budget - safe, safe]
