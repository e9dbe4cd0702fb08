"""Claims of the paper on ASL, arXiv 2601.07667: S1 to S6."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats
from kvsim.studies.claims.claim import Claim
from kvsim.studies.claims.evidence import Cases, Evidence


def asl(e: Evidence) -> Iterator[Claim]:
    """ASL: how layers rank a prompt, and where that selects; properties of the traces."""
    name, says = "rank_variance", "The variance of ranks falls with depth"
    tested = "rank variance, mean over the first half of the layers that have one, minus the second"
    cases = {variant: _halves(e, name, variant) for variant in e.variants(name)}
    yield Claim("S1", says, tested, cases, needs=e.untraced(name, "of at least three layers"))
    name, says = "layer_entropy", "Early layers attend flatly, deep layers to few tokens"
    tested = "entropy of a layer's pooled scores in nats, minus that of the next layer"
    cases = {
        f"layer {a}": e.value(name, layer=a) - e.value(name, layer=b)
        for a, b in pairwise(e.layers(name))
    }
    yield Claim("S2", says, tested, cases, needs=e.untraced(name))
    yield from _later(e)
    yield from _sensitivity(e)
    name = "rank_union"
    says = (
        "Tokens that rank high in one of the layers compared are more than go on, at early layers"
    )
    tested = "tokens compared over tokens that go on, minus 1, at the first layer that has them"
    cases = {
        variant: e.value(name, variant, layer) - 1
        for variant in e.variants(name)
        for layer in e.layers(name, variant)[:1]
    }
    yield Claim("S5", says, tested, cases, needs=e.untraced(name))
    yield _by_level(e)


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
    cases: Cases = {}
    for variant in relative[1:]:
        for last in e.layers("rank_relative", variant)[-1:]:
            many, few = (e.value("rank_relative", x, last) for x in (variant, relative[0]))
            cases[f"{variant} against {relative[0]}"] = many - few
    says = "With more tokens a threshold is passed later"
    tested = "relative variance at the last layer with more tokens, minus that with the fewest"
    needs = e.untraced("rank_relative", "for two numbers of tokens")
    yield Claim("S3", says, tested, cases, needs=needs)
    usual = {key[:2]: layer for key, layer in _selections(e).items() if not key[2]}
    least = min((k for k, _, _ in _selections(e)), key=_tokens, default="")
    taus = sorted({tau for _, tau, _ in _selections(e)}, key=float)
    by_tokens: Cases = {}
    by_tau: Cases = {}
    for (k, tau), layer in usual.items():
        if k != least:
            by_tokens[f"{k} against {least}, tau={tau}"] = layer - usual[least, tau]
        if tau == taus[0] != taus[-1]:
            by_tau[f"{k}, tau={tau} against {taus[-1]}"] = layer - usual[k, taus[-1]]
    says = "... and a later layer is selected"
    tested = "selection layer with more tokens, minus that with the fewest"
    tested += "; prompts that select at both"
    yield Claim("S3", says, tested, by_tokens, needs=_never(e))
    says = "A smaller threshold selects a later layer"
    tested = "selection layer at the smallest threshold, minus that at the largest"
    tested += "; prompts that select at both"
    yield Claim("S3", says, tested, by_tau, needs=_never(e))


def _sensitivity(e: Evidence) -> Iterator[Claim]:
    """S4: the look-back and the first layer of the rule, beside its own."""
    chosen = _selections(e)
    backs, firsts = (
        {key: layer for key, layer in chosen.items() if key[2].startswith(f"{name}=")}
        for name in ("look_back", "first_layer")
    )
    shortest = min((_tokens(key[2]) for key in backs), default=0)
    latest = max((_tokens(key[2]) for key in firsts), default=0)
    faster = {
        f"{k}, {rule}": chosen[k, tau, ""] - layer
        for (k, tau, rule), layer in backs.items()
        if (k, tau, "") in chosen and _tokens(rule) == shortest
    }
    noisier = {
        f"{k}, {rule}": _spread(layer) - _spread(chosen[k, tau, ""])
        for (k, tau, rule), layer in firsts.items()
        if (k, tau, "") in chosen and _tokens(rule) == latest
    }
    tested = "selection layer with ASL's own look-back, minus that with the shortest"
    yield Claim("S4", "A short look-back reacts faster", tested, faster, needs=_never(e))
    tested = (
        "distance of a prompt's selection layer from the mean over prompts, with the latest first "
        "layer, minus with ASL's own"
    )
    yield Claim("S4", "A late first layer is noisier", tested, noisier, needs=_never(e))


def _by_level(e: Evidence) -> Claim:
    """S6: by the level of prompts, which says how hard they are."""
    level = e.label("level").cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy()
    cases = {}
    for (k, tau, more), layer in _selections(e).items():
        both = ~np.isnan(level + layer)
        if not more and len(np.unique(level[both])) > 1:
            off = level - level[both].mean()
            cases[f"{k}, tau={tau}"] = off * (layer - layer[both].mean())
    tested = "covariance over prompts of the level of a prompt with its selection layer"
    needs = f"{_never(e)}, of several levels (kvsim prompts --level)"
    return Claim("S6", "Harder tasks select later", tested, cases, needs=needs)


def _selections(e: Evidence) -> dict[tuple[str, str, str], Floats]:
    """Selection layers by k, tau and what else a variant names; [prompt]."""
    layers = {}
    for variant in e.variants("selection_layer"):
        k, tau, *more = variant.split(",")
        layer = e.value("selection_layer", variant)
        layers[k, tau.removeprefix("tau="), ",".join(more)] = layer
    return layers


def _never(e: Evidence) -> str:
    return e.untraced("selection_layer", "(ASL selects nowhere in them, as in three layers)")


def _spread(layer: Floats) -> Floats:
    finite = layer[~np.isnan(layer)]
    return np.abs(layer - finite.mean()) if len(finite) else layer


def _tokens(variant: str) -> float:
    """The number in `k=25%` and its like."""
    return float(variant.partition("=")[2].rstrip("%"))
