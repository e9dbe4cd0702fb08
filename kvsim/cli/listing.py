"""`kvsim policies` and `kvsim metrics`: what there is to choose from."""

from __future__ import annotations

from kvsim.cli.show import echo_json, echo_table, schedule
from kvsim.cli.values import Json


def policies(as_json: Json = False) -> None:
    """List the policies, their schedules and their parameters."""
    from kvsim.policies import CATALOGUE, policy

    names = [
        (full_name, summary, entry.paper)
        for name, entry in CATALOGUE.items()
        for full_name, summary in (
            (name, entry.summary),
            *((f"{name}@{key}", preset.summary) for key, preset in entry.presets.items()),
        )
    ]
    listed = [(policy(name), summary, paper) for name, summary, paper in names]
    if as_json:
        echo_json(
            [
                {
                    "name": one.name,
                    "keeps": summary,
                    "params": one.params,
                    "interval": one.schedule.interval,
                    "prefill": one.schedule.prefill,
                    "paper": paper or None,
                }
                for one, summary, paper in listed
            ]
        )
        return
    echo_table(
        ["policy", "keeps", "evicts after", "parameters"],
        [
            [
                one.name,
                summary,
                schedule(one.schedule.interval, prefill=one.schedule.prefill),
                " ".join(f"{key}={value}" for key, value in one.params.items()),
            ]
            for one, summary, _ in listed
        ],
    )


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
