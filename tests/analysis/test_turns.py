"""Regret and bytes of the answer of each turn, against plain loops over its rows."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kvsim
from kvsim.analysis.output.optimum import optimum
from kvsim.testing.strategies import make_case

CASE = make_case("sharp", layers=2, heads=2, group=2, n=70, prompt_len=30, seed=3)
QUESTIONS = ((38, 43), (55, 60))
#: (start, stop) of the answer of each turn.
ANSWERS = ((30, 38), (43, 55), (60, 70))
NAMES = ["regret", "bytes_held", "bytes_read"]
POLICIES = {"h2o": {}, "h2o+quest": {"page": 3, "dense_layers": 0, "heads": "kv"}, "h2o+int4": {}}


def measured(name, questions=QUESTIONS):
    """A record, the optimum on its terms, and the Table of both."""
    trace, policy = CASE.trace(20, questions), kvsim.policy(name, **POLICIES[name])
    record = kvsim.replay(trace, policy, 12, interval=4, compress="both")
    best = optimum(trace, kvsim.policy("h2o"), record)
    return record, best, kvsim.measure(trace, record, NAMES, optima=[best])


def test_an_answer_repeats_what_it_has_said_itself():
    """Each turn has its own rate, in which questions do not count."""
    tokens = np.arange(70)
    tokens[43:55], tokens[55:60] = 7, tokens[38:43]
    facts = {"prompt_len": CASE.prompt_len, "rope": CASE.rope, "tokens": tokens}
    trace = kvsim.Trace.from_arrays(CASE.q, CASE.k, CASE.v, questions=QUESTIONS, **facts)

    found = kvsim.measure(trace, metrics="repetition").filter(variant="n=2")

    assert found.select("turn", "value").rows() == [(1, 0.0), (2, pytest.approx(10 / 11)), (3, 0.0)]


@functools.cache
def attention(layer, qhead, row):
    """Weights of a row of full attention over the entries up to its own, in float64."""
    z = (CASE.k[layer, qhead // 2, : row + 1] @ CASE.q[layer, qhead, row]) * CASE.scale
    weights = np.exp(z.astype(np.float64) - z.max())
    return weights / weights.sum()


def held(record, layer, head, row):
    """Positions that a KV head holds for a row."""
    gone = record.evicted_at[layer, head]
    return [p for p in range(row + 1) if gone[p] >= row]


def read(record, layer, head, row):
    """Positions that a row reads: those of the pages of its KV head."""
    entries, account = held(record, layer, head, row), record.reads
    if account is None or row < account.first:
        return entries
    bits = np.unpackbits(account.bits[layer, head, row - account.first])
    return [p for i, p in enumerate(entries) if bits[i // account.page]]


def size(entries, row, *, rounded):
    """Bytes of entries: keys and values in 16 bits, or in 4 with a scale once their row has run."""
    dim = CASE.k.shape[-1]
    bits = [2 * (4 * dim + 16 if rounded and p < row else 16 * dim) for p in entries]
    return sum(bits) / 8


def naive(record, best, layer, rows):
    """Means over rows: regret of each query head, bytes held and read of the layer."""
    regret, sizes = [], []
    page = None if record.reads is None else record.reads.page
    for row in rows:
        weights = [attention(layer, qhead, row) for qhead in range(4)]
        seen = [read(record, layer, qhead // 2, row) for qhead in range(4)]
        most = [held(best, layer, qhead // 2, row) for qhead in range(4)]
        pairs = list(zip(weights, seen, strict=True))
        regret.append([w[b].sum() - w[s].sum() for (w, s), b in zip(pairs, most, strict=True)])
        both, rounded = [0.0, 0.0], record.storage is not None
        for head in range(2):
            entries = held(record, layer, head, row)
            pages = 0 if page is None else -(-len(entries) // page)
            summary = pages * 32 * CASE.k.shape[-1] / 8
            both[0] += size(entries, row, rounded=rounded) + summary
            both[1] += size(seen[2 * head], row, rounded=rounded) + summary
        sizes.append(both)
    return np.mean(regret, 0), *np.mean(sizes, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_values_of_a_turn_are_means_over_the_rows_of_its_answer(name):
    """Rows of later questions count in none."""
    record, best, table = measured(name)

    for turn, (start, stop) in enumerate(ANSWERS, start=1):
        for layer in range(2):
            of_turn = table.filter(turn=turn, layer=layer).sort("qhead")
            regret, resident, taken = naive(record, best, layer, range(start, stop))
            values = {metric: of_turn.filter(metric=metric)["value"].to_list() for metric in NAMES}
            assert values["regret"] == pytest.approx(regret, abs=1e-5)
            assert values["bytes_held"] == pytest.approx([resident])
            assert values["bytes_read"] == pytest.approx([taken])
    assert table["turn"].null_count() == 0


def test_one_turn_has_the_values_of_all_rows_after_the_prompt():
    """Without later questions a Table has no turns, and means over every row."""
    record, best, table = measured("h2o+quest", questions=())

    assert "turn" not in table.columns
    for layer in range(2):
        expected = naive(record, best, layer, range(30, 70))
        for metric, values in zip(NAMES, expected, strict=True):
            mine = table.filter(metric=metric, layer=layer).sort("qhead")["value"].to_list()
            assert mine == pytest.approx(np.atleast_1d(values).tolist(), rel=1e-5, abs=1e-5)
