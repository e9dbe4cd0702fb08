"""What ASL's test costs beside the attention that it may save, measured in one process.

    python tests/benchmarks/layers.py            # 32 layers, 16,384 tokens: about a minute
    python tests/benchmarks/layers.py --smallest # a second; what the test suite runs

The test is what `asl` does with pooled scores [layers, tokens - window], layer by layer: ranks,
union of the first k over the look-back, mean variance. The scores themselves come from attention
weights that SnapKV computes in any case. Beside it: one layer of full causal attention in fp32 with
the shape of Llama-3.1-8B (32 query heads, 8 KV heads, dim 128), measured on one KV head and its
four query heads and multiplied by 8.

With `--doc docs/layers.md` the report is put into that page.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvsim.policies.asl import ASL, rank_variance, ranks

sys.path.append(str(Path(__file__).parent))
from replay import best, put

BEGIN, END = "<!-- begin benchmark -->", "<!-- end benchmark -->"


@dataclass(frozen=True)
class Depth:
    """Shapes of one run."""

    layers: int
    tokens: int
    budget: int
    heads: int
    group: int
    dim: int
    repeats: int


AIM = Depth(layers=32, tokens=16384, budget=2048, heads=8, group=4, dim=128, repeats=5)
SMALLEST = Depth(layers=6, tokens=256, budget=64, heads=2, group=2, dim=16, repeats=2)


def scores(size: Depth, window: int) -> torch.Tensor:
    """Pooled scores whose order settles with depth: the worst case, tested in every layer."""
    generator = torch.Generator().manual_seed(0)
    m = size.tokens - window
    same = torch.rand(m, generator=generator)
    own = torch.rand(size.layers, m, generator=generator)
    near = torch.linspace(0, 0.9, size.layers).unsqueeze(-1)
    return near * same + (1 - near) * own


def compare_all(pooled: torch.Tensor, rule: ASL, k: int) -> list[float]:
    """Ranks, union and variance of every layer, as a prefill meets them."""
    first, back = rule.rule(len(pooled))
    recent: tuple[torch.Tensor, ...] = ()
    found = []
    for layer, of_layer in enumerate(pooled):
        recent = (*recent, ranks(of_layer))[-back:]
        if layer >= first:
            found.append(rank_variance(torch.stack(recent), k))
    return found


def attend(size: Depth) -> float:
    """Seconds of one layer of causal attention, all heads."""
    torch.manual_seed(0)
    q = torch.randn(1, size.group, size.tokens, size.dim)
    k, v = torch.randn(2, 1, 1, size.tokens, size.dim).expand(-1, -1, size.group, -1, -1)
    return size.heads * best(
        lambda: scaled_dot_product_attention(q, k, v, is_causal=True), max(1, size.repeats // 2)
    )


def run(size: Depth) -> tuple[dict[str, float], list[str]]:
    """Ratios by name, and the report line by line."""
    rule = ASL()
    pooled = scores(size, rule.window)
    k = size.budget - rule.window
    first, back = rule.rule(size.layers)
    attention = attend(size)
    with torch.inference_mode():
        whole = best(lambda: compare_all(pooled, rule, k), size.repeats)
        ranked = ranks(pooled)
        ranking = best(lambda: ranks(pooled[-1]), size.repeats)
        comparing = best(lambda: rank_variance(ranked[-back:], k), size.repeats)
    attention = min(attention, attend(size))
    ratios = {
        "all layers": whole / attention,
        "one layer": (ranking + comparing) / attention,
        "of all attention": whole / (size.layers * attention),
    }
    # q.k and weights.v of the keys that a row sees
    products = 2 * size.heads * size.group * size.dim * size.tokens * (size.tokens + 1)
    name = f"{size.heads} x that of {size.group} query heads"
    lines = [
        f"threads {torch.get_num_threads()}, torch {torch.__version__}",
        f"{size}",
        (
            f"causal attention of one layer, fp32: {attention:.2f} s ({name}), "
            f"{products / attention / 1e9:.0f} Gop/s"
        ),
        (
            f"ASL's test in all {size.layers} layers: {whole * 1e3:.1f} ms, "
            f"{ratios['all layers']:.2%} of one layer's attention, "
            f"{ratios['of all attention']:.3%} of all layers'"
        ),
        (
            f"in one layer: ranks {ranking * 1e3:.2f} ms, union and variance "
            f"{comparing * 1e3:.2f} ms, {ratios['one layer']:.3%} of its attention "
            f"(first tested layer {first}, look-back {back}, k = {k})"
        ),
    ]
    return ratios, lines


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smallest", action="store_true", help="a second instead of a minute")
    parser.add_argument("--doc", type=Path, help="put the report into this page, between its marks")
    options = parser.parse_args()
    _, lines = run(SMALLEST if options.smallest else AIM)
    print("\n".join(lines))
    if options.doc:
        put(options.doc, lines, BEGIN, END)


if __name__ == "__main__":
    main()
