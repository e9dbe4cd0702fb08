"""What policies cost: memory, time and FLOPs, from a model's configuration.

    model = Model.from_config("config.json")
    cost = estimate(model, kvsim.policy("snapkv"), budget=2048, context=131072)

`model` has the arithmetic of a decoder model, `selection` the layer after which rows are dropped,
`cases` what each layer computes and holds, and `accounting` puts them together. All of it is closed
form and nothing runs a model; docs/cost.md says what the numbers can and cannot say.
"""

from __future__ import annotations

from kvsim.core.flops import Event, Flops
from kvsim.cost.accounting import Cost, bounded, decode_ratio, estimate
from kvsim.cost.cases import event_flops
from kvsim.cost.model import GIB, Model, ModelError
from kvsim.cost.selection import no_selection

__all__ = [
    "GIB",
    "Cost",
    "Event",
    "Flops",
    "Model",
    "ModelError",
    "bounded",
    "decode_ratio",
    "estimate",
    "event_flops",
    "no_selection",
]
