"""`kvsim layers`: how the layers rank the tokens of a prompt, and where ASL selects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvsim.cli import shared, show
from kvsim.cli.groups import grouped
from kvsim.cli.shared import OptionError
from kvsim.cli.show import echo_text, number, one_line
from kvsim.errors import PolicyError
from kvsim.files import check_output, published
from kvsim.schema import plural

if TYPE_CHECKING:
    import polars as pl

    from kvsim.core.trace import Trace
    from kvsim.policies.asl import ASL
    from kvsim.studies.layers.tables import Diagnosis

#: Columns of the tables: the header, the key in a row of `kvsim.studies.layers.tables`, the format.
_LAYERS = {
    "layer": ("layer", "d"),
    "rank\nvariance": ("variance", ".1f"),
    "relative": ("relative_variance", ".3f"),
    "tokens\ncompared": ("union", "d"),
    "entropy": ("entropy", ".2f"),
    "Jaccard with\nlayer before": ("jaccard", ".2f"),
}


@dataclass(frozen=True)
class Rule:
    """Parameters of ASL's rule."""

    tau: Annotated[
        float, typer.Option(help="Relative rank variance below which a layer selects.")
    ] = 0.3
    window: Annotated[
        int, typer.Option(help="Last rows of the prompt, whose attention ranks the tokens.")
    ] = 32
    pool: Annotated[
        Literal["avg", "max", "none"], typer.Option(help="Pooling of scores over neighbours.")
    ] = "avg"
    pool_kernel: Annotated[int, typer.Option(help="Tokens that are pooled.")] = 7
    first_layer: Annotated[
        int | None,
        typer.Option(help="The first layer that is tested; default: a third of the layers."),
    ] = None
    look_back: Annotated[int, typer.Option(help="Layers whose ranks are compared.")] = 8


@grouped
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
    asl: Rule,
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
    often each layer is selected.
    """
    if figures is not None:
        check_output(figures, advice="give another --figures")
    if not math.isfinite(asl.tau):
        raise OptionError(f"--tau is {asl.tau}; expected a number, 0 or more")

    from kvsim.core.arguments import resolve_budget
    from kvsim.policies.asl import ASL
    from kvsim.studies.layers.ranking import ranking
    from kvsim.studies.layers.tables import diagnose

    with _as_options():
        rule = ASL(
            tau=asl.tau,
            window=asl.window,
            pool=None if asl.pool == "none" else asl.pool,
            pool_kernel=asl.pool_kernel,
            first_layer=asl.first_layer,
            look_back=asl.look_back,
        )
    opened = shared.open_traces(traces)

    diagnoses: list[Diagnosis] = []
    with show.bar("layers") as report:
        for trace in opened:
            sizes = [resolve_budget(size, trace.n_pos) for size in budget]

            def step(done: int, total: int, name: str = trace.name) -> None:
                report(done, total, name)

            with _as_options():
                ranked = ranking(trace, rule, device=device, progress=step)
            for size, text in zip(sizes, budget, strict=True):
                share = text if text.endswith("%") else None
                diagnoses.append(diagnose(trace, ranked, size, share=share))
    written: list[Path] = []
    if figures is not None:
        from kvsim.plots.style import picture

        with published(figures) as draft:
            draft.mkdir()
            for name, figure in _figures(opened, diagnoses, device):
                written.append(figures / f"{name}.{form}")
                (draft / written[-1].name).write_bytes(picture(figure, form))
    if as_json:
        show.echo_json(_document(opened, diagnoses, rule, written))
    else:
        _print(opened, diagnoses, rule, written)


@contextmanager
def _as_options() -> Iterator[None]:
    """Name in errors about a parameter of ASL the option that it was given with."""
    try:
        yield
    except PolicyError as error:
        match = re.fullmatch(r"asl: (\w+) (is .*)|asl \((\w+)\): layer (is .*)", str(error))
        if match is None:
            raise
        name, problem = filter(None, match.groups())
        raise OptionError(f"--{name.replace('_', '-')} {problem}") from error


def _print(
    traces: Sequence[Trace], diagnoses: Sequence[Diagnosis], rule: ASL, written: Sequence[Path]
) -> None:
    from kvsim.studies.layers.tables import distribution, selection_table

    pooled = {"avg": "averaged", "max": "their maximum taken"}.get(rule.pool or "")
    smooth = f"{pooled} over {rule.pool_kernel} neighbours" if pooled else "not pooled"
    echo_text(
        f"Tokens are ranked by the attention of the prompt's last {rule.window} rows, {smooth}, "
        "summed over query heads."
    )
    if len(traces) == 1:
        _print_layers(traces[0], diagnoses)
    else:
        selections = selection_table(diagnoses)
        _print_selections(selections)
        _print_distribution(distribution(selections))
    show.echo_notes(each.remark for each in diagnoses)
    echo_text(
        "Fidelity of the values: all exact, from full attention over recorded queries and keys; "
        "layers behind a selection are shown as if none had selected."
    )
    if written:
        echo_text(f"Written to {written[0].parent}: {', '.join(path.name for path in written)}.")


def _print_layers(trace: Trace, diagnoses: Sequence[Diagnosis]) -> None:
    from kvsim.studies.layers.tables import layer_table

    first = diagnoses[0]
    echo_text(
        f"{one_line(trace.name)}: prompt {trace.prompt_len} tokens, of which "
        f"{first.ranking.ranked} are ranked, {plural(trace.n_layers, 'layer')}"
    )
    for diagnosis in diagnoses:
        curve = diagnosis.curve
        size = show.budget_text(curve.budget, diagnosis.share)
        echo_text(f"\nBudget {size}, k = {curve.k}: {curve.verdict()}.")
        echo_text()
        table = layer_table([diagnosis])
        rows = [
            [*_formatted(row, _LAYERS), "selects" if row["selected"] else ""]
            for row in table.to_dicts()
        ]
        show.echo_table([*_LAYERS, ""], rows, right=1)
        uniform, tokens, overlap = table["entropy_uniform"][0], plural(curve.k, "token"), ""
        if curve.k:
            chance = f"{diagnosis.jaccard_chance:.2f} by chance"
            overlap = f"; Jaccard index of the first {tokens}, {chance}"
        echo_text(f"\nEntropy of the scores in nats, {uniform:.2f} if all were equal{overlap}.")


def _formatted(row: dict[str, Any], columns: Mapping[str, tuple[str, str]]) -> list[str]:
    return [number(row[key], form) for key, form in columns.values()]


def _print_selections(selections: pl.DataFrame) -> None:
    columns = {"of": ("n_layers", "d"), "relative\nvariance": ("relative_variance", ".3f")}
    rows = []
    for row in selections.to_dicts():
        never = "fits" if row["prompt_len"] <= row["budget"] else "never"
        layer = never if row["layer"] is None else str(row["layer"])
        size = show.budget_text(row["budget"], row["share"])
        rows.append([row["trace"], size, str(row["k"]), layer, *_formatted(row, columns)])
    echo_text()
    show.echo_table(["trace", "budget", "k", "selects\nafter", *columns], rows, right=1)


def _print_distribution(table: pl.DataFrame) -> None:
    rows = []
    for (task, budget), part in table.group_by("task", "budget", maintain_order=True):
        counts = [
            f"{'never' if row['layer'] is None else row['layer']}: {row['traces']}"
            for row in part.to_dicts()
        ]
        mean = number(part["mean_layer"][0], ".1f")
        rows.append([str(task), str(budget), str(part["of"][0]), mean, ", ".join(counts)])
    echo_text("\nSelection layers by task (the trace's meta, else the first part of its name):\n")
    show.echo_table(["task", "budget", "traces", "mean layer", "layer: traces"], rows)


def _document(
    traces: Sequence[Trace], diagnoses: Sequence[Diagnosis], rule: ASL, written: Sequence[Path]
) -> dict[str, Any]:
    from kvsim.studies.layers.tables import distribution, layer_table, selection_table

    selections = selection_table(diagnoses)
    parameters = asdict(rule)
    del parameters["kv_before"]  # about caches, which no table here shows
    return {
        "traces": [
            {
                "name": trace.name,
                "digest": trace.digest,
                "layers": trace.n_layers,
                "prompt_len": trace.prompt_len,
                "ranked": first.ranking.ranked,
            }
            for trace, first in zip(
                traces, diagnoses[:: len(diagnoses) // len(traces)], strict=True
            )
        ],
        "parameters": parameters,
        "selections": selections.to_dicts(),
        "layers": layer_table(diagnoses).to_dicts(),
        "distribution": distribution(selections).to_dicts(),
        "figures": [str(path) for path in written],
    }


def _figures(
    traces: Sequence[Trace], diagnoses: Sequence[Diagnosis], device: str
) -> Iterator[tuple[str, Any]]:
    from kvsim import plots
    from kvsim.studies.layers.tables import distribution, selection_table

    yield "variance", plots.variance_curves(diagnoses)
    if len(traces) > 1:
        deepest, layers = max(trace.n_layers for trace in traces), selection_table(diagnoses)
        yield "selection", plots.selection_histogram(distribution(layers), deepest)
        return
    trace, first = traces[0], diagnoses[0]
    window = first.ranking.rule.window
    yield "attention", plots.layer_attention(trace, window, selected=first.layer, device=device)
    for diagnosis in diagnoses:
        size = diagnosis.requested.replace("%", "pct")
        grid = diagnosis.ranking.grid(diagnosis.curve.budget)
        if len(grid.first_layers) > 1 and not diagnosis.curve.fits:  # else nothing can be chosen
            yield f"grid-{size}", plots.selection_grid(trace.name, grid)
        yield f"ranks-{size}", plots.rank_pattern(diagnosis)
