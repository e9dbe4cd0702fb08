"""What policies cost: memory, time and FLOPs, from a model's configuration.

    model = Model.from_config("config.json")
    cost = estimate(model, kvsim.policy("snapkv"), budget=2048, context=131072)

`model` has the arithmetic of a decoder model, `scoring` a formula for every piece of a policy,
`accounting` puts them together, and `papers` holds formulas as papers print them. All of it is
closed form and nothing runs a model; docs/cost.md says what the numbers can and cannot say.
"""

from __future__ import annotations

from kvsim.cost import papers
from kvsim.cost.accounting import Cost, bounded, decode_ratio, estimate, no_selection
from kvsim.cost.model import GIB, Model, ModelError
from kvsim.cost.scoring import FORMULAS, PROPAGATIONS, Event, Flops, event_flops

__all__ = [
    "FORMULAS",
    "GIB",
    "PROPAGATIONS",
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
    "papers",
]
