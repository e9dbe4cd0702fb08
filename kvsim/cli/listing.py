"""`kvsim policies` and `kvsim metrics`: what there is to choose from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvsim.cli.show import echo_json, echo_table, schedule
from kvsim.cli.values import Json

if TYPE_CHECKING:
    from kvsim.policies import Description


def policies(as_json: Json = False) -> None:
    """List the policies: what they keep, when they evict, what they need, their parameters."""
    from kvsim.policies import describe, names

    listed = [describe(name) for name in names()]
    if as_json:
        echo_json([{**asdict(one), "paper": one.paper or None} for one in listed])
        return
    echo_table(
        ["policy", "keeps", "evicts after", "needs", "parameters", "paper"],
        [
            [
                shown(one),
                one.keeps,
                fires(one),
                needs(one),
                " ".join(f"{key}={value}" for key, value in one.params.items()),
                one.paper,
            ]
            for one in listed
        ],
    )


def shown(one: Description) -> str:
    """The name, with a place for the scorer that it needs inside."""
    return one.name if one.innermost else f"{one.name}+SCORER"


def fires(one: Description) -> str:
    """When it evicts."""
    return schedule(one.interval, prefill=one.prefill) if one.own_schedule else "as its scorer"


def needs(one: Description) -> str:
    """What it asks for beyond queries, keys and values."""
    asked = [*one.required, *one.needs]
    return " ".join([*asked, "later rows"] if one.clairvoyant and not one.required else asked)


def metrics(as_json: Json = False) -> None:
    """List the metrics, their units and which direction is better."""
    from kvsim.metrics import METRICS

    listed = [
        {
            "name": name,
            "says": one.summary,
            "unit": one.unit,
            "better": one.better,
            "reads": one.kind,
            "source": one.source,
        }
        for name, one in METRICS.items()
    ]
    if as_json:
        echo_json(listed)
        return
    echo_table(
        ["metric", "says", "unit", "better"],
        [[str(one[key] or "-") for key in ("name", "says", "unit", "better")] for one in listed],
    )
