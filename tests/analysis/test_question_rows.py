"""Rows of the prompt behind an event: the question's and those of later chunks, measured apart."""

from __future__ import annotations

import numpy as np
import pytest

import kvsim
from kvsim.analysis.output.error import output_error
from kvsim.engine.source import ended
from kvsim.testing.strategies import make_case

CASE = make_case("sharp", layers=2, heads=2, group=2, n=70, prompt_len=50, seed=3)
TRACE = CASE.trace(40)
NAMES = ["output_error", "retained_mass", "missing_mass", "error_distance", "layer_error"]
#: Policies, and where they begin; the rows measured by variant.
CASES = [
    ("h2o", {"compress": "context"}, {"rows=question": (40, 50)}),
    ("snapkv", {"prefill_chunk": 15}, {"rows=prompt": (15, 50)}),
    ("snapkv", {"prefill_chunk": 60}, {}),
    ("tova", {"prefill_chunk": 15, "compress": "both"},
     {"rows=context": (15, 40), "rows=question": (40, 50)}),
    ("tova", {"prefill_chunk": 15, "compress": "questions"}, {"rows=prompt": (15, 50)}),
    ("quest", {"compress": "context"}, {"rows=question": (40, 50)}),
    ("tova+quest", {"compress": "context"}, {"rows=question": (40, 50)}),
    ("int4", {"compress": "context"}, {"rows=question": (40, 50)}),
    ("quest", {}, {}),
]  # fmt: skip


def made(name):
    """A policy with lengths that bind on 70 tokens."""
    if "quest" in name:
        return kvsim.policy(name, page=4, dense_layers=0)
    return kvsim.policy(name, **({"window": 4} if name == "snapkv" else {}))


def naive(record, layer, qhead, row):
    """Error and retained mass of one row, in float64, from what the record says it reads."""
    head = qhead // 2
    q, k, v = CASE.q[layer, qhead, row], CASE.k[layer, head, : row + 1], CASE.v[layer, head]
    logits = (k @ q) * CASE.scale
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    read = record.evicted_at[layer, head, : row + 1] >= row
    if record.reads is not None and row >= record.reads.first:
        place = read.cumsum() - 1
        bits = np.unpackbits(record.reads.bits[layer, qhead, row - record.reads.first])
        read = read & (bits[place // record.reads.page] == 1)
    full, mass = weights @ v[: row + 1], weights[read].sum()
    seen = (weights[read] / mass) @ v[: row + 1][read]
    return np.linalg.norm(seen - full) / np.linalg.norm(full), mass


@pytest.mark.parametrize(("name", "terms", "parts"), CASES)
def test_means_are_those_of_the_rows(name, terms, parts):
    """Each variant is the mean over its rows; there are no others, and those after stay."""
    record = kvsim.replay(TRACE, made(name), 20, **terms)
    table = kvsim.measure(TRACE, record, NAMES)
    (rows,) = output_error(TRACE, [record], projected=True)

    for metric in NAMES:
        of_metric = table.filter(metric=metric)
        assert {*of_metric["variant"]} == {"", *parts}
        for variant, (start, stop) in {"": (50, 70), **parts}.items():
            values = of_metric.filter(variant=variant)["value"].to_numpy()
            if name == "int4" and metric == "error_distance":  # not a product of two factors
                assert np.isnan(values).all()
                continue
            if metric == "layer_error":
                expected = np.sqrt((rows.added[:, start:stop].astype(float) ** 2).mean(-1))
            else:
                source = {"output_error": "error", "retained_mass": "mass"}
                source |= {"missing_mass": "missing", "error_distance": "distance"}
                expected = getattr(rows, source[metric])[..., start:stop].astype(float)
                expected = np.nanmean(expected, -1).ravel()
            assert np.allclose(values.astype(float), expected, rtol=1e-5, atol=1e-7), metric


@pytest.mark.parametrize(("name", "terms", "parts"), [x for x in CASES if x[0] != "int4"])
def test_rows_are_those_of_a_naive_loop(name, terms, parts):
    """Softmax over the entries that a row reads, row by row in float64."""
    record = kvsim.replay(TRACE, made(name), 20, **terms)
    (rows,) = output_error(TRACE, [record])
    measured = [row for start, stop in parts.values() for row in range(start, stop, 3)]

    for row in [*measured, 55]:
        for qhead in range(4):
            error, mass = naive(record, 1, qhead, row)
            assert rows.error[1, qhead, row] == pytest.approx(error, rel=1e-4, abs=1e-5)
            assert rows.mass[1, qhead, row] == pytest.approx(mass, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["quest", "tova+quest"])
def test_sparse_attention_takes_the_context_for_the_prompt(name):
    """From the question on it reads as if the prompt had ended with the context."""
    policy = made(name)
    record = kvsim.replay(TRACE, policy, 20, interval=7, compress="context")
    alone = kvsim.replay(ended(TRACE, 40), policy, 20, interval=7, compress="prompt")
    late = kvsim.replay(TRACE, policy, 20, interval=7)

    assert (record.reads.first, late.reads.first) == (40, 50)
    first = np.array_equal(record.reads.bits[:, :, :6], alone.reads.bits[:, :, :6])
    assert first, "rows before the first event of either in decoding"


def test_live_and_sparse_questions_differ_from_sparse_answers():
    """Rows of the answer have the same error in open loop; those of the question have one more."""
    policy, terms = made("quest"), {"interval": 9}
    both, answer = (
        kvsim.measure(TRACE, kvsim.replay(TRACE, policy, 20, compress=x, **terms), NAMES[:1])
        for x in ("context", "prompt")
    )

    same = both.filter(variant="")["value"].equals(answer["value"])
    assert same
    assert (both.filter(variant="rows=question")["value"] > 0).any()
