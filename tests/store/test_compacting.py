"""Traces without the rows long before the response: what still is there, and all that reads it."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from compacting import compacted

import kvsim
from kvsim.analysis.measuring import available
from kvsim.analysis.registry import METRICS
from kvsim.core.attention import Formula, Rope
from kvsim.core.parts import loaded
from kvsim.errors import NeedsError, TraceError
from kvsim.policies import ACCESS, CATALOGUE, names
from kvsim.policies.pyramidkv import Pyramid
from kvsim.store.reader import open_trace
from kvsim.store.verification import describe, verify
from traces import short_lengths

PROMPT, CONTEXT, TOKENS, STAY = 850, 840, 890, 300
LEFT_OUT = (256, 512)

#: Policies that read more rows of the prompt than stay; `docs/record.md` names them.
REFUSED = {"infllm", "infllm@release", "compactor", "compactor@attention"}

#: Metrics that read them.
REFUSED_METRICS = {
    *("window_overlap", "expectation", "expectation_steps"),
    *("projection_gap", "normal_distance"),
}

#: One policy for each way to read the prompt; all others are deep.
FEW = ("h2o", "snapkv", "expected_attention", "kvzip", "infllm", "quest", "ams+expected_attention")

#: Compositions, whose outer part reads what the inner one scores by.
COMPOSED = ("adakv+h2o", "criticalkv+h2o", "ams+expected_attention", "h2o+kivi", "fastkv+snapkv")


@functools.cache
def whole(context=None, dtype=torch.float32):
    """A random trace with everything that a policy or a metric may read."""
    layers, qheads, heads, dim, rows = 2, 4, 2, 8, context or PROMPT
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    probe = {"kind": "repeat", "chunks": [[0, rows, rows]], "tokens": [7] * rows}
    return kvsim.Trace.from_arrays(
        1.5 * draw(layers, qheads, TOKENS, dim) + 0.4,
        draw(layers, heads, TOKENS, dim) + 0.3,
        draw(layers, heads, TOKENS, dim),
        prompt_len=PROMPT,
        context_len=context,
        rope=Rope.default(dim),
        gate=draw(layers, qheads, TOKENS, dim).sigmoid() if context else None,
        o_proj=draw(layers, qheads, dim, 24),
        residual_norm=draw(layers, TOKENS).abs() + 5,
        probe_q=draw(layers, qheads, rows, dim),
        probe_k=draw(layers, heads, rows, dim),
        tokens=[n % 50 for n in range(TOKENS)],
        token_text=["a " if n % 7 else "b.\n\n" for n in range(TOKENS)],
        meta={"probe": probe, "layer_sensitivity": [1.0] * layers},
    )


@functools.cache
def compact(context=None, dtype=torch.float32):
    """The same trace without rows 256 to 511."""
    trace = compacted(whole(context, dtype), STAY)
    assert trace.header.left_out == LEFT_OUT
    return trace


def made(name):
    """A policy by name; around TOVA where it needs something inside."""
    base = name.partition("@")[0]
    if "+" in name:
        return kvsim.policy(name)
    entry = CATALOGUE[base] if base in CATALOGUE else ACCESS[base]
    inside = "" if entry.innermost or entry.default or base in ACCESS else "+tova"
    return kvsim.policy(name + inside, **{**entry.required, **short_lengths(name)})


def alike(name, *traces, **terms):
    """Whether records of traces under a policy keep and read the same."""
    budget = PROMPT + 10 if name in ("raas", "triattention") else 200
    policy = made(name) if isinstance(name, str) else name
    schedule = policy.schedule
    # else no event fires while more is held
    if schedule.interval == 512 or budget > 200 or not schedule.prefill:
        terms |= {"interval": 15}
    first, second = (kvsim.replay(trace, policy, budget, **terms) for trace in traces)
    assert first.events or (policy.sparse or policy.storage) or not policy.bounded
    assert first.reads is None or np.array_equal(first.reads.bits, second.reads.bits)
    return np.array_equal(first.evicted_at, second.evicted_at)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.deep)
        for name in (*names(), *names(ACCESS), *COMPOSED)
    ],
)
def test_every_policy_keeps_the_same_or_names_what_is_left_out(name):
    """Kept sets and reads are those of the trace with all rows, bit for bit."""
    if name in REFUSED:
        with pytest.raises(
            NeedsError, match=r"q of rows \d+ to 511 was left out .*--rows response"
        ):
            kvsim.replay(compact(), made(name), 200)
    else:
        assert alike(name, whole(), compact())


@pytest.mark.parametrize("name", ["h2o", "snapkv", "expected_attention", "kvzip", "adakv+h2o"])
@pytest.mark.parametrize("compress", ["context", "both"])
def test_a_context_is_compressed_alike(name, compress):
    """Rows before the end of the context stay, and sums end there."""
    assert alike(name, whole(CONTEXT), compact(CONTEXT), compress=compress)


def test_chunks_of_the_prompt_are_alike_or_named():
    """Sums end behind the rows left out: a chunk that ends among these or before is refused."""
    for name in ("h2o", "snapkv", "expected_attention", "adakv+h2o"):
        assert alike(name, whole(), compact(), prefill_chunk=600)
        with pytest.raises(NeedsError, match=r"q of rows \d+ to \d+ was left out"):
            kvsim.replay(compact(), made(name), 200, prefill_chunk=400)
    assert alike("knorm", whole(), compact(), prefill_chunk=400)


@pytest.mark.parametrize("name", ["h2o", "h2o@kvpress", "adakv+h2o"])
def test_events_that_begin_late_or_at_different_rows_are_alike(name):
    """Rows of the response are added to the sums, in layers that have not acted yet."""
    assert alike(name, whole(), compact(), prefill=False, interval=15)
    uneven = replace(made(name), layer_budgets=Pyramid())
    assert alike(uneven, whole(), compact())


def test_moments_of_other_rows_are_refused():
    """Sums of queries begin behind the first four rows, as Expected Attention's do."""
    policy = kvsim.policy("expected_attention", sink=9)

    with pytest.raises(NeedsError, match="q of rows 256 to 511 was left out"):
        kvsim.replay(compact(), policy, 200)


@pytest.mark.parametrize("name", ["tova+quest", "fastkv", "ams+h2o"])
def test_every_metric_is_the_same(name):
    """Tables of the default metrics and of all others that the trace admits are equal."""
    traces = whole(), compact()
    records = [kvsim.replay(trace, name, 200, internals=True) for trace in traces]
    asked = [x for x, metric in METRICS.items() if metric.kind != "live" and not metric.beside]
    admitted = available(asked, [compact()])

    first, second = (
        kvsim.measure(*pair, metrics=admitted) for pair in zip(traces, records, strict=True)
    )

    assert {*asked} - {*admitted} == REFUSED_METRICS
    assert first.drop("trace").equals(second.drop("trace"))


@pytest.mark.parametrize("name", sorted(REFUSED_METRICS))
def test_metrics_of_rows_that_are_left_out_are_refused(name):
    """By name in one line; without names they are no part of a Table."""
    with pytest.raises(NeedsError, match=r"q of rows 256 to 511 was left out"):
        kvsim.measure(compact(), metrics=[name])
    assert name not in set(kvsim.measure(compact())["metric"])


@pytest.mark.parametrize("formula", [{}, {"softcap": 3.0}, {"sinks": (0.5, -1.0, 2.0, 0.0)}])
def test_sums_are_those_over_all_rows(formula):
    """Attention of the rows added up, mean and products of queries before RoPE, in float64."""
    trace = whole(dtype=torch.float64)
    formulas = [Formula(0.4, **formula)] * 2
    arrays = {name: trace.read(name) for name in "qkv"}
    trace = kvsim.Trace.from_arrays(
        **arrays, prompt_len=PROMPT, rope=trace.ropes, formulas=formulas
    )
    few = compacted(trace, STAY)
    rows = torch.arange(512)

    for layer in range(2):
        expected = trace.attention(layer, rows, rows).sum(1)
        queries = trace.ropes[layer].unrotate(trace.read("q")[layer, :, 4:512], rows[4:])
        centred = queries - queries.mean(1, keepdim=True)

        assert torch.allclose(few.read("received")[layer], expected)
        assert torch.allclose(few.read("moments")[layer, :, 0], queries.mean(1))
        assert torch.allclose(few.read("moments")[layer, :, 1:], centred.mT @ centred)


def test_sums_do_not_depend_on_the_block_of_layers():
    """Replays of one layer score the prompt from the same bits as those of all."""
    for name in ("h2o@kvpress", "expected_attention"):
        together = kvsim.replay(whole(), name, 200, internals=True)
        for layer in range(2):
            alone = kvsim.replay(whole(), name, 200, layers=[layer], internals=True)
            scores = [plan.scores[layer] for plan in together.internals]
            expected = [plan.scores[0] for plan in alone.internals]
            assert all(map(np.array_equal, scores[:1], expected[:1]))


def test_a_compact_trace_is_stored(tmp_path):
    """Its digest, rows and what is left out come back; zarr sees rows with an axis of their own."""
    path, trace = tmp_path / "a.zarr", compact(CONTEXT)

    kvsim.save_trace(trace, path)
    stored = open_trace(path)

    assert stored.digest == trace.digest != whole(CONTEXT).digest
    assert stored.header.left_out == LEFT_OUT
    assert verify(path, deep=True).ok
    assert describe(path)["left_out"] == [256, 512]
    group = zarr.open_group(str(path), mode="r")
    assert group["q"].shape == (2, 4, TOKENS - 256, 8)
    assert group["q"].metadata.dimension_names == ("layer", "qhead", "row", "dim")
    for name in ("q", "attn_out", "lse", "gate"):
        for part in (slice(0, 256), slice(512, 890), slice(800, 801), slice(500, 500)):
            expected = whole(CONTEXT).full()[name == "lse"] if name in ("attn_out", "lse") else None
            expected = whole(CONTEXT).read(name) if expected is None else expected
            assert torch.equal(stored.read(name, pos=part), expected[:, :, part])
        with pytest.raises(NeedsError, match=f"{name} of rows 256 to 299 was left out"):
            stored.read(name, pos=slice(200, 300))
    rows = slice(770, 880)
    assert torch.equal(loaded(stored).read("q", pos=rows), trace.read("q", pos=rows))
    with pytest.raises(TraceError, match="only some rows already"):
        compacted(stored)
    again = tmp_path / "b.zarr"
    kvsim.save_trace(stored, again)
    assert open_trace(again).digest == trace.digest


@pytest.mark.parametrize("left_out", [(256, 500), (0, 512), (512, 256), (256, 1024)])
def test_rows_that_are_no_whole_blocks_are_refused(left_out):
    """Blocks of 256 positions, the first and the last row of the prompt not among them."""
    trace = compact()
    arrays = {name: trace.source.read(name, slice(None), slice(None)) for name in ("k", "v")}
    arrays |= {x: trace.read(x, pos=slice(512, None)) for x in ("q", "attn_out", "lse")}
    length = left_out[1] - left_out[0]
    arrays |= {
        x: torch.cat([y, y, y, y, y, y, y, y], 2)[:, :, : TOKENS - length]
        for x, y in arrays.items()
        if x in ("q", "attn_out", "lse")
    }

    with pytest.raises(TraceError, match=r"left_out is .*expected whole blocks|has shape"):
        kvsim.Trace.from_arrays(
            **arrays,
            received=torch.zeros(2, 4, left_out[1]),
            prompt_len=PROMPT,
            rope=trace.ropes,
            left_out=left_out,
        )


def test_the_page_names_all_that_is_refused():
    """`docs/record.md` has every policy and metric that the tests above find."""
    page = (Path(__file__).parents[2] / "docs" / "record.md").read_text()

    assert [name for name in (*REFUSED, *REFUSED_METRICS) if f"`{name}`" not in page] == []
