"""What papers print of costs, beside the formulas."""

import math
import re
from pathlib import Path

import papers
import polars as pl
import pytest
from cost_models import BIG, LLAMA_8B, QWEN_7B, K

from kvsim.studies.cost.accounting import decode_ratio
from kvsim.studies.cost.model import GIB

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "cost.md").read_text("utf-8")


def rounded(printed, value, *, cut=True):
    """Whether a value is the printed number when it is rounded, or when it is cut off."""
    whole, digits = re.match(r"(-?[0-9]+)\.?([0-9]*)", printed).groups()
    scale = 10 ** len(digits)
    number = round(float(f"{whole}.{digits}0") * scale)
    return number in (round(value * scale), *[math.floor(value * scale + 1e-9)] * cut)


def asl(layer, n_layers):
    """The prefill ratio of ASL's appendix B.1 at 2048 of 131072."""
    return papers.asl_prefill_ratio(layer, n_layers, 2048, 128 * K, 128)


def overhead(model):
    """M_ASL / M_full of ASL's appendix B.3."""
    shape = (model.n_layers, model.n_heads, model.dim)
    kept, full = (papers.asl_cache_numbers(*shape, n) for n in (2048, 128 * K))
    return (kept + papers.asl_overhead_numbers(8, 128 * K, 7)) / full


def by_bytes(model, passes=1):
    """Time per output token by bytes, 2048 of 131072 entries."""
    return decode_ratio(model, *(passes * model.kv_bytes(n) for n in (2048, 128 * K)))


def ea_share(rows, *, reproject=False):
    """Percent of a forward pass that Expected Attention adds on Llama-3.1-8B."""
    added = papers.ea_overhead_flops(LLAMA_8B, rows, reproject=reproject)
    return 100 * added / papers.ea_prefill_flops(LLAMA_8B, rows)


def gkv_gib(heads, entries, batch=128):
    """GiB of the cache in G-KV's appendix G."""
    return papers.gkv_cache_bytes(28, heads, 128, entries, batch) / GIB


def saved(budget):
    """Percent of the cache that G-KV's appendix G saves at 16k."""
    return 100 * (1 - papers.gkv_cache_share(budget, 128, 16 * K))


def two_pass(layer, n_layers):
    """The prefill ratio of a method with two passes, by the terms of ASL's appendix B.1."""
    return papers.two_pass_prefill_ratio(layer, n_layers, 2048, 128 * K, 128)


def gb(model, entries):
    """GB of the full cache at so many entries."""
    return model.kv_bytes(entries) / 1e9


T4, T5, T7 = "ASL table 4", "ASL table 5", "ASL table 7"
B1, B2, B3 = "ASL B.1", "ASL B.2", "ASL B.3"
G = "G-KV app. G"
EA = "Expected Attention"
HALF = LLAMA_8B.kv_bytes(64 * K), LLAMA_8B.kv_bytes(128 * K)

#: Printed numbers that follow from their formula, rounded or cut off.
FOLLOW = [
    (B1, "prefill, ASL, Llama-3.1-8B (L_sel 23.9)", "0.78", asl(23.9, 32)),
    (B1, "prefill, ASL, Qwen2.5-7B (L_sel 21.6)", "0.81", asl(21.6, 28)),
    (B1, "prefill, FastKV, Llama-3.1-8B (L_sel 15)", "0.5", asl(15, 32)),
    (B1, "prefill, FastKV, Qwen2.5-7B (L_sel 14)", "0.54", asl(14, 28)),
    (T4, "ASL, Qwen", "0.81", asl(21.6, 28)),
    (T4, "FastKV, Llama", "0.50", asl(15, 32)),
    (T4, "FastKV, Qwen", "0.54", asl(14, 28)),
    (T4, "GemFilter, Llama (L_sel 13), two passes", "0.44", two_pass(13, 32)),
    (B2, "token, k / n", "0.016", papers.asl_decode_ratio(2048, 128 * K)),
    (B3, "memory, ASL, Llama", "0.016", overhead(LLAMA_8B)),
    (B3, "memory, ASL, Qwen", "0.016", overhead(QWEN_7B)),
    # from table 7 as rounded; unrounded it is 0.0156
    (B3, "measured memory, Llama", "0.018", 0.3 / 17.1),
    (T7, "full cache, GB at 128k, Llama", "17.1", gb(LLAMA_8B, 128 * K)),
    (T7, "full cache, GB at 128k, Qwen", "7.5", gb(QWEN_7B, 128 * K)),
    (T7, "budget 2048, GB, Llama", "0.3", gb(LLAMA_8B, 2048)),
    # in GiB and for 2^20 tokens; 327.7 GB for 10^6
    (f"{EA} sec. 1", "70B model, a million tokens", "320", BIG.kv_bytes(1 << 20) / GIB),
    # the paper gives no formula for it, and no length
    (f"{EA} sec. 4.4", "FLOPs of scoring in %, 1k, queries reused", "0.5", ea_share(K)),
    (G, "GiB per sequence of 16k", "0.44", gkv_gib(2, 16 * K, 1)),
    (G, "GiB, batch of 128", "56", gkv_gib(2, 16 * K)),
    (G, "budget 512, b + s entries", "2.18", gkv_gib(2, 640)),
    (G, "budget 1024", "3.93", gkv_gib(2, 1152)),
    (G, "budget 2048", "7.43", gkv_gib(2, 2176)),
    (G, "saved in %, budget 512", "96.1", saved(512)),
    (G, "saved in %, budget 1024", "92.9", saved(1024)),
    (G, "saved in %, budget 2048", "86.7", saved(2048)),
    # as 1 / (2 d); exactly (b - w) / (2 b d)
    (G, "scores beside KV in %, budget 2048", "0.39", 100 * papers.gkv_score_share(2048, 16, 128)),
    # in bfloat16; twice that in float32
    (G, "score cache, MiB", "27", papers.gkv_score_bytes(28, 2, 2048, 16, 128) / (1 << 20)),
    # for b entries; the line above it counts b + s, 7.44
    (G, '"KV roughly 7 GB" beside it', "7", gkv_gib(2, 2048)),
    (G, "dense mask, 16 sequences of 4k, GiB", "14", papers.mask_bytes(28, 2, 4 * K, 16) / GIB),
]

#: Value of the formula for each row of docs/printed-numbers.csv, and how it is written there.
DIFFER = {
    (T4, "prefill at 128k, ASL, Llama"): (asl(23.9, 32), "%.2f"),
    (T4, "GemFilter, Qwen (L_sel 14)"): (two_pass(14, 28), "%.2f"),
    (T4, "ASL_2pass, Llama"): (two_pass(23.9, 32), "%.3f"),
    (T4, "ASL_2pass, Qwen"): (two_pass(21.6, 28), "%.2f"),
    (B2, "measured for ASL, Llama, quoted from table 5"): (0.28, "%.2f"),
    (B2, "measured for ASL, Qwen, quoted from table 5"): (0.15, "%.2f"),
    (T5, "token, ASL, Llama, by bytes of weights and cache"): (by_bytes(LLAMA_8B), "%.2f"),
    (T5, "token, ASL, Qwen, by bytes of weights and cache"): (by_bytes(QWEN_7B), "%.2f"),
    (T7, "budget 2048, GB, Qwen"): (gb(QWEN_7B, 2048), "%.3f"),
    (T7, "full cache, GB at 214k, Llama"): (gb(LLAMA_8B, 214_000), "%.1f"),
    (T7, "full cache, GB at 214k, Qwen"): (gb(QWEN_7B, 214_000), "%.1f"),
    (f"{EA} fig. 5a", "saved at 90 %, Llama-3.1-8B, 120k, GB"): (
        *(0.9 * gb(LLAMA_8B, 120 * K), "%.1f"),
    ),
    (
        f"{EA} sec. 4.4",
        "FLOPs of scoring in %, 1k, as the code does it (queries computed twice)",
    ): (ea_share(K, reproject=True), "%.2f"),
    (f"{EA} sec. 4.4", "as the code does it, 4k"): (ea_share(4 * K, reproject=True), "%.2f"),
    (f"{EA} table 3", "generation, 128k, 50 % compression, in %"): (
        *(100 * (decode_ratio(LLAMA_8B, *HALF) - 1), "%.1f"),
    ),
    (f"{EA} table 3", "prefill, 128k, in %"): (ea_share(128 * K, reproject=True), "%.2f"),
}


@pytest.mark.parametrize("claim", FOLLOW, ids=lambda x: f"{x[0]}: {x[1]}")
def test_published_numbers(claim):
    """Each printed number is that of its formula, rounded or cut off."""
    assert rounded(*claim[2:])


def test_printed_numbers_that_differ():
    """docs/printed-numbers.csv has what the formulas give; docs/cost.md counts its rows."""
    rows = pl.read_csv(ROOT / "docs" / "printed-numbers.csv", infer_schema=False).rows()

    assert [(source, quantity) for source, quantity, *_ in rows] == [*DIFFER]
    for source, quantity, printed, shown, kind, _ in rows:
        value, form = DIFFER[source, quantity]
        assert shown == form % value
        assert not rounded(printed, value, cut=kind != "measured")
        assert kind in ("measured", "does not follow")
    n = len(FOLLOW)
    assert f"Of {n + len(rows)} numbers" in PAGE
    assert f"{n} follow" in PAGE
    assert f"other {len(rows)}." in PAGE


def test_gkv_with_the_true_number_of_heads():
    """R1-Distill-Qwen-7B has 4 KV heads, not 2: bytes of appendix G double, shares stay."""
    with_two = [gkv_gib(2, n) for n in (16 * K, 640, 1152, 2176)]
    with_four = [gkv_gib(4, n) for n in (16 * K, 640, 1152, 2176)]

    assert QWEN_7B.n_heads == 4
    assert with_two == [56.0, 2.1875, 3.9375, 7.4375]
    assert with_four == [112.0, 4.375, 7.875, 14.875]
    assert gkv_gib(4, 16 * K, 1) == QWEN_7B.kv_bytes(16 * K) / GIB == 0.875
    assert papers.mask_bytes(28, 4, 4 * K, 16) == 28 * GIB
    assert papers.gkv_score_bytes(28, 4, 2048, 16, 128) / (1 << 20) == 55.5625


@pytest.mark.parametrize(
    ("passes", "model", "expected"), [(3, LLAMA_8B, 0.25), (17, QWEN_7B, 0.12)]
)
def test_tokens_by_bytes_moved(passes, model, expected):
    """The hypotheses about ASL's table 5 that the docs mention give the numbers they say."""
    assert round(by_bytes(model, passes), 2) == expected


@pytest.mark.parametrize(
    ("rows", "reused", "coded"),
    [(K, 0.53, 7.96), (4 * K, 0.44, 7.12), (16 * K, 0.30, 5.06), (128 * K, 0.08, 1.38)],
)
def test_expected_attention_share(rows, reused, coded):
    """FLOPs of Expected Attention by appendix F's formula, queries reused and computed twice."""
    assert round(ea_share(rows), 2) == reused
    assert round(ea_share(rows, reproject=True), 2) == coded
    assert rows > K or (f"{reused:.2f} %" in PAGE and f"{coded:.2f} %" in PAGE)
