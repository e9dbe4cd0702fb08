"""`kvsim price` and `kvsim match`: policies at equal constraints, and at equal sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import shared, show
from kvsim.cli.groups import Judging, grouped

if TYPE_CHECKING:
    import polars as pl

_LEGEND = """\
optimum: the kept sets that retain most attention under the constraint. cost: the optimum less the
one that is free. best policy: of those that obey the constraint; gap: its value less the optimum.
The optimum is proven of missing_mass alone: in other metrics a policy may be better."""


@grouped
def price(
    traces: shared.TracePaths,
    budget: Annotated[int, typer.Option(min=1, help="Entries per KV head on average.")],
    policy: Annotated[
        list[str] | None,
        shared.several("NAME[,...]", "Scorers of the policies that are compared."),
    ] = None,
    interval: Annotated[int, typer.Option(min=1, help="Rows between events.")] = 32,
    *,
    judging: Judging,
    as_json: shared.Json = False,
) -> None:
    """Show what constraints of engines cost: one set per layer, pages, admission once, one event.

    For each constraint: the least attention that kept sets under it lose, which is proven, and
    which policy under it comes nearest.
    """
    from kvsim.studies.price.constraints import CONSTRAINTS
    from kvsim.studies.price.prices import METRICS, SCORERS, prices, summary

    with show.bar("constraints") as report:
        values, remarks = prices(
            *(shared.open_traces(traces), budget, interval, policy or SCORERS),
            judge=judging.by,
            progress=report,
        )
    measured = [name for name in METRICS if name in values["metric"]]
    costs = {name: summary(values, name) for name in measured}
    if as_json:
        tables = {name: table.to_dicts() for name, table in costs.items()}
        document = {"budget": budget, "interval": interval, "costs": tables}
        show.echo_json(document | {"values": values.to_dicts(), "remarks": remarks})
        return
    for name, constraint in CONSTRAINTS.items():
        show.echo_text(f"{name}: {constraint.summary}")
    show.echo_text(f"\n{_LEGEND}")
    for name, table in costs.items():
        show.echo_text(f"\n{name}, budget {budget}, events every {interval} rows:\n")
        show.echo_rows(_lines(table), right=1)
    show.echo_notes(remarks)


@grouped
def match(
    traces: shared.TracePaths,
    policy: Annotated[
        list[str], shared.several("NAME[,...]", "Policies that have a threshold, as dms+h2o.")
    ],
    budget: Annotated[
        list[str], shared.several("N[,...]", "Entries per KV head, a point of the curve each.")
    ],
    settings: shared.Settings = None,
    against: Annotated[
        list[str] | None,
        shared.several("NAME[,...]", "Policies with a budget; default: h2o and snapkv."),
    ] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(metavar="TRACE", help="Measure these, and search on all of the others."),
    ] = None,
    interval: Annotated[int, typer.Option(min=1, help="Rows between events.")] = 32,
    *,
    judging: Judging,
    as_json: shared.Json = False,
) -> None:
    """Compare policies that have a threshold and no budget with others at equal mean sizes.

    On half of the prompts, the threshold is searched at which rows see as many entries on average
    as under the first of --against; the others are measured.
    """
    from kvsim.analysis.overview import summarise
    from kvsim.studies.price.sizes import at_equal_size

    given = shared.settings_of(policy, settings or ())
    params = {
        name: {key: values[0] for key, values in given.get(name, {}).items()} for name in policy
    }
    table, failures = at_equal_size(
        *(shared.open_traces(traces), params, against or ("h2o", "snapkv")),
        shared.parse_ranges(",".join(budget), "--budget", "entries, such as 64,128"),
        interval=interval,
        test=None if test is None else shared.open_traces(test),
        judge=judging.by,
    )
    averages = show.cells(summary := summarise(table))
    if as_json:
        show.echo_json({"averages": averages})
    else:
        show.echo_results(summary)
        for row in averages:
            if row["policy"] in params:
                size, value = row["budget"], row["params"]["threshold"]
                show.echo_text(f"{row['policy']}, budget {size}: threshold={value}")
    show.echo_failures(failures)


def _lines(table: pl.DataFrame) -> list[dict[str, str]]:
    return [
        {
            "constraint": row["constraint"],
            **{name: show.number(row[name], ".4f") for name in ("optimum", "cost")},
            **{name: show.number(row[name], ".4f") for name in ("value", "gap")},
            "best policy": row["policy"] or "-",
        }
        for row in table.to_dicts()
    ]
