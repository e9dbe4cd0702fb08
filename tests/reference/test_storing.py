"""Quantizers against naive float64 loops: when entries are rounded, to what, and what it costs."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.output.bytes import cache_bytes
from kvsim.analysis.output.changed import folds, rounded, stored_after
from kvsim.analysis.output.error import output_error
from kvsim.core.attention import Formula
from kvsim.core.merging import Merger
from kvsim.engine.checks import Setup
from kvsim.engine.replay import run
from kvsim.errors import PolicyError
from kvsim.policies import ACCESS
from kvsim.policies.d2o import D2O
from kvsim.policies.kivi import Kivi
from kvsim.policies.kvquant import KVQuant
from kvsim.policies.llama_cpp import Blocks
from kvsim.policies.lookm import LookM
from kvsim.policies.per_token import BlockFloats, Integers, ShortFloats
from kvsim.policies.think import ThinK
from kvsim.policies.turboquant import TurboQuant, codebook
from kvsim.schema import NEVER
from kvsim.testing import strategies
from reference import merging, storing
from reference.rules import known
from reference.strategies import Setup as Named
from reference.strategies import examples, naive, seeded, setups
from traces import changed

QUIET = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
EVICTIONS = ("snapkv", "tova", "gkv", "streaming_llm", "adakv+snapkv")


def _kivi(bits):
    def draw(data):
        group = data.draw(st.sampled_from((1, 2, 4, 4, 32)))  # two numbers are exact
        window = group * data.draw(st.integers(1, 1 if group > 4 else 3))
        of = Kivi(bits_per_number=bits, group=group, window=window)
        return of, storing.kivi(bits, group, window)

    return draw


def _integers(bits):
    def draw(data):
        window = data.draw(st.integers(0, 5))
        return Integers(bits_per_number=bits, window=window), storing.integers(bits, window)

    return draw


def _floats(*forms):
    def draw(data):
        form, window = data.draw(st.sampled_from(forms)), data.draw(st.integers(0, 5))
        return ShortFloats(format=form, window=window), storing.floats(form, window)

    return draw


def _kvquant(data):
    group = data.draw(st.sampled_from((1, 2, 4)))
    outliers = data.draw(st.sampled_from((0.01, 0.4, 0.25, 0.5)))
    of = KVQuant(group=group, outliers=outliers)
    return of, storing.kvquant(3, group, outliers)


def _turboquant(bits, **variants):
    def draw(data):
        kind = data.draw(st.sampled_from((*variants.values(), {})))
        window = data.draw(st.integers(0, 5))
        names = {"prod": "objective", "hadamard": "rotation"}
        params = {names.get(x, x): x if x in names else True for x in kind}
        params |= {"uniform_values": params.pop("uniform")} if "uniform" in kind else {}
        of = TurboQuant(bits_per_number=bits, window=window, seed=window, **params)
        return of, storing.turboquant(bits, window, window, **kind)

    return draw


def _think(data):
    pruned = data.draw(st.sampled_from((0.3, 0.5, 0.9)))
    window, recent = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    of = ThinK(pruned=pruned, window=window, recent=recent)
    return of, storing.think(pruned, window, recent)


def _nvfp4(data):
    window = data.draw(st.integers(0, 5))
    return BlockFloats(window=window), storing.nvfp4(window)


def _blocks(bits):
    def draw(data):
        k, v = (data.draw(st.sampled_from((16, 4, 8))) for _ in range(2))
        return _apart(Blocks(bits), storing.llama_cpp, k, v)

    return draw


def _apart(quantizer, store, k, v):
    """The quantizer with these bits of keys and values, and its naive store."""
    of = [storing.exact(store(4).due) if bits == 16 else store(bits) for bits in (k, v)]
    return replace(quantizer, k_bits=k, v_bits=v), storing.split(*of)


def _lookm(data):
    merge = data.draw(st.sampled_from(("averaged", "pivotal", "weighted")))
    return LookM(merge), storing.merging(merging.lookm(merge))


def _d2o(data):
    decay = data.draw(st.sampled_from((0.0, 0.5, 0.9)))
    weights = data.draw(st.sampled_from(("softmax", "cosine")))
    fold = merging.d2o(decay, cosine=weights == "cosine")
    return D2O(decay, weights), storing.merging(fold)


VLLM = {"hadamard": True, "unit": True, "uniform": True}
#: Of each a piece and its naive store, drawn; of other names `RULE` of the test beside them.
QUANTIZERS = {
    "kivi": _kivi(2),
    "kivi4": _kivi(4),
    "int8": _integers(8),
    "int4": _integers(4),
    "fp8": _floats("e4m3", "e5m2"),
    "16 bits": _floats("fp16", "bf16"),
    "int2": _integers(2),
    "kvquant": _kvquant,
    "turboquant": _turboquant(2, vllm=VLLM),
    "turboquant@prod": _turboquant(3, prod={"prod": True}),
    "nvfp4": _nvfp4,
    "think": _think,
    "q8_0": _blocks(8),
    "q4_0": _blocks(4),
    "lookm": _lookm,
    "d2o": _d2o,
}
MERGERS = ("lookm", "d2o")
STORED = [name for name, entry in ACCESS.items() if entry.kind != "sparse attention"]
NAMES = [name for name in dict.fromkeys([*QUANTIZERS, *STORED]) if name != "int2"]  # as int4
COARSE = ("kivi", "int2", "int4", "fp8", "16 bits", "nvfp4", "kvquant", "turboquant@prod", "think")


def _evicted(case, rng, share):
    """Entries that leave after some of a few rows, each head by itself."""
    rows = np.array([*np.sort(rng.choice(case.n, min(4, case.n), replace=False)), NEVER])
    shape = case.k.shape[:3]
    at = rng.integers(np.searchsorted(rows, np.arange(case.n)), len(rows), size=shape)
    return rows[np.where(rng.random(shape) < share, at, len(rows) - 1)].astype(np.int32)


def _compare(case, trace, record, store, *, first, tolerance=1e-6, logit=None, sinks=()):
    """Rows of rounding, rounded numbers, error, mass and bytes of a record equal the naive ones."""
    expected = storing.measured(
        store,
        *(case.q, case.k, case.v, record.evicted_at),
        first=first,
        logit=logit or (lambda product: case.scale * product),
        sinks=sinks,
    )
    gone = torch.from_numpy(record.evicted_at)
    merges = isinstance(record.storage, Merger)
    if merges:
        stored = [trace.read(name).clone() for name in ("k", "v")]
        for layer, of_layer in enumerate(gone):
            _ = [*folds(record.storage, stored[0][layer], stored[1][layer], of_layer)]
        for mine, right in zip(stored, (expected.stored.keys, expected.stored.values), strict=True):
            np.testing.assert_allclose(mine.numpy(), right, rtol=tolerance, atol=tolerance)
    for layer, of_layer in enumerate(gone if not merges else ()):
        exact = [trace.read(name)[layer] for name in ("k", "v")]
        both = rounded(record.storage, trace, layer, of_layer, first, exact)
        for which, (stored, name) in enumerate(zip(both, ("keys", "values"), strict=True)):
            after = expected.stored.after[which][layer]
            np.testing.assert_array_equal(stored.after.numpy(), after)
            right = getattr(expected.stored, name)[layer]
            np.testing.assert_allclose(stored.rounded, right, rtol=tolerance, atol=tolerance)
    (result,) = output_error(trace, [record])
    np.testing.assert_allclose(result.error, expected.error, rtol=10 * tolerance, atol=tolerance)
    np.testing.assert_allclose(result.mass, expected.mass, rtol=10 * tolerance, atol=tolerance)
    ((resident, taken),) = cache_bytes(trace, [record])
    if case.prompt_len < case.n:
        held = expected.held[:, case.prompt_len :].mean(-1) / 8
        np.testing.assert_allclose(resident[0].sum(-1), held)
        np.testing.assert_allclose(taken[0].sum(-1), held)
    return expected


@pytest.mark.parametrize("name", NAMES)
def test_storing_equals_the_naive_one(name):
    """In generated cases of any evictions, of the prompt's compression before or after it."""
    seen: Counter[str] = Counter()
    count = 60 if name in ("think", *MERGERS) else 25
    # the Hadamard matrix takes numbers of a grid to the middle between two levels
    kinds = {"kinds": ("normal", "sharp", "sink", "zero_keys")} if name == "turboquant" else {}

    @settings(QUIET, max_examples=examples(count))
    @given(st.data())
    def check(data):
        case = data.draw(
            strategies.cases(min_n=2, max_n=12, max_layers=1, max_heads=2, groups=(1, 2), **kinds)
        )
        quantizer, store = known(QUANTIZERS, name)(data)
        context = data.draw(st.none() | st.integers(1, case.prompt_len))
        compress = data.draw(st.sampled_from(("context", "both"))) if context else "prompt"
        rng = np.random.default_rng(case.seed)
        evicted_at = _evicted(case, rng, data.draw(st.sampled_from((0.0, 0.3, 0.9))))
        trace = case.trace(context)
        record = kvsim.replay(trace, "full", case.n, compress=compress)
        record = replace(record, evicted_at=evicted_at, storage=quantizer)
        expected = _compare(case, trace, record, store, first=(context or case.prompt_len) - 1)
        rounded = expected.stored.after != NEVER
        seen["cases"] += 1
        seen["rounded"] += bool(rounded.any())
        counts = rounded.sum(-1)
        seen["ragged"] += bool((counts != counts[..., :1]).any())

    seeded(name, check)()
    assert seen["cases"] >= count
    assert seen["rounded"] >= 8, seen
    assert seen["ragged"] >= 1, seen


@pytest.mark.parametrize(
    "eviction",
    ["full", "h2o", *(pytest.param(name, marks=pytest.mark.deep) for name in EVICTIONS)],
)
def test_evictions_decide_on_what_is_stored(eviction):
    """Behind every kind of eviction, later scores see rounded keys, of rows as they attended."""

    @settings(QUIET, max_examples=examples(40))
    @given(st.data())
    def check(data):
        sizes = {"min_n": 10, "max_n": 20, "max_heads": 2, "groups": (1, 2)}
        case = data.draw(strategies.cases(kinds=("normal", "sharp", "sink"), **sizes))
        case = replace(case, prompt_len=min(case.prompt_len, case.n - 6))
        interval = data.draw(st.sampled_from((1, 3, 8)))
        setup = replace(data.draw(setups(case, [eviction])), interval=interval)
        names = data.draw(st.sampled_from((COARSE, MERGERS)))
        quantizer, store = QUANTIZERS[data.draw(st.sampled_from(names))](data)
        policy = replace(kvsim.policy(eviction, **setup.params), storage=quantizer)
        schedule = policy.schedule.override(setup.interval, setup.prefill)
        stored = storing.Stored(store, case.q, case.k, case.v, case.prompt_len - 1)
        outcome = naive(case, setup, eviction, store=stored.event)
        record = run(Setup(case.trace(), policy, setup.budget, schedule))
        # rounded numbers tie often
        assert outcome.agrees(record.evicted_at, case.tolerance, ties=False, faint=case.faint)
        _compare(case, case.trace(), record, store, first=case.prompt_len - 1)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_storing_under_a_softcap_and_sinks(name):
    """Rounded keys go through the softcap, and sinks take their share of what is stored."""
    case = strategies.make_case("sharp", layers=2, heads=2, group=2, n=18, prompt_len=5, seed=7)
    sinks = (0.5, -1.0, 2.0, 0.0)
    formula = Formula(case.scale, softcap=3.0, sinks=sinks)
    trace = changed(case.trace(), prompt_len=5, formulas=[formula] * 2)

    class Fixed:
        """The last but one of what could be drawn, which rounds some of few entries."""

        def draw(self, strategy):
            return strategy.elements[-2] if hasattr(strategy, "elements") else 2

    quantizer, store = known(QUANTIZERS, name)(Fixed())
    record = kvsim.replay(trace, "full", case.n)
    for share in (0.4, 0.0):
        evicted_at = _evicted(case, np.random.default_rng(1), share)
        expected = _compare(
            case,
            trace,
            replace(record, evicted_at=evicted_at, storage=quantizer),
            store,
            first=4,
            logit=lambda product: 3.0 * np.tanh(case.scale * product / 3.0),
            sinks=sinks,
        )
    assert name in MERGERS or expected.error.max() > 1e-4  # by rounding alone


#: Parameters of quantizers, and the naive store of some bits; few and many bits, if not any.
APART = {
    "int8": ({"window": 2}, lambda bits: storing.integers(bits, 2)),
    "kivi": ({"group": 2, "window": 4}, lambda bits: storing.kivi(bits, 2, 4)),
    "kvquant": ({"group": 2}, lambda bits: storing.kvquant(bits, 2, 0.01)),
    "turboquant": ({}, lambda bits: storing.turboquant(bits, 0, 0)),
    "q8_0": ({}, storing.llama_cpp),
    "fp8": ({}, lambda _: storing.floats("e4m3", 0)),
    "nvfp4": ({}, lambda _: storing.nvfp4(0)),
}
BITS = {"q8_0": (4, 8), "turboquant": (2, 3), "fp8": (8, 8), "nvfp4": (4, 4)}


@pytest.mark.parametrize("name", APART)
def test_bits_of_keys_and_values_by_layer_equal_the_naive_ones(name):
    """Events decide on them, and errors and bytes are theirs."""
    params, store = APART[name]
    quantizer, (few, many) = ACCESS[name].piece(**params), BITS.get(name, (2, 7))
    plans = (few, many, many, 16), (16, few, few, many)
    stores = [_apart(quantizer, store, k, v)[1] for k, v in zip(*plans, strict=True)]
    store = replace(stores[0], layers=tuple(stores))
    texts = f"{few}/{many}x2/16", f"16/{few}x2/{many}"
    sizes = {"layers": 4, "heads": 1, "group": 2, "n": 18, "prompt_len": 8}
    case = strategies.make_case("sharp", **sizes, seed=6)
    setup = Named(
        f"h2o+{name}", dict(zip(("k_bits", "v_bits"), texts, strict=True)), 9, 4, prefill=True
    )
    policy = kvsim.policy(setup.policy, **setup.params, **params)
    assert kvsim.policy(policy.name, **policy.params) == policy
    record = run(Setup(case.trace(), policy, setup.budget, setup.schedule).checked())
    stored = storing.Stored(store, case.q, case.k, case.v, case.prompt_len - 1)
    outcome = naive(case, replace(setup, params={}), "h2o", store=stored.event)
    assert outcome.agrees(record.evicted_at, case.tolerance, ties=False, faint=case.faint)
    first = replace(policy, storage=policy.storage.of_layer(0))
    other = run(Setup(case.trace(), first, setup.budget, setup.schedule).checked()).evicted_at
    coarse = name in ("int8", "turboquant", "q8_0")
    assert np.array_equal(other, record.evicted_at) != coarse  # with the bits of one layer
    _compare(case, case.trace(), record, store, first=case.prompt_len - 1)


def test_bits_that_a_quantizer_or_a_trace_does_not_have_are_refused():
    """Other numbers, texts that are no plan, and plans of another number of layers."""
    for bits in (3, "8/", "8x", "x2", "8x0", "8,4", "8/5", "eight"):
        with pytest.raises(PolicyError, match=r"k_bits is .*; expected 4, 8, 16"):
            kvsim.policy("q8_0", k_bits=bits)
    trace = strategies.make_case("normal", layers=2, n=6, prompt_len=3).trace()
    with pytest.raises(PolicyError, match="a plan of 3 layers; expected a plan of 2"):
        kvsim.replay(trace, kvsim.policy("int8", v_bits="8x2/4"), 6)


def test_kivi_stores_as_its_release_does():
    """Of a prompt of 300, 256 keys and 172 values are rounded; then 128 keys at once, one value."""
    gone = torch.full((1, 1, 400), NEVER, dtype=torch.int32)
    keys, values = (stored_after(gone, clock, 299)[0, 0] for clock in Kivi().clocks)
    assert (keys == 299).sum() == 256
    assert (keys == 383).nonzero().flatten().tolist() == list(range(256, 384))
    assert (keys == NEVER).sum() == 16
    assert (values == 299).sum() == 172
    assert values[172:272].tolist() == list(range(300, 400))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "quantizer",
    [Kivi(group=2, window=2), Kivi(bits_per_number=4, group=2, window=2), Integers(), Integers(4)]
    + [ShortFloats(form) for form in storing.FORMATS]
    + [BlockFloats(), KVQuant(group=2, outliers=0.5)]
    + [TurboQuant(), TurboQuant(objective="prod"), TurboQuant(rotation="hadamard", unit=True)]
    + [TurboQuant(1, "prod", unit=True)],
    ids=repr,
)
def test_no_number_becomes_nan(quantizer, dtype):
    """Constant groups stay as they are but in a codebook; all numbers stay numbers."""
    constants = (0.0, -0.0) if isinstance(quantizer, TurboQuant) else (0.0, -0.0, 1.5, -3.0)
    for value in constants:
        alike = torch.full((2, 2, 4), value, dtype=dtype)
        torch.testing.assert_close(quantizer.keys(alike), alike)
        torch.testing.assert_close(quantizer.values(alike[:, :1]), alike[:, :1])
    wild = torch.tensor([1e-45, -1e-38, 1e38, -1e38, 1e30, 0.0, 3.0, -7e-41], dtype=dtype)
    for x in (wild.view(1, 2, 4), wild.view(2, 1, 4) * 1e-7, wild.view(4, 2, 1)):
        groups = x if x.shape[1] == quantizer.clocks[0].group else x.reshape(-1, 1, x.shape[-1])
        assert quantizer.keys(groups).isfinite().all()
        assert quantizer.values(x.reshape(-1, 1, x.shape[-1])[..., :1]).isfinite().all()


def test_short_floats_saturate():
    """What is beyond the largest number of a format becomes that number."""
    x = torch.tensor([[[1e6, -1e6, 448.0, 449.0]]])
    assert ShortFloats().keys(x).flatten().tolist() == [448.0, -448.0, 448.0, 448.0]
    x = torch.tensor([[[1e6, -1e6]]])
    assert ShortFloats("e5m2").values(x).flatten().tolist() == [57344.0, -57344.0]
    assert ShortFloats("fp16").values(x).flatten().tolist() == [65504.0, -65504.0]


def test_levels_of_turboquant_are_those_of_closed_forms():
    """Of an even distribution evenly spaced; one bit has the mean size of a coordinate."""
    for bits in (1, 2, 4):  # a coordinate of a random vector of three is even on [-1, 1]
        even = (2 * np.arange(2**bits) + 1) / 2**bits - 1
        np.testing.assert_allclose(codebook(3, bits), even, atol=1e-8)
    for dim in (2, 16, 64, 128):
        size = math.gamma(dim / 2) / math.gamma((dim + 1) / 2) / math.sqrt(math.pi)
        np.testing.assert_allclose(codebook(dim, 1), [-size, size], atol=1e-8)
    # table 1 of Max (1960) for the normal distribution, the limit
    normal = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]
    np.testing.assert_allclose(codebook(4096, 4)[8:] * 64, normal, rtol=2e-3)


def test_turboquant_distorts_as_its_paper_says_and_its_products_are_unbiased():
    """Mean squared errors of section 3.1; the mean over seeds of `prod` is the vector itself."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((500, 1, 64)))
    for bits, error in ((1, 0.36), (2, 0.117), (3, 0.034), (4, 0.009)):  # 0.03 is rounded down
        lost = (TurboQuant(bits_per_number=bits).keys(x) - x).square().sum(-1)
        assert (lost / x.square().sum(-1)).mean() == pytest.approx(error, rel=0.06)
    few = x[:100, :, :16]
    kinds = {
        kind: torch.stack([TurboQuant(2, kind, seed=seed).keys(few) for seed in range(100)]).mean(0)
        for kind in ("mse", "prod")
    }
    size = few.square().sum(-1)
    shrunk, unbiased = ((kinds[kind] * few).sum(-1) / size for kind in ("mse", "prod"))
    assert unbiased.mean() == pytest.approx(1, abs=0.01)
    assert shrunk.mean() < 0.9  # levels are means, and shorter than what they stand for


def test_quantizers_refuse_heads_that_their_blocks_do_not_divide():
    """24 channels are no whole blocks of NVFP4, and have no Hadamard matrix."""
    trace = strategies.make_case("normal", n=6, dim=24, prompt_len=3).trace()
    with pytest.raises(PolicyError, match="24 channels; expected a multiple of 16"):
        kvsim.replay(trace, "nvfp4", 6)
    with pytest.raises(PolicyError, match="24 channels; expected a multiple of 32"):
        kvsim.replay(trace, "turboquant@vllm", 6)
    assert kvsim.replay(trace, "turboquant", 6).storage == TurboQuant()


def test_heads_of_the_release_of_d2o_share_a_threshold():
    """Heads that are alike merge as each alone; another head changes what a head merges."""
    rng = np.random.default_rng(3)
    keys = torch.from_numpy(rng.standard_normal((1, 40, 8)))
    other = torch.from_numpy(rng.standard_normal((1, 40, 8)))
    gone = torch.from_numpy(np.where(rng.random(40) < 0.5, 39, NEVER))

    def merged(heads, across):
        stored = torch.cat(heads)
        merger = D2O(weights="cosine", across_heads=across)
        _ = [*folds(merger, stored, stored.clone(), gone.expand(len(stored), -1))]
        return stored

    alone = merged([keys], across=False)
    for head in merged([keys, keys], across=True):
        torch.testing.assert_close(head, alone[0])
    assert torch.equal(merged([keys, other], across=False)[0], alone[0])
    assert not torch.equal(merged([keys, other], across=True)[0], alone[0])

    merger = D2O(weights="cosine", across_heads=True)
    cosines = torch.tensor([[0.9, 0.2, 0.4], [0.1, 0.6, 0.0]])
    leaves = torch.tensor([[True, True, True], [True, True, False]])
    for before, threshold in ((torch.nan, 2.2 / 5), (0.1, (0.1 + 2.2 / 5) / 2)):
        merges, least = merger.merging(cosines, leaves, torch.full((2,), before))
        torch.testing.assert_close(least, torch.full((2,), threshold))
        # means over heads of entries of one rank: 0.5, 0.4, 0.4
        assert torch.equal(merges, leaves & (torch.tensor([0.5, 0.4, 0.4]) >= threshold))
