"""`kvsim price`: what constraints cost, and how far policies that obey them are from the best."""

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
        priced = prices(
            *(shared.open_traces(traces), budget, interval, policy or SCORERS),
            judge=judging.by,
            progress=report,
        )
    measured = [name for name in METRICS if name in priced.table["metric"]]
    costs = {name: summary(priced.table, name) for name in measured}
    if as_json:
        tables = {name: table.to_dicts() for name, table in costs.items()}
        document = {"budget": budget, "interval": interval, "costs": tables}
        show.echo_json(document | {"values": priced.table.to_dicts(), "remarks": priced.remarks})
        return
    for name, constraint in CONSTRAINTS.items():
        show.echo_text(f"{name}: {constraint.summary}")
    show.echo_text(f"\n{_LEGEND}")
    for name, table in costs.items():
        show.echo_text(f"\n{name}, budget {budget}, events every {interval} rows:\n")
        show.echo_rows(_lines(table), right=1)
    show.echo_notes(priced.remarks)


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
