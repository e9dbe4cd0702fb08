"""Dumps of the pages that rows read, and of the bits that entries are stored in, by plain loops."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from kvsim_dump import Dump

import kvsim
from kvsim.errors import DumpError
from kvsim.studies.conformance import dump
from kvsim.studies.conformance.dump import read_dump
from kvsim.testing import conforms

PROMPT, N, PAGE, BUDGET = 30, 60, 4, 16
QUEST = kvsim.policy("quest", page=PAGE, dense_layers=0)
KIVI = kvsim.policy("kivi", window=16, group=16, bits_per_number=4)


@pytest.fixture(scope="module")
def trace():
    """A random trace of two layers, two KV heads and four query heads."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, N, 8, generator=generator) for heads in (4, 2, 2))
    return kvsim.Trace.from_arrays(q, k, v, prompt_len=PROMPT, rope=kvsim.Rope.default(8))


def bounds(q, k, row):
    """The largest logit that each page could have, channel by channel."""
    out = []
    for first in range(0, row + 1, PAGE):
        keys = k[first : min(first + PAGE, row + 1)]
        out.append(sum(max(x * y for y in keys[:, c]) for c, x in enumerate(q)))
    return out


def pages_of(trace, path, kind=""):
    """Write the pages that Quest reads in each row after the prompt, with a deviation."""
    out = Dump(page=PAGE, budget=BUDGET)
    q, k = (trace.read(x).double().numpy() for x in "qk")
    for layer in range(2):
        for row in range(PROMPT, N):
            chosen = []
            for qhead in range(4):
                keys, sign = k[layer, qhead // 2], -1 if kind == "min-for-max" else 1
                score = [sign * x for x in bounds(sign * q[layer, qhead, row], keys, row)]
                if kind == "mean-key":
                    first = range(0, row + 1, PAGE)
                    means = [keys[x : min(x + PAGE, row + 1)].mean(0) for x in first]
                    score = [float(q[layer, qhead, row] @ mean) for mean in means]
                own = len(score) - 1
                score = {
                    "own-page-always": [*score[:own], math.inf],
                    "own-page-never": [*score[:own], -math.inf],
                    "own-page-on-top": [*score[:own], -math.inf],
                }.get(kind, score)
                best = np.argsort(-np.array(score), kind="stable")
                count = BUDGET // PAGE + {"page-more": 1, "page-fewer": -1}.get(kind, 0)
                best = best[:count] + {"pages-low": -1, "pages-from-1": 1}.get(kind, 0)
                best = np.append(best, own) if kind == "own-page-on-top" else best
                chosen.append(np.unique(best.clip(min=0)))
            out.read(layer, row, chosen)
    out.save(path)
    return read_dump(path)


KINDS = ["", "own-page-always", "own-page-never", "own-page-on-top", "pages-low", "pages-from-1"]
KINDS += ["page-more", "page-fewer", "min-for-max", "mean-key"]


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_those_of_a_plain_loop(trace, tmp_path, kind):
    """And each deviation is explained by its name."""
    report = kvsim.conform(pages_of(trace, tmp_path / "d.npz", kind), QUEST, trace=trace)
    assert report.compared == 2 * 4 * (N - PROMPT)
    assert report.equal is not bool(kind)
    assert [each.name for each in report.deviations] == [kind] * bool(kind)
    if kind in ("own-page-always", "own-page-never"):
        first = report.apart[0]
        q = trace.read("q")[first.layer, first.head, first.row].double().numpy()
        score = bounds(q, trace.read("k")[first.layer, first.head // 2].double().numpy(), first.row)
        best, worst = max(score[x] for x in first.missing), min(score[x] for x in first.extra)
        assert first.cut == pytest.approx((best, worst), rel=1e-5)
        assert f"reads pages {first.extra[0]}" in report.lines()[1]


def test_other_pages_and_heads_are_parameters(trace, tmp_path):
    """A definition of other pages, or of other heads, is named."""
    pages = pages_of(trace, tmp_path / "d.npz")
    for params, explained in (({"page": 2}, "page=4"), ({"heads": "kv"}, "heads=query")):
        policy = kvsim.policy("quest", **{"page": PAGE, "dense_layers": 0, **params})
        report = kvsim.conform(pages, policy, trace=trace)
        assert explained in [each.name for each in report.deviations]


def bits_of(trace, path, late=(0, 0), bits=(6.0, 8.0), kind=""):
    """Write what KIVI has rounded after each row: keys by windows of 16, values behind 16."""
    out = Dump(heads=2, budget=N)
    for layer in range(2):
        for row in range(PROMPT - 1, N):
            n, m = row + 1 - late[0], row + 1 - late[1]
            for pos in range(row + 1):
                key, value = pos < n - n % 16, pos < m - 16
                value = key if kind == "values-as-keys" else value
                widths = [x if is_so else 32 for x, is_so in zip(bits, (key, value), strict=True)]
                out.stored(layer, row, [pos], *widths)
    out.save(path)
    return read_dump(path)


def test_bits_are_those_of_a_plain_loop(trace, tmp_path):
    """4 bits and 32 for each group of 16 keys, or 8 channels of a value; other bits are seen."""
    path = tmp_path / "d.npz"
    conforms(bits_of(trace, path), KIVI, trace=trace)
    report = kvsim.conform(bits_of(trace, path, bits=(8.0, 6.0)), KIVI, trace=trace)
    assert "keys have 8 bits; by definition 6" in report.lines()[1]
    report = kvsim.conform(bits_of(trace, path, bits=(10.0, 12.0)), KIVI, trace=trace)
    assert [each.name for each in report.deviations] == ["bits_per_number=8"]
    with pytest.raises(AssertionError, match="leaves exact values of 13"):
        conforms(bits_of(trace, path, late=(1, 1)), KIVI, trace=trace)


@pytest.mark.parametrize(
    ("kind", "late"),
    [
        ("rounded-late", (1, 1)),
        ("values-late", (0, 1)),
        ("values-early", (0, -1)),
        ("values-as-keys", (0, 0)),
    ],
)
def test_clocks_of_a_quantizer_are_tried(trace, tmp_path, kind, late):
    """Rounding a row too late or too early, and values rounded when keys are."""
    report = kvsim.conform(bits_of(trace, tmp_path / "d.npz", late, kind=kind), KIVI, trace=trace)
    assert [each.name for each in report.deviations] == [kind]


@pytest.mark.parametrize(
    ("bits", "late", "explained"),
    [((6, 10), 0, "k_bits=4"), ((10, 6), 0, "v_bits=4"), ((10, 10), 8, "window=8")],
)
def test_choices_of_a_quantizer_are_tried(trace, tmp_path, bits, late, explained):
    """Bits of keys and of values by themselves, and a longer exact window."""
    out = Dump(heads=2)
    for layer, row in itertools.product(range(2), range(PROMPT - 1, N)):
        out.stored(layer, row, range(row + 1 - late), *bits)
    out.save(tmp_path / "d.npz")
    report = kvsim.conform(tmp_path / "d.npz", "int8", trace=trace)
    assert [each.name for each in report.deviations] == [explained]


def test_tables_need_a_policy_with_a_rule_for_them(trace, tmp_path):
    """Pages need sparse attention, bits a quantizer; pages follow the prompt."""
    pages = pages_of(trace, tmp_path / "d.npz")
    for given, policy in ((pages, "h2o"), (bits_of(trace, tmp_path / "b.npz"), QUEST)):
        with pytest.raises(DumpError, match="expected a policy that"):
            kvsim.conform(given, policy, trace=trace)
    with pytest.raises(DumpError, match="no kept sets; expected them, because"):
        kvsim.conform(pages, kvsim.policy("h2o+quest", page=PAGE), trace=trace)
    early = Dump(page=PAGE, budget=BUDGET)
    early.read(0, 3, [[0]] * 3)
    early.save(tmp_path / "e.npz")
    with pytest.raises(DumpError, match="3 heads, from row 3 on; expected 1, 2 or 4"):
        kvsim.conform(tmp_path / "e.npz", QUEST, trace=trace)


def test_a_dump_returns_from_its_file(trace, tmp_path):
    """Tables of all three kinds."""
    path = tmp_path / "d.npz"
    for first in (pages_of(trace, path), bits_of(trace, path)):
        back = read_dump(first.save(tmp_path / "e.npz", overwrite=True))
        assert back.page == first.page
        for mine, other in ((first.read, back.read), (first.stored, back.stored)):
            assert (mine is None) == (other is None)
            assert all((other[name] == x).all() for name, x in (mine or {}).items())


@pytest.mark.deep
@pytest.mark.parametrize("name", ["qfilter", "adakv+qfilter", "h2o+double_sparsity", "finch"])
def test_sets_that_differ_under_a_calibration_are_reported(name):
    """Presets and parameters are tried with it; a policy may weight the rows of its window."""
    sample = kvsim.open_trace("sample")
    policy = kvsim.policy(name, **({} if name == "finch" else {"calibration": "prefix:64"}))
    record = kvsim.replay(sample, "snapkv", 96)
    assert not kvsim.conform(dump.Dump.of_record(record, sample), policy).equal


def some(path, kind, layers=(0,), declared=None, positions=range):
    """Write what a layer holds, reads or stores, of the first layers alone."""
    out = Dump(heads=2, page=PAGE, budget=None if kind == "stored" else BUDGET, layers=declared)
    for layer in layers:
        for row in range(PROMPT - (kind != "read"), N):
            held = list(positions(row + 1))
            more = {"stored": (10, 10), "kept": (), "read": ()}[kind]
            at = range(-(-(row + 1) // PAGE)) if kind == "read" else held
            getattr(out, kind)(layer, row, list(at), *more)
    out.save(path)
    return path


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("stored", "int8"),
        ("kept", kvsim.policy("streaming_llm", sink=0)),
        ("read", kvsim.policy("quest", page=PAGE, dense_layers=1)),
    ],
)
def test_a_layer_without_lines_does_nothing(trace, tmp_path, kind, policy):
    """Unless the dump says that it is of some layers; then the first line has them."""
    path, window = tmp_path / "d.npz", lambda n: range(max(0, n - BUDGET) * (kind == "kept"), n)
    more = {"trace": trace} | ({"interval": 1} if kind == "kept" else {})
    report = kvsim.conform(some(path, kind, positions=window), policy, **more)
    assert {each.layer for each in report.apart} == {1}
    assert "no line of layer 1: " in str(report.remarks)
    some(path, kind, positions=window, declared=[0])
    conforms(path, policy, **more)
    report = kvsim.conform(read_dump(path).save(tmp_path / "e.npz"), policy, **more)
    assert report.lines()[0].endswith("; only layer 0 of layers 0-1")
    with pytest.raises(DumpError, match=r"lines of layers \[0\]; expected of \[1\]"):
        read_dump(some(path, kind, declared=[1]))


def test_entries_without_lines_are_exact(trace, tmp_path):
    """The newest entry of a quantizer that rounds it, and all but the first; without a budget."""
    for positions, left in ((lambda n: range(n - 1), "29"), (lambda _: [0], "1, 2, 3, 4")):
        path = some(tmp_path / "d.npz", "stored", (0, 1), positions=positions)
        report = kvsim.conform(path, "int8", trace=trace)
        assert len(report.apart) == 2 * 2 * 2 * (N - PROMPT + 1) == report.compared
        assert f"leaves exact keys of {left}" in report.lines()[1]
    conforms(some(tmp_path / "d.npz", "stored", (0, 1)), "int8", trace=trace)


def test_an_empty_dump_and_other_pages_are_named(trace, tmp_path):
    """No lines, a page that was not given, and states without inv_freq."""
    path = tmp_path / "d.npz"
    empty = Dump()
    empty.states([[0.0]], [[0.0]], [[0.0]], 1, None)
    empty.save(path)
    assert "inv_freq" not in np.load(path)
    with pytest.raises(DumpError, match="cannot be read"):
        read_dump(path)
    Dump().save(path)
    with pytest.raises(DumpError, match="nothing was dumped"):
        read_dump(path)
    pages = pages_of(trace, path)
    report = kvsim.conform(replace(pages, page=1), QUEST, trace=trace, explain=False)
    assert "pages have 1 entry in the dump; for more: Dump(page=N)" in report.remarks
