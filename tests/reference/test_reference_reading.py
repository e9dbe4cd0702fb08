"""Sparse attention against naive loops in float64 that share no code with them."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import kvsim
from kvsim.analysis.output.bytes import cache_bytes
from kvsim.analysis.output.changed import log_weights
from kvsim.analysis.output.error import output_error
from kvsim.core.attention import Formula
from kvsim.core.reading import Reads
from kvsim.core.record import Record, record_document, record_of
from kvsim.core.trace import Trace
from kvsim.engine import reading as engine
from kvsim.errors import PolicyError
from kvsim.policies import policy, rocketkv
from kvsim.policies.naming import parameters
from kvsim.schema import NEVER
from kvsim.testing.strategies import make_case
from reference import reading
from reference.strategies import examples
from traces import changed

SPARSE = (
    "quest",
    "quest@release",
    "double_sparsity",
    "infllm",
    "pqcache",
    "magicpig",
    "rocketkv",
    "skip_softmax",
    "topk",
    "topp",
)
#: Evictions in front, and their parameters; "" alone, "any" whatever leaves whenever.
FRONT: dict[str, dict[str, Any]] = {
    "": {},
    "any": {},
    "snapkv": {"window": 3},
    "tova": {},
    "streaming_llm": {"sink": 2},
    "adakv+snapkv": {"window": 3},
}
HEADS = ((1, 1), (1, 3), (2, 1), (2, 2))
TOLERANCE = 1e-9


def arbitrary(rng: np.random.Generator, heads: int, n: int) -> np.ndarray:
    """`evicted_at` [1, heads, n]: any entry may leave after any row from its own on."""
    events = np.unique(rng.integers(0, n, size=5))
    choices = np.sort([*events, NEVER])
    first = np.searchsorted(choices, np.arange(n))
    leaves = rng.integers(first, len(choices), size=(1, heads, n))
    stays = rng.random(leaves.shape) < 0.4
    out = choices[np.where(stays, len(choices) - 1, leaves)]
    out[..., 0] = NEVER  # a cache is never empty
    return out.astype(np.int32)


def generated(
    name: str, front: str, seed: int
) -> tuple[reading.Layer, reading.Rule, Trace, Record]:
    """A random trace of one layer with the record of a replay, and what a loop reads."""
    rng = np.random.default_rng([seed, *map(ord, front)])
    n = int(rng.integers(2, 18))
    heads, group = HEADS[rng.integers(len(HEADS))]
    prompt = int(rng.choice([1, n - 1, rng.integers(1, n)]))
    kind = str(rng.choice(["normal", "sharp", "grid", "sink", "repeated_keys"]))
    case = make_case(kind, heads=heads, group=group, n=n, prompt_len=prompt, seed=seed)
    budget = int(rng.integers(4, max(5, n)))
    softcap = float(rng.choice([2.0, 20.0])) if rng.random() < 0.3 else None
    sinks = tuple(rng.normal(size=heads * group).tolist()) if rng.random() < 0.3 else ()
    formula = Formula(case.scale, softcap=softcap, sinks=sinks)
    trace = changed(case.trace(), prompt_len=prompt, formulas=[formula])
    shared = ["query", "kv", "layer"][: 2 if front.startswith("adakv") else 3]
    params: dict[str, Any] = {"heads": str(rng.choice(shared))}
    if name.startswith("quest"):
        params |= {"page": int(rng.choice([1, 2, 3, 5, 40])), "dense_layers": 0}
    if name == "double_sparsity":
        params |= {
            "calibration": f"prefix:{rng.integers(1, prompt + 1)}",
            "channels": float(rng.choice([0.25, 0.75])),
            "bits": int(rng.choice([2, 4, 16])),
            "dense_layers": 0,
        }
    if name == "infllm":
        params |= {
            "page": int(rng.choice([1, 2, 3])),
            "sink": int(rng.integers(0, 4)),
            "local": [None, 1, 2, 4][rng.integers(4)],
            "representatives": int(rng.integers(1, 4)),
        }
    if name == "pqcache":
        params |= {
            "subspaces": int(rng.choice([1, 2, 4])),
            "bits": int(rng.choice([1, 2, 6])),
            "iterations": int(rng.choice([0, 1, 25])),
            "sink": int(rng.integers(0, 4)),
            "local": [None, 1, 2, 4][rng.integers(4)],
        }
    if name == "magicpig":
        params = {
            "bits": int(rng.choice([1, 2, 4])),
            "tables": int(rng.choice([2, 5, 12])),
            "collisions": int(rng.choice([1, 2])),
            "epsilon": float(rng.choice([0.0, 0.0, 1e-4])),
            "sink": int(rng.integers(0, 4)),
            "local": int(rng.integers(0, 4)),
            "seed": int(rng.integers(0, 3)),
            "dense_layers": 0,
        }
    elif name == "rocketkv":
        params = {
            "tokens": [None, None, 2, 6][rng.integers(4)],
            "page": [None, None, 2, 3][rng.integers(4)],
            "channels": [None, None, 1, 9][rng.integers(4)],
        }
    elif name == "skip_softmax":
        params |= {
            "page": int(rng.choice([1, 2, 3, 40])),
            "threshold": float(rng.choice([0.01, 0.3, 0.9])),
            "scale": [None, None, 0.5, 6.0][rng.integers(4)],
        }
    elif name == "topp":
        params["p"] = float(rng.choice([0.01, 0.5, 0.9]))
    else:
        params["share"] = float(rng.choice([0.01, 0.5, 1.0]))
    evicts = front not in ("", "any")
    full = f"{front if evicts else 'full'}+{name}"
    alike = parameters(front) if evicts else ()  # they go to the eviction
    given = {f"scorer__{key}" if key in alike else key: value for key, value in params.items()}
    interval = 1 if front == "tova" else int(rng.integers(1, 6))
    record = kvsim.replay(
        trace, policy(full, **given, **FRONT[front]), budget, interval=interval if evicts else None
    )
    if front == "any":
        gone = arbitrary(rng, heads, n)
        if params.get("heads") == "layer":  # each head holds as many
            gone[:] = gone[:, :1]
        sparse = policy(name, **params).sparse
        assert sparse is not None
        reads = engine.read(trace, sparse, gone, budget, (0,), "cpu")
        record = replace(record, evicted_at=gone, reads=reads)
    layer = reading.Layer(
        *(case.q[0], case.k[0], case.v[0], record.evicted_at[0], case.scale, softcap, sinks, prompt)
    )
    return (
        layer,
        reading.rule_of(name, {**params, "dim": trace.dim, "prompt": prompt}, budget),
        trace,
        record,
    )


def chosen(
    layer: reading.Layer, rule: reading.Rule, reads: Reads, qhead: int, row: int
) -> set[int]:
    """The pages that the account says a query head read, each of which must exist."""
    head = {"query": qhead, "kv": qhead // layer.group, "layer": 0}[rule.heads]
    assert reads.heads == rule.heads
    assert reads.page == rule.page
    marked = reading.unpacked(reads.bits[0, head, row - reads.first], 8 * reads.bits.shape[-1])
    pages = len(layer.pages(qhead // layer.group, row, rule.page))
    assert all(page < pages for page in marked), "a page is read that does not exist"
    return marked


def check(layer: reading.Layer, rule: reading.Rule, trace: Trace, record: Record) -> None:
    """What is read, its outputs and its bytes are those of the loops."""
    assert record.reads is not None
    rows = range(trace.prompt_len, trace.n_pos)
    read: dict[tuple[int, int], set[int]] = {}
    expected: list[float] = []
    for row in rows:
        for qhead in range(trace.n_qheads):
            marked = chosen(layer, rule, record.reads, qhead, row)
            wrong = rule.differs(layer, qhead, row, marked, TOLERANCE)
            assert not wrong, wrong
            pages = layer.pages(qhead // layer.group, row, rule.page)
            read[qhead, row] = mine = {p for i in marked for p in pages[i]}
            logs = rule.weights(layer, qhead, row)
            expected += reading.outputs(layer, qhead, row, sorted(mine), logs)
    output = output_error(trace, [record])[0]
    measured = np.stack([output.error, output.mass], -1)[0, :, rows.start :].swapaxes(0, 1)
    np.testing.assert_allclose(measured.ravel(), expected, rtol=1e-5, atol=1e-6)
    resident, taken = reading.bits_of(layer, read, rule)
    size = cache_bytes(trace, [record])[0]
    np.testing.assert_allclose(8 * size[0].sum(), resident)
    np.testing.assert_allclose(8 * size[1].sum(), taken)


@pytest.mark.parametrize(
    "front",
    [x if x in ("any", "snapkv") else pytest.param(x, marks=pytest.mark.deep) for x in FRONT],
)
@pytest.mark.parametrize("name", SPARSE)
def test_reading_equals_the_naive_loop(name, front):
    """Pages that are read, outputs, masses and bytes: alone and behind evictions."""
    for seed in range(examples(34 if front == "any" else 10)):
        check(*generated(name, front, seed))


def test_pages_of_a_layer_need_heads_that_hold_as_many():
    """A layer whose heads hold different numbers of entries has no pages in common."""
    case = make_case("sharp", heads=2, n=24, prompt_len=20, seed=1)
    ragged = policy("adakv+snapkv+quest", window=3, page=2, heads="layer", dense_layers=0)
    with pytest.raises(PolicyError, match="heads of layer 0 hold different numbers"):
        kvsim.replay(case.trace(), ragged, 8)


@pytest.mark.parametrize("name", SPARSE)
def test_no_row_reads_by_what_comes_later(name):
    """Other queries, keys and values behind a row leave what rows up to it read as it was."""
    params: dict[str, Any] = {"page": 2}
    if name == "skip_softmax":
        params["threshold"] = 0.5
    if name == "magicpig":
        params = {"bits": 3, "tables": 12, "sink": 1, "local": 2}
    if name in ("topk", "topp", "double_sparsity", "pqcache"):
        params = {"calibration": "prefix:5"} if name == "double_sparsity" else {}
    if name == "rocketkv":
        params["window"] = 3
    case, other = (
        make_case("sharp", layers=3, heads=2, group=2, n=24, prompt_len=8, dim=8, seed=seed)
        for seed in (1, 2)
    )
    row = 15
    for a, b in ((case.q, other.q), (case.k, other.k), (case.v, other.v)):
        b[:, :, : row + 1] = a[:, :, : row + 1]
    first, second = (
        kvsim.replay(each.trace(), policy(name, **params), 6).reads.bits for each in (case, other)
    )
    np.testing.assert_array_equal(first[:, :, : row - 7], second[:, :, : row - 7])
    assert (first != second).any()


def test_rocketkv_is_snapkv_and_its_own_reading_with_the_split_of_the_paper():
    """A cache of c^r times fewer entries is read with what remains of c, in pages and channels."""
    assert policy("rocketkv").scorer == policy("snapkv", pool_kernel=63).scorer
    assert (
        policy("rocketkv", pool_kernel=5, window=3).scorer
        == policy("snapkv", pool_kernel=5, window=3).scorer
    )
    for prompt, tokens in ((1024, 32), (32768, 256), (131072, 64)):
        c = prompt / tokens
        budget = round(prompt / c ** min(0.2 + 0.06 * math.log2(c), 0.8))
        assert rocketkv.split(prompt, budget) == pytest.approx(tokens, rel=0.01, abs=1)
    case = make_case("normal", n=130, prompt_len=128, dim=16)
    fitted = policy("full+rocketkv").sparse.at(case.trace(), 32)
    assert (fitted.tokens, fitted.page, fitted.channels) == (6, 3, 9)  # 32 / 6 = 5.3, 16 * 3 / 5.3


def test_the_first_layers_are_those_of_the_model():
    """A trace of later layers has none that read everything."""
    case = make_case("normal", n=40, prompt_len=20, layers=2, seed=3)
    trace = case.trace()
    arrays = {name: trace.read(name) for name in ("q", "k", "v")}
    first, later = (
        kvsim.Trace.from_arrays(**arrays, prompt_len=20, rope=trace.ropes, layer_ids=ids)
        for ids in ([0, 1], [4, 5])
    )

    dense = [
        [kvsim.replay(each, policy("quest", page=2), 4).reads.dense(at) for at in (0, 1)]
        for each in (first, later)
    ]

    assert dense == [[True, True], [False, False]]


def test_pqcache_with_a_centroid_for_each_key_reads_the_largest_logits():
    """Between first and last entries; with two centroids a part it reads others."""
    case = make_case("normal", n=30, prompt_len=29, dim=8, seed=4)
    read = {}
    for bits in (1, 6):
        sparse = policy("pqcache", bits=bits, sink=2, local=3, heads="query")
        record = kvsim.replay(case.trace(), sparse, 12)
        read[bits] = reading.unpacked(record.reads.bits[0, 0, 0], 30)
    logits = case.k[0, 0] @ case.q[0, 0, 29]
    largest = sorted(range(2, 26), key=lambda p: -logits[p])[:7]

    assert read[6] == {0, 1, *largest, 26, 27, 28, 29}
    assert read[1] != read[6]
    with pytest.raises(PolicyError, match="8 channels; expected a multiple of 3"):
        kvsim.replay(case.trace(), policy("pqcache", subspaces=3), 12)


def test_magicpig_reads_each_entry_as_often_as_its_weight_says():
    """Over seeds, what is read has the mean weight 1: read with u, divided by u."""
    case = make_case("normal", n=16, prompt_len=15, dim=8, seed=2)
    total, seeds = np.zeros(16), 300
    for seed in range(seeds):
        params = {"bits": 2, "tables": 4, "sink": 1, "local": 2, "dense_layers": 0}
        record = kvsim.replay(case.trace(), policy("magicpig", seed=seed, **params), 4)
        gone, q, k = (torch.from_numpy(x) for x in (record.evicted_at[0], case.q, case.k))
        logs = log_weights(record.reads, 0, slice(15, 16), gone, q[:, :, 15:], k[0])
        read = sorted(reading.unpacked(record.reads.bits[0, 0, 0], 16))
        total[read] += logs[0, 0, read].exp().numpy()

    assert (total[[0, 13, 14, 15]] == seeds).all()
    spread = np.sqrt(np.expm1(logs[0, 0, 1:13].numpy()) / seeds)  # (1 - u) / u, of a mean
    assert (abs(total[1:13] / seeds - 1) < 4 * spread).all()
    assert spread.min() < 0.2


def test_a_stored_record_names_the_piece_that_weights():
    """Its outputs are those of the replay, and an unknown piece is an error."""
    trace = make_case("normal", n=20, prompt_len=10, dim=8, seed=1).trace()
    record = kvsim.replay(trace, policy("magicpig", bits=2, local=2, dense_layers=0), 4)
    document = json.loads(json.dumps(record_document(record)))
    stored = record_of(document, record.evicted_at, record.reads.bits)
    plain = replace(record, reads=replace(record.reads, weighted=False))

    errors = [output_error(trace, [each])[0].error for each in (record, stored, plain)]

    np.testing.assert_array_equal(errors[0], errors[1])
    assert (errors[0] != errors[2]).any()
    document["reads"]["reader"]["name"] = "mine"
    with pytest.raises(PolicyError, match="'mine'"):
        output_error(trace, [record_of(document, record.evicted_at, record.reads.bits)])
