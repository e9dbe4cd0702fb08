"""Claims of the paper on ASL, arXiv 2601.07667: S1 to S6."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.studies.claims.claim import ALL, Claim
from kvsim.studies.claims.evidence import Cells, Evidence, untraced

#: The missing input of claims on the selection layer.
_NEVER = untraced("selection_layer", " (in three layers ASL selects nowhere)")


def asl(e: Evidence) -> Iterator[Claim]:
    """ASL: how layers rank a prompt, and where that selects; properties of the traces."""
    name, says = "rank_variance", "The variance of ranks falls with depth"
    tested = "rank variance, mean over the first half of the layers that have one, minus the second"
    cells = Cells()
    for variant in e.variants(name):
        values = np.array([e.value(name, variant, layer) for layer in e.layers(name, variant)])
        if half := len(values) // 2:
            cells[variant] = values[:half].mean(0) - values[-half:].mean(0)
    yield Claim("S1", says, tested, cells, needs=untraced(name, " of at least three layers"))
    name, says = ("layer_entropy", "Early layers attend flatly, deep layers to few tokens")
    tested = "entropy of a layer's pooled scores in nats, minus that of the next layer"
    cells = {
        f"layer {a}": e.value(name, layer=a) - e.value(name, layer=b)
        for a, b in pairwise(e.layers(name))
    }
    yield Claim("S2", says, tested, cells, needs=untraced(name))
    yield from _selection(e)
    name = "rank_union"
    says = "In early layers, more tokens rank high in one of the layers compared than propagate"
    tested = "tokens compared over tokens that go on, minus 1, at the first layer that has them"
    cells = {
        variant: e.value(name, variant, layer) - 1
        for variant in e.variants(name)
        for layer in e.layers(name, variant)[:1]
    }
    yield Claim("S5", says, tested, cells, needs=untraced(name))
    needs = "needs a comparison of prompts with each other; claims are tested within prompts"
    yield Claim("S6", "Harder tasks select later", needs=needs)


def _selection(e: Evidence) -> Iterator[Claim]:
    """S3 and S4: when ASL selects a layer, by its own rule and by others."""
    name, cells = "rank_relative", Cells()
    fewest, *more = sorted(e.variants(name), key=_number) or [""]
    for variant in more:
        for last in e.layers(name, variant)[-1:]:
            many, few = (e.value(name, x, last) for x in (variant, fewest))
            cells[f"{variant} against {fewest}"] = many - few
    says = "With more tokens a threshold is passed later"
    tested = "relative variance at the last layer with more tokens, minus that with the fewest"
    yield Claim("S3", says, tested, cells, needs=untraced(name, " for two numbers of tokens"))

    # by k, tau and the other parts of a variant's name
    chosen: dict[tuple[str, str, str], Floats] = {}
    for variant in e.variants("selection_layer"):
        k, tau, *others = variant.split(",")
        layer = e.value("selection_layer", variant)
        chosen[k, tau.removeprefix("tau="), ",".join(others)] = layer
    least = min((k for k, _, _ in chosen), key=_number, default="")
    taus = sorted({tau for _, tau, _ in chosen}, key=float)
    by_tokens, by_tau = Cells(), Cells()
    for (k, tau, rule), layer in chosen.items():
        if k != least and not rule:
            by_tokens[f"{k} against {least}, tau={tau}"] = layer - chosen[least, tau, ""]
        if tau == taus[0] != taus[-1] and not rule:
            by_tau[f"{k}, tau={tau} against {taus[-1]}"] = layer - chosen[k, taus[-1], ""]
    tested = "selection layer with more tokens, minus that with the fewest"
    yield Claim("S3", "With more tokens a later layer is selected", tested, by_tokens, needs=_NEVER)
    says = "A smaller threshold selects a later layer"
    tested = "selection layer at the smallest threshold, minus that at the largest"
    yield Claim("S3", says, tested, by_tau, ALL, needs=_NEVER)

    def beside(name: str, extreme: Callable[..., float], own: Callable[[Floats], Floats]) -> Cells:
        """ASL's own rule minus the extreme of one parameter."""
        rules = [key for key in chosen if key[2].startswith(name) and (*key[:2], "") in chosen]
        at = extreme((_number(rule) for _, _, rule in rules), default=0)
        return {
            f"{k}, {rule}": own(chosen[k, tau, ""]) - own(chosen[k, tau, rule])
            for k, tau, rule in rules
            if _number(rule) == at
        }

    tested = "selection layer with ASL's own look-back, minus that with the shortest"
    cells = beside("look_back=", min, np.asarray)
    yield Claim("S4", "A short look-back reacts faster", tested, cells, needs=_NEVER)
    tested = (
        "distance of a prompt's selection layer from the mean over prompts, with the latest first "
        "layer, minus with ASL's own"
    )
    cells = {name: -x for name, x in beside("first_layer=", max, _spread).items()}
    yield Claim("S4", "A late first layer is noisier", tested, cells, needs=_NEVER)


def _spread(layer: Floats) -> Floats:
    finite = layer[~np.isnan(layer)]
    return np.abs(layer - finite.mean()) if len(finite) else layer


def _number(variant: str) -> float:
    return float(variant.partition("=")[2].rstrip("%"))
