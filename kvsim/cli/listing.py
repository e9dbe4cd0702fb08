"""`kvsim policies` and `kvsim metrics`: lists of policies and metrics."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.shared import Json
from kvsim.cli.show import echo_fields, echo_json, echo_table
from kvsim.schema import schedule

if TYPE_CHECKING:
    from kvsim.policies.naming import Part


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
    """List policies (eviction, sparse attention, quantization), or show some in full."""
    from kvsim.policies import ACCESS, describe, names
    from kvsim.policies.naming import BEHIND

    listed = [describe(each) for each in name or (*names(), *names(ACCESS))]
    if as_json:
        echo_json([_facts(each) for each in listed])
        return
    if name:
        for each in listed:
            _echo_in_full(each)
        return
    evictions = [each for each in listed if each.entry.kind not in BEHIND]
    columns = ["policy", "rule", "evicts after", "needs", "paper"]
    echo_table(
        columns,
        [[shown(x), x.entry.rule, fires(x), needs(x), x.entry.paper] for x in evictions],
    )
    typer.echo(
        "\nSparse attention, quantizers and mergers, with or without a policy: snapkv+quest+kivi.\n"
    )
    echo_table(
        ["part", "kind", "function", "needs", "paper"],
        [
            [each.name, each.entry.kind, each.entry.rule, needs(each), each.entry.paper]
            for each in listed
            if each.entry.kind in BEHIND
        ],
    )
    typer.echo("\n`kvsim policies NAME` shows its parameters and its exact rule.")


def _facts(each: Part) -> dict[str, Any]:
    """The fields of a policy in JSON; needs are arrays beyond q, k and v."""
    entry, built = each.entry, each.policy
    params = each.params
    return {
        "name": each.name,
        "kind": entry.kind,
        "innermost": entry.innermost,
        "default": entry.default,
        "rule": entry.rule,
        "params": params,
        "accepts": {key: each.accepts[key].expected for key in params},
        "required": {key: str(value) for key, value in entry.required.items()},
        "own_schedule": entry.schedule is not None,
        "interval": built.schedule.interval,
        "prefill": built.schedule.prefill,
        "needs": sorted(built.reads.arrays),
        "clairvoyant": built.reads.future,
        "bounded": built.bounded,
        "exact": built.effect == "exact",
        "paper": entry.paper or None,
    }


def _echo_in_full(policy: Part) -> None:
    """Print a policy with its parameters, and its rule by the docstrings of its files."""
    from kvsim.core.pieces import Even
    from kvsim.policies.naming import BEHIND, documentation

    entry = policy.entry
    base, _, preset = policy.name.partition("@")
    presets, behind = "", entry.kind in BEHIND
    docs: list[str | None]
    if ":" in base:  # a user's own
        docs = [documentation(entry.piece)]
    else:
        pieces = (entry.piece, entry.layer_budgets)
        modules = dict.fromkeys(piece.__module__ for piece in pieces if piece is not Even)
        docs = [sys.modules[module].__doc__ for module in modules]
        docs += [entry.piece.__doc__] * behind
        presets = ", ".join(f"{base}@{other}" for other in entry.variants)
    facts = {
        "name": shown(policy),
        "kind": entry.kind,
        "rule": entry.rule,
        "evicts after": "" if behind else fires(policy),
        "needs": needs(policy),
        "presets": "" if preset else presets,
        "without a part": entry.default,
        "paper": entry.paper,
    }
    echo_fields({key: value for key, value in facts.items() if value})
    if params := policy.params:
        typer.echo()
        rows = [[key, str(x), policy.accepts[key].expected] for key, x in params.items()]
        echo_table(["parameter", "value", "accepts"], rows)
    for doc in filter(None, docs):
        typer.echo(f"\n{inspect.cleandoc(doc)}")
    typer.echo()


def shown(policy: Part) -> str:
    """The name, with a placeholder of an inner scorer, in brackets where it is optional."""
    from kvsim.policies.naming import BEHIND

    if policy.entry.kind in BEHIND:
        return f"[EVICTION+]{policy.name}"
    if policy.entry.innermost:
        return policy.name
    return f"{policy.name}[+SCORER]" if policy.entry.default else f"{policy.name}+SCORER"


def fires(policy: Part) -> str:
    """When it evicts."""
    own = policy.entry.schedule
    return schedule(own.interval, prefill=own.prefill) if own else "as its scorer"


def needs(policy: Part) -> str:
    """Needs of a policy beyond queries, keys and values."""
    entry, reads = policy.entry, policy.policy.reads
    needed = [*entry.required, *sorted(reads.arrays)]
    if reads.future and not entry.required:
        needed.append("all keys" if entry.kind == "sparse attention" else "later rows")
    return " ".join(needed)


def metrics(
    name: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Show these in full.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the metrics with their inputs, units and better direction."""
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
        "\nThey read the kept sets (sets), the attention of each row under them (rows), or only "
        f"the trace (trace).\nMeasured on request only, with --metric: {named}.\n"
        "`kvsim metrics NAME` shows one in full, docs/metrics.md has the definitions."
    )
