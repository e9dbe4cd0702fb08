"""`kvsim price` and `kvsim match`: policies at equal constraints, and at equal sizes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvsim.cli import shared, show
from kvsim.cli.groups import Judging, grouped
from kvsim.cli.shared import OptionError


def price(
    traces: shared.TracePaths,
    budget: Annotated[int, typer.Option(min=1, help="Entries per KV head on average.")],
    interval: Annotated[int, typer.Option(min=1, help="Rows between events.")] = 32,
    as_json: shared.Json = False,
) -> None:
    """Show what constraints of engines cost: one set per layer, pages, admission once, one event.

    For each constraint, the attention that the best kept sets under it lose, which is proven to be
    the least, and the output error of these sets; means over the traces.
    """
    import polars as pl

    from kvsim.analysis.table import measure
    from kvsim.core.threads import threads_for
    from kvsim.engine.source import ended
    from kvsim.errors import KvsimError
    from kvsim.studies.price.constraints import CONSTRAINTS, optimum_under, terms_of

    rows: list[dict[str, Any]] = []
    measured = ("missing_mass", "output_error")
    # the optimum is of all rows after the prompt, those of later questions too
    remarks, opened = [], [ended(x, x.prompt_len) for x in shared.open_traces(traces)]
    for name, constraint in CONSTRAINTS.items():
        try:
            with threads_for(opened):
                best = [
                    optimum_under(x, name, **terms_of(x, name, budget, interval)) for x in opened
                ]
                tables = [measure(x, y[0], measured) for x, y in zip(opened, best, strict=True)]
        except KvsimError as error:
            if not rows:  # not even the free optimum
                raise
            remarks.append(f"{name}: {error}")
            continue
        of_traces = [x.group_by("metric").agg(pl.mean("value")) for x in tables]
        means = dict(pl.concat(of_traces).group_by("metric").agg(pl.mean("value")).rows())
        rows.append({"constraint": name, **means, "summary": constraint.summary})
        rows[-1]["cost"] = means["missing_mass"] - rows[0]["missing_mass"]
    if as_json:
        show.echo_json({"constraints": rows, "remarks": remarks})
        return
    lines = [
        {"constraint": f"{row['constraint']}: {row['summary']}"}
        | {key.replace("_", "\n"): show.number(row[key], ".4f") for key in (*measured, "cost")}
        for row in rows
    ]
    show.echo_rows(lines, right=1)
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
    if any(len(values) > 1 for each in given.values() for values in each.values()):
        raise OptionError("--set of `kvsim match` takes one value of a parameter")
    params = {name: {key: x[0] for key, x in each.items()} for name, each in given.items()}
    opened = shared.open_traces(traces)
    table = at_equal_size(
        *(opened, params, against or ("h2o", "snapkv")),
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
        if test is None and len(opened) == 1:
            show.echo_notes(["thresholds are searched and measured on the same trace"])
