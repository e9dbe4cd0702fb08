"""`kvsim policies` and `kvsim metrics`: what there is to choose from."""

from __future__ import annotations

import inspect
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.show import echo_json, echo_table
from kvsim.cli.values import Json
from kvsim.schema import schedule

if TYPE_CHECKING:
    from kvsim.policies import Description


def policies(
    name: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Show these in full: parameters and exact rule."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the policies, or show some of them in full."""
    from kvsim.errors import PolicyError, suggest
    from kvsim.policies import describe, names

    known = names()
    for one in name or ():
        if one not in known:
            raise PolicyError(
                f"no policy of the list is called {one!r}{suggest(one, known)}; "
                "expected one name without a +, `kvsim policies` lists them"
            )
    listed = [describe(one) for one in name or known]
    if as_json:
        echo_json([{**asdict(one), "paper": one.paper or None} for one in listed])
        return
    if name:
        typer.echo("\n\n".join(map(_in_full, listed)))
        return
    echo_table(
        ["policy", "keeps", "evicts after", "needs", "paper"],
        [[shown(one), one.keeps, fires(one), needs(one), one.paper] for one in listed],
    )
    typer.echo("\n`kvsim policies NAME` shows its parameters and its exact rule.")


def _in_full(one: Description) -> str:
    """One policy: its facts, and what the files of its pieces say."""
    from kvsim.policies import CATALOGUE

    base, _, preset = one.name.partition("@")
    entry = CATALOGUE[base].preset(preset)
    pieces = [piece for piece in (entry.piece, entry.layer_budgets) if piece is not None]
    modules = dict.fromkeys(piece.__module__ for piece in pieces)
    parameters = " ".join(f"{key}={value}" for key, value in one.params.items())
    presets = ", ".join(f"{base}@{other}" for other in CATALOGUE[base].presets)
    facts = {
        "evicts after": fires(one),
        "needs": needs(one),
        "parameters": parameters,
        "presets": "" if preset else presets,
        "SCORER": f"{one.default}, if none is named" if one.default else "",
        "paper": one.paper,
    }
    lines = [f"{shown(one)}: {one.keeps}"]
    lines += [f"{key + ':':<14}{value}" for key, value in facts.items() if value]
    told = [inspect.cleandoc(sys.modules[module].__doc__ or "") for module in modules]
    return "\n\n".join(["\n".join(lines), *told])


def shown(one: Description) -> str:
    """The name, with a place for the scorer inside, in brackets where it needs none."""
    if one.innermost:
        return one.name
    return f"{one.name}[+SCORER]" if one.default else f"{one.name}+SCORER"


def fires(one: Description) -> str:
    """When it evicts."""
    return schedule(one.interval, prefill=one.prefill) if one.own_schedule else "as its scorer"


def needs(one: Description) -> str:
    """What it asks for beyond queries, keys and values."""
    asked = [*one.required, *one.needs]
    return " ".join([*asked, "later rows"] if one.clairvoyant and not one.required else asked)


def metrics(as_json: Json = False) -> None:
    """List the metrics, what they read, their units and which direction is better."""
    from kvsim.analysis.registry import METRICS

    listed = [
        {
            "name": name,
            "says": entry.summary,
            "unit": entry.unit,
            "better": entry.better,
            "reads": entry.kind,
            "main": entry.main or None,
            "default": entry.default,
            "source": entry.source,
        }
        for name, entry in METRICS.items()
    ]
    if as_json:
        echo_json(listed)
        return
    columns = ("name", "says", "reads", "unit", "better")
    echo_table(
        ["metric", *columns[1:]],
        [[str(row[column] or "-") for column in columns] for row in listed],
    )
    named = ", ".join(name for name, entry in METRICS.items() if not entry.default)
    typer.echo(
        "\nThey read what a policy kept (sets), what becomes of each row's attention (rows), or a "
        f"trace alone (trace).\nMeasured on request only, with --metric: {named}."
    )
