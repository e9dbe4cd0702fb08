"""`kvsim policies` and `kvsim metrics`: what there is to choose from."""

from __future__ import annotations

import inspect
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.shared import Json
from kvsim.cli.show import echo_fields, echo_json, echo_table
from kvsim.schema import schedule

if TYPE_CHECKING:
    from kvsim.policies import Description


def policies(
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Show these in full, parameters and exact rule; also NAME@scaled, and module:NAME "
            "of your own.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the policies, readers and quantizers, or show some of them in full."""
    from kvsim.policies import describe, names
    from kvsim.policies.naming import BEHIND, access_names

    listed = [describe(each) for each in name or (*names(), *access_names())]
    if as_json:
        echo_json([{**asdict(each), "paper": each.paper or None} for each in listed])
        return
    if name:
        for each in listed:
            _echo_in_full(each)
        return
    evictions = [each for each in listed if each.kind not in BEHIND]
    echo_table(
        ["policy", "rule", "evicts after", "needs", "paper"],
        [[shown(each), each.rule, fires(each), needs(each), each.paper] for each in evictions],
    )
    typer.echo("\nReaders, quantizers and mergers, alone or behind a policy: snapkv+quest+kivi.\n")
    echo_table(
        ["part", "kind", "what it does", "needs", "paper"],
        [
            [each.name, each.kind, each.rule, needs(each), each.paper]
            for each in listed
            if each.kind in BEHIND
        ],
    )
    typer.echo("\n`kvsim policies NAME` shows its parameters and its exact rule.")


def _echo_in_full(policy: Description) -> None:
    """Print a policy with its parameters, and its rule by the docstrings of its files."""
    from kvsim.core.pieces import Even
    from kvsim.policies import policy as build
    from kvsim.policies.description import defining, documentation
    from kvsim.policies.naming import BEHIND, entry_of

    base, _, preset = policy.name.partition("@")
    presets, behind = "", policy.kind in BEHIND
    docs: list[str | None]
    if ":" in base:  # a user's own
        docs = [documentation(defining(build(policy.name)))]
    else:
        entry = entry_of(policy.name)
        pieces = (entry.piece, entry.layer_budgets)
        modules = dict.fromkeys(piece.__module__ for piece in pieces if piece is not Even)
        docs = [sys.modules[module].__doc__ for module in modules]
        docs += [entry.piece.__doc__] * behind
        presets = ", ".join(f"{base}@{other}" for other in entry.variants)
    facts = {
        "name": shown(policy),
        "kind": policy.kind,
        "rule": policy.rule,
        "evicts after": "" if behind else fires(policy),
        "needs": needs(policy),
        "presets": "" if preset else presets,
        "without a part": policy.default,
        "paper": policy.paper,
    }
    echo_fields({key: value for key, value in facts.items() if value})
    if policy.params:
        typer.echo()
        rows = [[key, str(x), policy.accepts[key]] for key, x in policy.params.items()]
        echo_table(["parameter", "value", "accepts"], rows)
    for doc in filter(None, docs):
        typer.echo(f"\n{inspect.cleandoc(doc)}")
    typer.echo()


def shown(policy: Description) -> str:
    """The name, with a place for the scorer inside, in brackets where it needs none."""
    if policy.kind in ("reader", "quantizer", "merger"):
        return f"[EVICTION+]{policy.name}"
    if policy.innermost:
        return policy.name
    return f"{policy.name}[+SCORER]" if policy.default else f"{policy.name}+SCORER"


def fires(policy: Description) -> str:
    """When it evicts."""
    own_schedule = policy.own_schedule
    return schedule(policy.interval, prefill=policy.prefill) if own_schedule else "as its scorer"


def needs(policy: Description) -> str:
    """Needs of a policy beyond queries, keys and values."""
    needed = [*policy.required, *policy.needs]
    looks = "all keys" if policy.kind == "reader" else "later rows"
    return " ".join([*needed, *[looks] * (policy.clairvoyant and not policy.required)])


def metrics(
    name: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Show these in full.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the metrics, what they read, their units and which direction is better."""
    from kvsim.analysis.registry import METRICS, metric

    chosen = {each: metric(each) for each in name or METRICS}
    listed = [
        {
            "name": name,
            "says": entry.summary,
            "unit": entry.unit,
            "better": entry.better,
            "reads": entry.kind,
            "main": entry.main or None,
            "default": entry.default,
            "layers": entry.layers,
            "events": entry.over_events,
            "needs": ", ".join(entry.arrays),
            "source": entry.source,
        }
        for name, entry in chosen.items()
    ]
    if as_json:
        echo_json(listed)
        return
    if name:
        for row in listed:
            echo_fields({key: str(value) for key, value in row.items() if value})
            typer.echo()
        return
    columns = ("name", "says", "reads", "unit", "better")
    echo_table(
        ["metric", *columns[1:]],
        [[str(row[column] or "-") for column in columns] for row in listed],
    )
    named = ", ".join(name for name, entry in METRICS.items() if not entry.default)
    typer.echo(
        "\nThey read what a policy kept (sets), what becomes of each row's attention (rows), or a "
        f"trace alone (trace).\nMeasured on request only, with --metric: {named}.\n"
        "`kvsim metrics NAME` shows one in full, docs/metrics.md has the definitions."
    )
