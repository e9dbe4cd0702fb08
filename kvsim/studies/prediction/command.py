"""`kvsim fidelity`: replays as predictions of the running model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvsim.cli import shared, show
from kvsim.cli.groups import SCHEDULE, Chosen, Folder, Loading, grouped, offered
from kvsim.cli.replaying import finish, folder_state
from kvsim.cli.shared import Stop
from kvsim.schema import plural

if TYPE_CHECKING:
    import polars as pl

    from kvsim.sweeps.outcome import Run

_CORRELATIONS = """\
Rank correlation (Spearman) over policies of metrics of the replay with live KL, at one budget: 1
where the replay orders policies as the model does, 0 without relation. Between policies: of their
means over prompts, [95 % interval for other prompts and other policies like these], from 8 policies
and 12 prompts on that order the policies reliably; within prompts: mean over prompts. random does
not count."""
_LAYERS = """\
Errors of both loops by layer. Above 1, errors of earlier layers, which the replay leaves out, add
up; below 1 they cancel."""
_KEPT = """\
Kept sets of both loops: |A and B| / |A or B|, mean over cells, events and heads, after the first
and after the last event, lowest mean of a head; chance: of random sets of these sizes."""
_CAVEAT = """\
The model was fed the recorded responses. A high correlation says that the replay orders policies
like these on prompts like these; it says nothing about the size of what happens to the model, nor
about other models or much longer prompts."""


@grouped
def fidelity(
    traces: shared.TracePaths,
    chosen: Chosen,
    budget: shared.Budgets,
    schedule: Annotated[dict[str, Any], offered(*SCHEDULE)],
    max_new_tokens: Annotated[int, shared.option("max_new_tokens")] = 0,
    *,
    loading: Loading,
    out: Annotated[
        Path | None,
        shared.path_option("DIR", "Write the live run to a new folder, as `kvsim live --out`."),
    ] = None,
    resume: shared.Resume = False,
    as_json: shared.Json = False,
) -> None:
    """Compare replays with the running model.

    Replays policies at budgets over traces, runs the same on their model, and prints how well each
    metric of the replay predicts what the model does, how errors differ by layer, and how far the
    kept sets agree.
    """
    Folder(out=out, resume=resume).check()

    from kvsim.analysis.table import available
    from kvsim.runner.checks import check_live
    from kvsim.studies.prediction.validity import OFFLINE
    from kvsim.sweeps.closed_loop import live as run_live
    from kvsim.sweeps.driver import replay_all

    policies = chosen.built()
    for each in policies:
        check_live(each)
    recorded = shared.open_traces(traces)
    try:
        decoder, tokenizer = loading.loaded(recorded)
        with show.bar("cells run") as report:
            live = run_live(
                *(decoder, recorded, policies, budget),
                tokenizer=tokenizer,
                max_new_tokens=max_new_tokens,
                out=out,
                resume=resume,
                progress=report,
                **schedule,
            ).whole()
        with show.bar("cells replayed") as report:
            options = {"metrics": available(OFFLINE, recorded), "regret": True, **schedule}
            replayed = replay_all(recorded, policies, budget, progress=report, **options).whole()
    except KeyboardInterrupt:
        raise Stop(f"interrupted, {folder_state(out)}", 130) from None
    if live.records and replayed.records:
        _report(replayed, live, out, as_json=as_json)
    finish(replayed, None)
    finish(live, out)


def _report(replayed: Run, live: Run, out: Path | None, *, as_json: bool) -> None:
    from kvsim.studies.prediction.validity import errors_by_layer, kept_agreement, rank_correlations

    correlations = rank_correlations(replayed.table, live.table)
    layers = errors_by_layer(replayed.table, live.table)
    kept = _kept(kept_agreement(replayed.records, live.records))
    if as_json:
        tables = {"correlations": correlations, "layers": layers, "kept": kept}
        document: dict[str, Any] = {name: table.to_dicts() for name, table in tables.items()}
        show.echo_json(live.describe() | document | {"out": None if out is None else str(out)})
        return
    _print_correlations(correlations.filter(outcome="response_kl"))
    show.echo_text(f"\n{_LAYERS}\n")
    show.echo_table(
        ["metric", "layer", "replay", "live run", "live / replay"],
        [
            [
                *(row["metric"], str(row["layer"])),
                *(show.number(row[name], ".3g") for name in ("open", "closed")),
                show.interval(".2f", row["ratio"], row["low"], row["high"]),
            ]
            for row in layers.to_dicts()
        ],
        right=1,
    )
    show.echo_text(f"\n{_KEPT}\n")
    names = ["mean", "first", "last", "lowest", "chance"]
    show.echo_table(
        ["layer", *names],
        [
            [str(row["layer"]), *(show.number(row[name], ".1%") for name in names)]
            for row in kept.to_dicts()
        ],
        right=1,
    )
    show.echo_text(f"\n{_CAVEAT}")
    if out is not None:
        show.echo_text(f"The live run is in {out}: run.json, records.zarr, results.parquet.")


def _print_correlations(table: pl.DataFrame) -> None:
    """Print the metrics that order policies as live KL does, or that there are too few policies."""
    from kvsim.analysis.significance import FEWEST
    from kvsim.studies.prediction.validity import POLICIES

    rows, missing = [], [] if table.height else ["no policy but random evicts anything"]
    for of in table.partition_by("budget", maintain_order=True):
        budget, most = of["budget"][0], {name: max(of[name]) for name in ("prompts", "policies")}
        if most["prompts"] < FEWEST or most["policies"] < POLICIES:
            missing.append(
                f"budget {budget}: no rank correlation of {plural(most['prompts'], 'prompt')} and "
                f"{most['policies']} policies that evict; record at least {FEWEST} prompts, and "
                f"take at least {POLICIES} policies besides random"
            )
        rows += [
            {"budget": budget, "metric": row["metric"]}
            | {
                "between policies": show.interval("+.2f", row["between"], row["low"], row["high"]),
                "within prompts": show.number(row["within"], "+.2f"),
            }
            | {name: str(row[name]) for name in most}
            for row in of.to_dicts()
            if row["between"] is not None
        ]
    if rows:
        show.echo_text(f"{_CORRELATIONS}\n")
        show.echo_rows(rows, right=2)
    show.echo_notes(missing)


def _kept(table: pl.DataFrame) -> pl.DataFrame:
    """Agreement by layer: all events, the first and the last of each cell, the lowest head."""
    import polars as pl

    cell = ["trace", "policy", "params", "budget"]
    agreement, event = pl.col("agreement"), pl.col("event")
    heads = table.group_by("layer", "head").agg(agreement.mean()).group_by("layer")
    lowest = heads.agg(lowest=agreement.min())
    return (
        table.group_by("layer", maintain_order=True)
        .agg(
            mean=agreement.mean(),
            first=agreement.filter(event == event.min().over(cell)).mean(),
            last=agreement.filter(event == event.max().over(cell)).mean(),
            chance=pl.col("chance").mean(),
        )
        .join(lowest, on="layer", maintain_order="left")
        .sort("layer")
    )
