"""Rules as engines that serve models have them: sets that heads or layers share."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvsim.testing.loops.event import Scored, first, last, unprotected
from kvsim.testing.loops.event import union as both
from reference.event import Event
from reference.expected import series, z_scores
from reference.layouts import union


def triattention(event: Event) -> Scored:
    """The largest z-score of a group, or the z-score of the largest, before layers share."""
    params = event.params
    held = first(event, event.prompt_len) if params["protect_prompt"] else unprotected(event)
    held = both(held, last(event, int(params["recent"])))
    values, noise = [], []
    for h, (live, group) in enumerate(zip(event.live, series(event), strict=True)):
        among, queries = [*range(len(live))], group
        if params["population"] == "candidates":
            among = [slot for slot, p in enumerate(live) if p not in held[h]]
        if params["normalise"] == "kv_heads":
            raw, rough = (np.max(x, axis=0).tolist() for x in zip(*group, strict=True))
            queries = [(raw, rough)]
        scored = [z_scores(raw, rough, among) for raw, rough in queries]
        best, terms = (np.max(x, axis=0).tolist() for x in zip(*scored, strict=True))
        values.append(dict(zip(live, best, strict=True)))
        noise.append(dict(zip(live, terms, strict=True)))
    return Scored(values, held, noise, rounded=True)


def shared(params: Mapping[str, Any], scored: list[Scored]) -> list[Scored]:
    """TriAttention's scores of all layers, as heads of the same place or all heads share them."""
    rule = {"across": "layers", "reduction": params["over_layers"]}
    if params["pruning"] == "union":
        return union(rule, scored)
    out = [Scored([], layer.protected, [], [], rounded=True) for layer in scored]
    for h in range(len(scored[0].values)):
        alone = [
            Scored([x.values[h]], [x.protected[h]], [x.noise[h]], rounded=True) for x in scored
        ]
        for layer, each in zip(out, union(rule, alone), strict=True):
            layer.values += each.values
            layer.noise += each.noise
            layer.decisions += each.decisions
    return out
