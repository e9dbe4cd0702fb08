"""`kvsim study layers`: how the layers rank the tokens of a prompt, and where ASL selects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvsim.cli import shared, show
from kvsim.cli.shared import OptionError
from kvsim.cli.show import echo_rows, echo_text, number, one_line
from kvsim.files import check_output, published
from kvsim.schema import plural

if TYPE_CHECKING:
    import polars as pl

    from kvsim.core.trace import Trace
    from kvsim.studies.layers.ranking import Curve

#: Columns of the table of a trace's layers: the name in `layer_table`, and the format.
_COLUMNS = {
    "layer": ("layer", "d"),
    "rank\nvariance": ("variance", ".1f"),
    "relative": ("relative_variance", ".3f"),
    "tokens\ncompared": ("union", "d"),
    "entropy": ("entropy", ".2f"),
    "Jaccard with\nlayer before": ("jaccard", ".2f"),
}


def layers(
    traces: shared.TracePaths,
    budget: Annotated[
        list[str],
        shared.several(
            "N|P%[,...]",
            "Tokens that propagate past the selection layer, window included, or a share of "
            "the trace's length.",
        ),
    ],
    settings: shared.Settings = None,
    figures: Annotated[
        Path | None,
        shared.path_option(
            "DIR", "Write figures to a new folder: details of one trace, a comparison of several."
        ),
    ] = None,
    form: Annotated[
        Literal["png", "svg", "pdf"],
        typer.Option("--format", help="The format of the figures."),
    ] = "png",
    device: shared.Device = "cpu",
    as_json: shared.Json = False,
) -> None:
    """Show where ASL selects, and how layers rank the tokens.

    One trace: a table of its layers for each budget. Several: a line per trace and budget, and how
    often each layer is selected. Parameters of ASL: --set tau=0.5.
    """
    if figures is not None:
        check_output(figures, advice="give another --figures")

    from kvsim.core.arguments import resolve_budget
    from kvsim.studies.layers.ranking import ranking
    from kvsim.studies.layers.tables import distribution, layer_table, selection_table

    policies = shared.build_policies(["asl"], settings)
    if len(policies) != 1:
        raise OptionError(f"--set names {len(policies)} rules; expected one value for each key")
    rule: Any = policies[0].propagation
    opened = shared.open_traces(traces)
    curves: list[Curve] = []
    with show.bar("layers") as report:
        for trace in opened:

            def step(done: int, total: int, name: str = trace.name) -> None:
                report(done, total, name)

            ranked = ranking(trace, rule, device=device, progress=step)
            for text in budget:
                size, share = resolve_budget(text, trace.n_pos), text if "%" in text else None
                curves.append(ranked.curve(size, share=share))
    selections = selection_table(curves)
    counts = distribution(selections)
    written: list[Path] = []
    if figures is not None:
        from kvsim.plots.style import picture

        with published(figures) as draft:
            draft.mkdir()
            for name, figure in _figures(opened, curves, counts, device):
                written.append(figures / f"{name}.{form}")
                (draft / written[-1].name).write_bytes(picture(figure, form))
    if as_json:
        names = {"name": "name", "digest": "digest", "layers": "n_layers"}
        of_traces = [
            {key: getattr(trace, name) for key, name in names.items()}
            | {"prompt_len": trace.prompt_len, "ranked": trace.prompt_len - rule.window}
            for trace in opened
        ]
        parameters = asdict(rule)
        del parameters["kv_before"]  # about caches, which no table here shows
        tables = {"selections": selections, "layers": layer_table(curves), "distribution": counts}
        rows = {name: table.to_dicts() for name, table in tables.items()}
        paths = {"figures": [str(path) for path in written]}
        show.echo_json({"traces": of_traces, "parameters": parameters, **rows, **paths})
        return
    pooled = {"avg": "averaged", "max": "their maximum taken"}.get(rule.pool or "")
    smooth = f"{pooled} over {rule.pool_kernel} neighbours" if pooled else "not pooled"
    echo_text(
        f"Tokens are ranked by the attention of the prompt's last {rule.window} rows, {smooth}, "
        "summed over query heads."
    )
    if len(opened) == 1:
        _print_layers(opened[0], curves)
    else:
        _print_selections(selections, counts)
    echo_text(
        "Fidelity of the values: all exact, from full attention over recorded queries and keys; "
        "layers behind a selection are shown as if none had selected."
    )
    if written:
        echo_text(f"Written to {figures}: {', '.join(path.name for path in written)}.")


def _print_layers(trace: Trace, curves: Sequence[Curve]) -> None:
    from kvsim.studies.layers.tables import layer_table

    echo_text(
        f"{one_line(trace.name)}: prompt {trace.prompt_len} tokens, of which "
        f"{curves[0].ranking.ranked} are ranked, {plural(trace.n_layers, 'layer')}"
    )
    for curve in curves:
        table = layer_table([curve])
        size = show.budget_text(curve.budget, curve.share)
        echo_text(f"\nBudget {size}, k = {curve.k}: {curve.verdict()}.\n")
        rows = [
            {head: number(row[name], form) for head, (name, form) in _COLUMNS.items()}
            | {"": "selects" if row["selected"] else ""}
            for row in table.to_dicts()
        ]
        echo_rows(rows, right=1)
        overlap = ""
        if curve.k:
            chance = f"{curve.jaccard_chance:.2f} by chance"
            overlap = f"; Jaccard index of the first {plural(curve.k, 'token')}, {chance}"
        uniform = table["entropy_uniform"][0]
        echo_text(f"\nEntropy of the scores in nats, {uniform:.2f} if all were equal{overlap}.")


def _print_selections(selections: pl.DataFrame, counts: pl.DataFrame) -> None:
    rows = []
    for row in selections.to_dicts():
        never = "fits" if row["prompt_len"] <= row["budget"] else "never"
        rows.append(
            {
                "trace": row["trace"],
                "budget": show.budget_text(row["budget"], row["share"]),
                "k": str(row["k"]),
                "selects\nafter": never if row["layer"] is None else str(row["layer"]),
                "of": str(row["n_layers"]),
                "relative\nvariance": number(row["relative_variance"], ".3f"),
            }
        )
    echo_text()
    echo_rows(rows, right=1)
    rows = []
    for (task, size), part in counts.group_by("task", "budget", maintain_order=True):
        found = part.select("layer", "traces").rows()
        layers = [f"{'never' if layer is None else layer}: {n}" for layer, n in found]
        mean = number(part["mean_layer"][0], ".1f")
        row = {"task": task, "budget": size, "traces": part["of"][0], "mean layer": mean}
        rows.append({key: str(x) for key, x in row.items()} | {"layer: traces": ", ".join(layers)})
    echo_text("\nSelection layers by task (the trace's meta, else the first part of its name):\n")
    echo_rows(rows)


def _figures(
    traces: Sequence[Trace], curves: Sequence[Curve], counts: pl.DataFrame, device: str
) -> Iterator[tuple[str, Any]]:
    from kvsim.studies.layers import figures

    yield "variance", figures.variance_curves(curves)
    if len(traces) > 1:
        yield "selection", figures.selection_histogram(counts, max(x.n_layers for x in traces))
        return
    trace, first = traces[0], curves[0]
    window = first.ranking.rule.window
    yield (
        "attention",
        figures.layer_attention(trace, window, selected=first.selected(), device=device),
    )
    for curve in curves:
        size = curve.requested.replace("%", "pct")
        grid = curve.ranking.grid(curve.budget)
        if len(grid.first_layers) > 1 and not curve.fits:  # else nothing can be chosen
            yield f"grid-{size}", figures.selection_grid(trace.name, grid)
        yield f"ranks-{size}", figures.rank_pattern(curve)
