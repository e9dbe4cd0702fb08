"""Metrics of how layers rank the tokens of a prompt, and where ASL selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.definition import Cells, Metric
from kvsim.analysis.subject import Analysis
from kvsim.policies.asl import Selecting
from kvsim.studies.layers.ranking import Curve, curves

#: ASL's thresholds, Table 9.
TAUS = (0.2, 0.3, 0.4, 0.5, 0.6)


def _by_layer(
    values: Callable[[Curve], Floats], chance: Callable[[Curve], float] | None = None
) -> Callable[[Analysis], Iterator[Cells]]:
    """Values [L] of a curve at each k, of layers that have one; none if the prompt fits."""

    def cells(analysis: Analysis) -> Iterator[Cells]:
        for k, curve in analysis.of(curves).items():
            if curve.fits:
                continue
            numbers = values(curve)
            random = None if chance is None else np.array([chance(curve)])
            for layer in np.flatnonzero(~np.isnan(numbers)).tolist():
                yield Cells(layer, numbers[layer].reshape(1), variant=f"k={k}", chance=random)

    return cells


def _entropy(analysis: Analysis) -> Iterator[Cells]:
    for curve in [*analysis.of(curves).values()][:1]:
        for layer, nats in enumerate(curve.ranking.entropy()):
            yield Cells(layer, nats.reshape(1))


def _selection(analysis: Analysis) -> Iterator[Cells]:
    for k, curve in analysis.of(curves).items():
        rule = curve.rule
        for tau in dict.fromkeys((*TAUS, rule.tau)):
            yield _number(curve.selected(tau), f"k={k},tau={tau:g}")
        for name, changed in _other_rules(rule, curve.n_layers):
            other = curve.ranking.curve(curve.budget, changed)
            yield _number(other.selected(changed.tau), f"k={k},tau={rule.tau:g},{name}")


def _other_rules(rule: Selecting, n_layers: int) -> Iterator[tuple[str, Selecting]]:
    """Rules with another look-back (at least 2 layers) or first layer, and the variant's name."""
    first, back = rule.rule(n_layers)
    for other in dict.fromkeys((back // 4, back // 2, min(2 * back, first + 1))):
        if other >= 2 and other != back:
            yield f"look_back={other}", replace(rule, look_back=other)
    for other in dict.fromkeys((n_layers // 6, n_layers // 2)):
        if other >= 1 and other != first:
            yield f"first_layer={other}", replace(rule, first_layer=other)


def _number(value: int | None, variant: str) -> Cells:
    return Cells(None, np.array([np.nan if value is None else float(value)]), variant=variant)


METRICS: Mapping[str, Metric] = {
    "rank_variance": Metric(
        "variance over neighbouring layers of a token's rank, mean over the tokens that rank high",
        "trace", "squared ranks", None, "ASL, section 4.1",
        _by_layer(lambda curve: curve.variance), main="k=25%", default=False,
        after="concat_error"),
    "rank_relative": Metric(
        "rank variance divided by its value in the first layer that ASL tests",
        "trace", "ratio", None, "ASL, Fig. 6",
        _by_layer(lambda curve: curve.relative), main="k=25%", default=False,
        after="rank_variance"),
    "rank_union": Metric(
        "tokens among the first k of one of the layers compared, over k, next to chance",
        "trace", "ratio", None, "ASL, section 4.1",
        _by_layer(lambda curve: curve.union_share, lambda curve: curve.union_chance),
        main="k=25%", default=False, after="rank_relative"),
    "rank_overlap": Metric(
        "Jaccard index of the first k tokens of a layer and of the layer before, next to chance",
        "trace", "share", None, "kvsim, after ASL",
        _by_layer(lambda curve: curve.jaccard, lambda curve: curve.jaccard_chance),
        main="k=25%", default=False, after="rank_union"),
    "layer_entropy": Metric(
        "entropy of a layer's scores as a distribution over the prompt's tokens",
        "trace", "nats", None, "after ASL, Fig. 3", _entropy, default=False, after="rank_overlap"),
    "selection_layer": Metric(
        "layer after which ASL selects; null where it never does",
        "trace", "layer", None, "ASL, Fig. 9 and 10", _selection,
        main="k=25%,tau=0.3", default=False, after="layer_entropy"),
}  # fmt: skip
