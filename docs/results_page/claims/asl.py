"""What the paper on ASL says, arXiv 2601.07667."""

from __future__ import annotations

from collections.abc import Iterator

from results_page.quantities import Floats
from results_page.statistics import Results
from results_page.verdicts import Claim


def selection_claims(r: Results) -> Iterator[Claim]:
    """ASL, S1 to S6, as far as three layers go."""
    budgets, last = r.plan.budgets, r.layers - 1
    few = "in a model of three layers ASL can select behind one layer alone"

    def of(n: int, quantity: str) -> Floats:
        return r.of("layers", n, quantity)

    yield Claim(
        "S1",
        "The variance of ranks falls with depth",
        f"rank variance of two layers, at layer 1 minus at layer {last}",
        {str(n): of(n, "variance 1") - of(n, f"variance {last}") for n in budgets},
    )
    yield Claim(
        "S2",
        "Early layers attend flatly, deep layers to few tokens",
        "entropy of a layer's pooled scores in nats, minus that of the next layer",
        {
            f"layer {at}": r.trace(f"entropy {at}") - r.trace(f"entropy {at + 1}")
            for at in range(last)
        },
    )
    yield Claim(
        "S3",
        "More tokens select a later layer (a smaller threshold does by definition)",
        f"relative variance at layer {last} at a budget, minus that at the smallest budget: above "
        "0 a threshold is passed later",
        {
            str(n): of(n, f"relative {last}") - of(budgets[0], f"relative {last}")
            for n in budgets[1:]
        },
    )
    yield Claim("S4", "A short look-back reacts faster, a late first layer is noisier", why=few)
    yield Claim(
        "S5",
        "Tokens that rank high in one of the layers compared are more than go on, at early layers",
        "tokens compared over tokens that go on, minus 1, at layer 1",
        {str(n): of(n, "union 1") - 1 for n in budgets},
    )
    yield Claim("S6", "Harder tasks select later", why=few)
