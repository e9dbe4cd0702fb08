"""Mass on wiped regions and top-k recall against loops, and how often metrics read a trace."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.attention import windows
from kvsim.analysis.output.recall import attended, strongest
from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import available
from kvsim.schema import NEVER
from kvsim.testing.strategies import cases, make_case
from reference import metrics
from tests.analysis.test_sparsity import some
from traces import changed


def weights(case, layer):
    """Full attention [qhead, row, pos] of a layer, by its definition."""
    return metrics.attention(case.q[layer], case.k[layer], case.scale)


def some_record(case, seed, *, per_query_head=False, layers=None):
    """A record in which entries leave at random after some of the rows from the prompt's end on."""
    rng = np.random.default_rng(seed)
    layers = tuple(range(case.shape[0])) if layers is None else layers
    heads = case.q.shape[1] if per_query_head else case.shape[1]
    rows = np.arange(case.prompt_len - 1, case.n)
    rows = np.sort(
        rng.choice(rows, size=int(rng.integers(0, min(len(rows), 6) + 1)), replace=False)
    )
    choices = np.append(rows, NEVER)
    first = np.searchsorted(rows, np.arange(case.n))
    at = rng.integers(first, len(choices), size=(len(layers), heads, case.n))
    at = np.where(rng.random(at.shape) < rng.choice([0.1, 0.6]), len(rows), at)
    return some(
        choices[at].astype(np.int32), case.prompt_len, layers, per_query_head=per_query_head
    )


KINDS = ("normal", "sharp", "sink")
SIZES = {"lengths": (4, 8), "thresholds": (0.0, 0.3), "top": 3, "sink": 2, "recent": 3}


@settings(max_examples=40)
@given(
    case=cases(kinds=KINDS, max_n=40), seed=st.integers(0, 2**20), rows=st.sampled_from((1, 5, 64))
)
def test_lost_mass_and_recall_equal_loops(case, seed, rows):
    """Several records at once, per KV head and per query head, some with other layers."""
    back = tuple(reversed(range(case.shape[0])))
    records = [
        some_record(case, seed),
        some_record(case, seed + 1, per_query_head=True),
        some_record(case, seed + 2, layers=back),
        some_record(case, seed + 3, layers=back[:1]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsim.analysis.output.recall._ROWS", rows)
        found = attended(case.trace(), records, **SIZES)

    for record, one in zip(records, found, strict=True):
        for at, layer in enumerate(record.layers):
            full = weights(case, layer)
            check_recall(case, record.evicted_at[at], full, one.recall[at], one.seen[at])
            check_lost(case, record.evicted_at[at], full, one.events[at], one.wiped[at])


def check_recall(case, last, full, recall, seen):
    """Every row after the prompt, entry by entry."""
    per_head = len(full) // len(last)
    for i, attention in enumerate(full):
        for row in range(case.prompt_len, case.n):
            order = sorted(range(row + 1), key=lambda p: -attention[row, p])
            best = order[: SIZES["top"]]
            kept = [p for p in best if last[i // per_head, p] >= row]
            place = row - case.prompt_len
            assert recall[i, place] == pytest.approx(len(kept) / len(best))
            alive = sum(1 for p in range(row + 1) if last[i // per_head, p] >= row)
            assert seen[i // per_head, place] == pytest.approx(alive / (row + 1))


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
def test_under_a_reader_recall_counts_what_a_row_reads(name, heads):
    """Row by row and entry by entry, in layers that read pages and in those that read all."""
    case = make_case("sharp", heads=2, group=2, layers=2, n=60, prompt_len=30)
    options = {"page": 3, "dense_layers": 1} | ({"window": 4} if "snapkv" in name else {})
    policy = kvsim.policy(name, heads=heads, **options)
    record = kvsim.replay(case.trace(), policy, budget=16, interval=8)
    meta = {"spans": {"needle": [(3, 9), (12, 14)]}}
    trace = changed(case.trace(), meta=meta)

    table = kvsim.measure(trace, record, ["topk_recall", "needle_recall", "needle_wipeout"])

    of = {name: table.filter(metric=name).sort("layer", "head", "qhead") for name in METRICS}
    accounts = max(record.reads.bits.shape[1], 2)
    for at in range(2):
        needle = np.zeros((4, 3))
        for i in range(4):
            attention, shares = weights(case, at)[i], []
            for row in range(30, 60):
                read = set(read_by(record, at, i * accounts // 4, row))
                best = sorted(range(row + 1), key=lambda p: -attention[row, p])[:10]
                shares.append((len(read & set(best)) / 10, len(read) / (row + 1)))
                spans = [set(range(3, 9)), set(range(12, 14))]
                needle[i, 0] += len(read & set.union(*spans)) / 8 / 30
                needle[i, 1] += len(read & set(range(30))) / 30 / 30
                needle[i, 2] += sum(not read & span for span in spans) / 2 / 30
            found = of["topk_recall"].filter(layer=at, qhead=i).select("value", "chance").row(0)
            assert found == pytest.approx(np.mean(shares, 0), rel=1e-6)
        for head, expected in enumerate(needle.reshape(2, 2, 3).mean(1)):
            recall, wipeout = (
                of[name].filter(layer=at, head=head).select("value", "chance").row(0)
                for name in ("needle_recall", "needle_wipeout")
            )
            assert (*recall, wipeout[0]) == pytest.approx(expected)


def check_lost(case, last, full, events, wiped):
    """Every event, head, length and threshold."""
    per_head = len(full) // len(last)
    assert events.tolist() == sorted({int(r) for r in last.ravel()} - {NEVER})
    assert set(wiped) == {(x, t) for x in SIZES["lengths"] for t in SIZES["thresholds"]}
    for (length, threshold), shares in wiped.items():
        for head in range(len(last)):
            own = full[head * per_head : (head + 1) * per_head]
            for j, row in enumerate(events):
                lost = whole = 0.0
                for start in range(0, case.n, length):
                    if start < SIZES["sink"] or start + length > row + 1 - SIZES["recent"]:
                        continue
                    region = range(start, start + length)
                    mass = sum(
                        a[later, p] for a in own for later in range(row + 1, case.n) for p in region
                    )
                    left = sum(1 for p in region if last[head, p] > row) / length
                    whole += mass
                    lost += mass * (left <= threshold)
                expected = lost / whole if whole else np.nan
                assert shares[head, j] == pytest.approx(expected, nan_ok=True, abs=1e-9)


@pytest.mark.parametrize("top", [1, 3, 10, 39])
def test_equal_attention_is_taken_from_the_lowest_positions(top):
    """Of repeated keys the first ones are the strongest, whatever torch.topk takes."""
    rng = np.random.default_rng(0)
    z = torch.from_numpy(rng.integers(0, 4, size=(2, 3, 50, 40)).astype(np.float32))
    z[:, :, :20, 5:] = -torch.inf  # rows with fewer entries than are asked for

    places, real = strongest(z, top)

    assert places.shape == real.shape == (2, 3, 50, top)
    for row, at, above in zip(
        z.flatten(0, 2).tolist(),
        places.flatten(0, 2).tolist(),
        real.flatten(0, 2).tolist(),
        strict=True,
    ):
        order = sorted((p for p in range(40) if row[p] > -np.inf), key=lambda p: (-row[p], p))
        assert {p for p, exists in zip(at, above, strict=True) if exists} == set(order[:top])
    if top < 39:
        assert any(
            set(a) != set(b)
            for a, b in zip(
                z.topk(top).indices[:, :, 20:].flatten(0, 2).tolist(),
                places[:, :, 20:].flatten(0, 2).tolist(),
                strict=True,
            )
        )


def test_a_trace_without_a_response_has_no_rows():
    """Nothing is walked, and metrics have no value rather than zero."""
    case = make_case("normal", n=40, prompt_len=40)
    record = kvsim.replay(case.trace(), kvsim.policy("tova"), budget=8, prefill=True)

    (found,) = attended(case.trace(), [record])
    table = kvsim.measure(case.trace(), record, ["wipeout_mass", "topk_recall"])

    assert found.recall.shape == (1, 1, 0)
    assert np.isnan(found.wiped[0][16, 0.0]).all()
    assert table["value"].null_count() == len(table)


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
        attn_out=trace.attn_out,
        lse=trace.lse,
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


def test_two_metrics_of_one_walk_share_it(monkeypatch):
    """Lost mass and recall walk once together, gaps and returns too."""
    trace, records = replayed()
    calls = Counter()

    def counted(where):
        log_attention = windows.log_attention

        def call(*args, **kwargs):
            calls[where] += 1
            return log_attention(*args, **kwargs)

        monkeypatch.setattr(f"kvsim.analysis.{where}.log_attention", call)

    counted("output.recall")
    counted("attention.windows")
    kvsim.measure(
        trace, records, ["wipeout_mass", "topk_recall", "attention_gap", "attention_return"]
    )

    assert calls == {"output.recall": 2, "attention.windows": 2}  # one walk for each of two layers
