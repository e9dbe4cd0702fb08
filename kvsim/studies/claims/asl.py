"""Claims of the paper on ASL, arXiv 2601.07667: S1 to S6."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.studies.claims.claim import ALL, Claim
from kvsim.studies.claims.evidence import Cells, Evidence, untraced

#: What claims on the selection layer need.
_NEVER = untraced("selection_layer", " (in three layers ASL selects nowhere)")


def asl(e: Evidence) -> Iterator[Claim]:
    """ASL: how layers rank a prompt, and where that selects; properties of the traces."""
    name, says = "rank_variance", "The variance of ranks falls with depth"
    tested = "rank variance, mean over the first half of the layers that have one, minus the second"
    cells = {variant: _halves(e, name, variant) for variant in e.variants(name)}
    yield Claim("S1", says, tested, cells, needs=untraced(name, " of at least three layers"))
    name, says = "layer_entropy", "Early layers attend flatly, deep layers to few tokens"
    tested = "entropy of a layer's pooled scores in nats, minus that of the next layer"
    cells = {
        f"layer {a}": e.value(name, layer=a) - e.value(name, layer=b)
        for a, b in pairwise(e.layers(name))
    }
    yield Claim("S2", says, tested, cells, needs=untraced(name))
    yield from _later(e)
    yield from _sensitivity(e)
    name = "rank_union"
    says = (
        "Tokens that rank high in one of the layers compared are more than go on, at early layers"
    )
    tested = "tokens compared over tokens that go on, minus 1, at the first layer that has them"
    cells = {
        variant: e.value(name, variant, layer) - 1
        for variant in e.variants(name)
        for layer in e.layers(name, variant)[:1]
    }
    yield Claim("S5", says, tested, cells, needs=untraced(name))
    needs = "needs a comparison of prompts with each other; claims are tested within prompts"
    yield Claim("S6", "Harder tasks select later", needs=needs)


def _halves(e: Evidence, metric: str, variant: str) -> Floats:
    """The mean over the earlier layers minus that over as many later ones; [prompt]."""
    layers = e.layers(metric, variant)
    half = len(layers) // 2
    if not half:
        return np.full(len(e.traces), np.nan)
    first, last = (
        np.mean([e.value(metric, variant, layer) for layer in part], axis=0)
        for part in (layers[:half], layers[-half:])
    )
    fall: Floats = first - last
    return fall


def _later(e: Evidence) -> Iterator[Claim]:
    """S3: when ASL selects a layer."""
    relative = sorted(e.variants("rank_relative"), key=_tokens)
    cells = Cells()
    for variant in relative[1:]:
        for last in e.layers("rank_relative", variant)[-1:]:
            many, few = (e.value("rank_relative", x, last) for x in (variant, relative[0]))
            cells[f"{variant} against {relative[0]}"] = many - few
    says = "With more tokens a threshold is passed later"
    tested = "relative variance at the last layer with more tokens, minus that with the fewest"
    needs = untraced("rank_relative", " for two numbers of tokens")
    yield Claim("S3", says, tested, cells, needs=needs)
    usual = {key[:2]: layer for key, layer in _selections(e).items() if not key[2]}
    least = min((k for k, _, _ in _selections(e)), key=_tokens, default="")
    taus = sorted({tau for _, tau, _ in _selections(e)}, key=float)
    by_tokens, by_tau = Cells(), Cells()
    for (k, tau), layer in usual.items():
        if k != least:
            by_tokens[f"{k} against {least}, tau={tau}"] = layer - usual[least, tau]
        if tau == taus[0] != taus[-1]:
            by_tau[f"{k}, tau={tau} against {taus[-1]}"] = layer - usual[k, taus[-1]]
    says = "... and a later layer is selected"
    tested = "selection layer with more tokens, minus that with the fewest"
    yield Claim("S3", says, tested, by_tokens, needs=_NEVER)
    says = "A smaller threshold selects a later layer"
    tested = "selection layer at the smallest threshold, minus that at the largest"
    yield Claim("S3", says, tested, by_tau, ALL, needs=_NEVER)


def _sensitivity(e: Evidence) -> Iterator[Claim]:
    """S4: the shortest look-back and the latest first layer, beside the rule's own."""
    chosen = _selections(e)

    def beside(name: str, extreme: Callable[..., float]) -> dict[str, tuple[Floats, Floats]]:
        rules = [key for key in chosen if key[2].startswith(name) and (*key[:2], "") in chosen]
        at = extreme((_tokens(rule) for _, _, rule in rules), default=0)
        return {
            f"{k}, {rule}": (chosen[k, tau, rule], chosen[k, tau, ""])
            for k, tau, rule in rules
            if _tokens(rule) == at
        }

    faster = {cell: own - layer for cell, (layer, own) in beside("look_back=", min).items()}
    tested = "selection layer with ASL's own look-back, minus that with the shortest"
    yield Claim("S4", "A short look-back reacts faster", tested, faster, needs=_NEVER)
    pairs = beside("first_layer=", max)
    noisier = {cell: _spread(layer) - _spread(own) for cell, (layer, own) in pairs.items()}
    tested = (
        "distance of a prompt's selection layer from the mean over prompts, with the latest first "
        "layer, minus with ASL's own"
    )
    yield Claim("S4", "A late first layer is noisier", tested, noisier, needs=_NEVER)


def _selections(e: Evidence) -> dict[tuple[str, str, str], Floats]:
    """Selection layers by k, tau and what else a variant names; [prompt]."""
    layers = {}
    for variant in e.variants("selection_layer"):
        k, tau, *more = variant.split(",")
        layer = e.value("selection_layer", variant)
        layers[k, tau.removeprefix("tau="), ",".join(more)] = layer
    return layers


def _spread(layer: Floats) -> Floats:
    finite = layer[~np.isnan(layer)]
    return np.abs(layer - finite.mean()) if len(finite) else layer


def _tokens(variant: str) -> float:
    """The number in `k=25%` and its like."""
    return float(variant.partition("=")[2].rstrip("%"))
