"""Needles under sparse attention against a loop, and how often metrics read a trace."""

from collections import Counter

import numpy as np
import pytest

import kvsim
from kvsim.analysis.measuring import available
from kvsim.analysis.registry import METRICS
from kvsim.testing.strategies import make_case
from traces import changed


def read_by(record, at, head, row):
    """Positions that a row reads, by counting the pages of what its head holds."""
    account, heads = record.reads, record.evicted_at.shape[1]
    gone = record.evicted_at[at, head * heads // max(heads, account.bits.shape[1])]
    held = [p for p in range(row + 1) if gone[p] >= row]
    of_pages = head * account.bits.shape[1] // max(heads, account.bits.shape[1])
    bits = account.bits[at, of_pages, row - account.first]
    return [
        p for i, p in enumerate(held) if bits[(page := i // account.page) // 8] >> 7 - page % 8 & 1
    ]


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        *(("adakv+snapkv+quest", heads) for heads in ("query", "kv")),
        *(("h2o+quest", heads) for heads in ("query", "kv", "layer")),
        ("quest", "layer"),
    ],
)
def test_under_sparse_attention_needles_count_where_a_row_reads_them(name, heads):
    """Row by row and entry by entry, in layers that read pages and in those that read all."""
    case = make_case("sharp", heads=2, group=2, layers=2, n=60, prompt_len=30)
    options = {"page": 3, "dense_layers": 1} | ({"window": 4} if "snapkv" in name else {})
    policy = kvsim.policy(name, heads=heads, **options)
    record = kvsim.replay(case.trace(), policy, budget=16, interval=8)
    meta = {"spans": {"needle": [(3, 9), (12, 14)]}}
    trace = changed(case.trace(), meta=meta)

    table = kvsim.measure(trace, record, ["needle_recall", "needle_wipeout"])

    of = {name: table.filter(metric=name).sort("layer", "head", "qhead") for name in METRICS}
    accounts = max(record.reads.bits.shape[1], 2)
    for at in range(2):
        needle = np.zeros((4, 3))
        for i in range(4):
            for row in range(30, 60):
                read = set(read_by(record, at, i * accounts // 4, row))
                spans = [set(range(3, 9)), set(range(12, 14))]
                needle[i, 0] += len(read & set.union(*spans)) / 8 / 30
                needle[i, 1] += len(read & set(range(30))) / 30 / 30
                needle[i, 2] += sum(not read & span for span in spans) / 2 / 30
        for head, expected in enumerate(needle.reshape(2, 2, 3).mean(1)):
            recall, wipeout = (
                of[name].filter(layer=at, head=head).select("value", "chance").row(0)
                for name in ("needle_recall", "needle_wipeout")
            )
            assert (*recall, wipeout[0]) == pytest.approx(expected)


@pytest.fixture
def reads(monkeypatch):
    """Counts of arrays read from any trace, by name."""
    counts = Counter()
    read = kvsim.Trace.read

    def counted(self, name, *args, **kwargs):
        counts[name] += 1
        return read(self, name, *args, **kwargs)

    monkeypatch.setattr(kvsim.Trace, "read", counted)
    return counts


def replayed():
    """A stored-like trace, its attention already known, with records of three policies."""
    case = make_case("sharp", layers=2, heads=2, group=2, n=200, prompt_len=80)
    trace = case.trace()
    made = changed(
        trace,
        attn_out=trace.full()[0],
        lse=trace.full()[1],
        token_text=[".", "a"] * 100,
        tokens=np.arange(200) % 7,
        o_proj=np.ones((2, 4, case.q.shape[-1], 6), np.float32),
        residual=np.ones((2, 200, 6), np.float32),
    )
    names = ("tova", "snapkv", "knorm")
    records = [kvsim.replay(made, kvsim.policy(x), budget=40, interval=20) for x in names]
    return made, records


def test_set_metrics_read_no_attention(reads):
    """They come from the record; two also look values or keys up, once a layer for all records."""
    trace, records = replayed()
    reads.clear()

    kvsim.measure(trace, records, [name for name, one in METRICS.items() if one.kind == "sets"])

    assert reads == {"v": 2, "k": 2}


def test_attention_metrics_read_a_trace_once_for_all_records(reads):
    """As often for three records as for one, whatever the metric."""
    trace, records = replayed()
    replayable = [x for x, one in METRICS.items() if one.kind != "live" and not one.beside]
    for name in available(replayable, [trace]):
        reads.clear()
        kvsim.measure(trace, records[:1], [name])
        alone = dict(reads)
        reads.clear()
        kvsim.measure(trace, records, [name])

        assert reads == alone, name
