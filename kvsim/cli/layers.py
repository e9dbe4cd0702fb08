"""`kvsim layers`: how the layers rank the tokens of a prompt, and where ASL selects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.show import bar, echo_json, echo_table, echo_text, number, one_line
from kvsim.cli.values import (
    Device,
    Json,
    OptionError,
    TracePaths,
    locate,
    parse_device,
    path_option,
    split,
)
from kvsim.errors import OutputError, PolicyError
from kvsim.schema import plural

if TYPE_CHECKING:
    import polars as pl

    from kvsim.analysis.prompt.gold import Ints
    from kvsim.analysis.prompt.ranking import Ranking
    from kvsim.analysis.prompt.tables import Diagnosis
    from kvsim.core.trace import Trace
    from kvsim.policies.asl import ASL

#: `--gold` for what the answer to a prompt of the shipped model's task is made from.
_ANSWER = "answer"
#: Columns of the tables: the header, the key in a row of `analysis.prompt.tables`, the format.
_LAYERS = {
    "layer": ("layer", "d"),
    "rank\nvariance": ("variance", ".1f"),
    "relative": ("relative_variance", ".3f"),
    "tokens\ncompared": ("union", "d"),
    "entropy": ("entropy", ".2f"),
    "Jaccard with\nlayer before": ("jaccard", ".2f"),
}
_RECALL = {"gold\nrecall": ("gold_recall", ".0%")}
_REGRET = {"first\ncomplete": ("first_full_recall", "d"), "regret,\nlayers": ("layer_regret", "+d")}


def layers(
    traces: TracePaths,
    budget: Annotated[
        list[str],
        typer.Option(
            metavar="N|P%[,...]",
            help="Tokens that propagate past the selection layer, window included, or a share of "
            "the trace's length.",
        ),
    ],
    tau: Annotated[
        float, typer.Option(help="Relative rank variance below which a layer selects.")
    ] = 0.3,
    window: Annotated[
        int, typer.Option(help="Last rows of the prompt, whose attention ranks the tokens.")
    ] = 32,
    pool: Annotated[
        str, typer.Option(metavar="avg|max|none", help="Pooling of scores over neighbours.")
    ] = "avg",
    pool_kernel: Annotated[int, typer.Option(help="Tokens that are pooled.")] = 7,
    first_layer: Annotated[
        int | None,
        typer.Option(help="The first layer that is tested; default: a third of the layers."),
    ] = None,
    look_back: Annotated[int, typer.Option(help="Layers whose ranks are compared.")] = 8,
    gold: Annotated[
        str | None,
        typer.Option(
            metavar="A-B,C|answer",
            help="Positions that the answer needs, such as 12-18,40; or 'answer' for the facts of "
            "a prompt of the shipped model's tasks.",
        ),
    ] = None,
    gold_text: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="A text of the prompt that the answer needs."),
    ] = None,
    figures: Annotated[
        Path | None,
        path_option(
            "DIR", "Write figures to a new folder: details of one trace, a comparison of several."
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option("--format", metavar="png|svg|pdf", help="What the figures are written as."),
    ] = "png",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Show where ASL selects, and how layers rank the tokens.

    One trace: a table of its layers for each budget. Several: a line per trace and budget, and how
    often each layer is selected.
    """
    if gold is not None and gold_text is not None:
        raise OptionError("--gold and --gold-text were both given; expected one of them")
    if figures is not None and figures.exists():
        raise OutputError(f"{figures} exists; give another --figures, nothing was changed")
    if form not in ("png", "svg", "pdf"):
        raise OptionError(f"--format is {form!r}; expected png, svg or pdf")
    if not math.isfinite(tau):
        raise OptionError(f"--tau is {tau}; expected a number, 0 or more")
    positions = None if gold in (None, _ANSWER) else _positions(str(gold))
    budgets = split(budget, "--budget")

    from kvsim.analysis.prompt.gold import answer_facts, check_positions, find_text
    from kvsim.analysis.prompt.ranking import ranking
    from kvsim.analysis.prompt.tables import diagnose
    from kvsim.analysis.results import check_distinct
    from kvsim.policies.asl import ASL
    from kvsim.store import open_trace
    from kvsim.sweeps.run import resolve_budget

    parse_device(device)
    if pool not in ("avg", "max", "none"):
        raise OptionError(f"--pool is {pool!r}; expected avg, max or none")
    with _as_options():
        rule = ASL(
            tau=tau,
            window=window,
            pool=None if pool == "none" else pool,  # type: ignore[arg-type]  # one of the two
            pool_kernel=pool_kernel,
            first_layer=first_layer,
            look_back=look_back,
        )
    opened = [open_trace(locate(trace)) for trace in traces]
    check_distinct(opened)

    def needed(trace: Trace) -> Ints | None:
        if gold_text is not None:
            return find_text(trace, gold_text)
        if gold == _ANSWER:
            return answer_facts(trace)
        return None if positions is None else check_positions(trace, positions)

    needs = [needed(trace) for trace in opened]
    rankings: list[Ranking] = []
    found: list[Diagnosis] = []
    with bar("layers") as report:
        for trace, at in zip(opened, needs, strict=True):
            sizes = [resolve_budget(size, trace.n_pos) for size in budgets]

            def step(done: int, total: int, name: str = trace.name) -> None:
                report(done, total, name)

            with _as_options():
                rankings.append(ranking(trace, rule, device=device, progress=step))
            for asked, size in zip(budgets, sizes, strict=True):
                share = asked if asked.endswith("%") else None
                found.append(diagnose(trace, rankings[-1], size, gold=at, share=share))
    written: list[Path] = []
    if figures is not None:
        from kvsim.plots import save

        figures.mkdir(parents=True)
        drawn = _figures(opened, rankings, found, device)
        written = [save(figure, figures / f"{name}.{form}") for name, figure in drawn]
    if as_json:
        echo_json(_document(opened, rankings, found, rule, written))
    else:
        _print(opened, found, rule, written)


@contextmanager
def _as_options() -> Iterator[None]:
    """Errors about a parameter of ASL name the option that it was given with."""
    try:
        yield
    except PolicyError as error:
        found = re.fullmatch(r"asl: (\w+) (is .*)|asl \((\w+)\): layer (is .*)", str(error))
        if found is None:
            raise
        name = (found[1] or found[3]).replace("_", "-")
        raise OptionError(f"--{name} {found[2] or found[4]}") from error


def _positions(text: str) -> list[int]:
    """`12-18,40` as positions, both ends included."""
    out: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first:
            raise OptionError(
                f"--gold is {text!r}; expected positions such as 12-18,40, or {_ANSWER!r}"
            )
        out += range(first, last + 1)
    return out


# ------------------------------------------------------------------------------------------ text


def _print(
    traces: Sequence[Trace], found: Sequence[Diagnosis], rule: ASL, written: Sequence[Path]
) -> None:
    from kvsim.analysis.prompt.tables import distribution, selection_table

    pooled = {"avg": "averaged", "max": "their maximum taken"}.get(rule.pool or "")
    smooth = f"{pooled} over {rule.pool_kernel} neighbours" if pooled else "not pooled"
    echo_text(
        f"Tokens are ranked by the attention of the prompt's last {rule.window} rows, {smooth}, "
        "summed over query heads."
    )
    if len(traces) == 1:
        _print_layers(traces[0], found)
    else:
        selections = selection_table(found)
        echo_text()
        _print_selections(selections)
        echo_text()
        _print_distribution(distribution(selections))
    for remark in dict.fromkeys(one.remark for one in found if one.remark):
        echo_text(f"Note: {remark}.")
    echo_text(
        "Fidelity of the values: all exact, from full attention over recorded queries and keys; "
        "layers behind a selection are shown as if none had selected."
    )
    if written:
        echo_text(f"Written to {written[0].parent}: {', '.join(path.name for path in written)}.")


def _print_layers(trace: Trace, found: Sequence[Diagnosis]) -> None:
    from kvsim.analysis.prompt.tables import layer_table

    first = found[0]
    gold = "" if first.gold is None else f", {plural(len(first.gold), 'gold token')}"
    echo_text(
        f"{one_line(trace.name)}: prompt {trace.prompt_len} tokens, of which "
        f"{first.ranking.ranked} are ranked, {plural(trace.n_layers, 'layer')}{gold}"
    )
    columns = _LAYERS | (_RECALL if gold else {})
    for one in found:
        size = _budget(one.curve.budget, one.share)
        echo_text(f"\nBudget {size}, k = {one.curve.k}: {one.curve.verdict()}.")
        if one.recall is not None:
            echo_text(f"Gold: {_gold(one)}.")
        echo_text()
        table = layer_table([one])
        rows = [
            [*_formatted(row, columns), "selects" if row["selected"] else ""]
            for row in table.to_dicts()
        ]
        echo_table([*columns, ""], rows, right=1)
        uniform, tokens, overlap = table["entropy_uniform"][0], plural(one.curve.k, "token"), ""
        if one.curve.k:
            overlap = f"; Jaccard index of the first {tokens}, {one.jaccard_chance:.2f} by chance"
        echo_text(f"\nEntropy of the scores in nats, {uniform:.2f} if all were equal{overlap}.")


def _formatted(row: dict[str, Any], columns: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the cells of a row; columns: header to the key in the row and the format."""
    return [number(row[key], form) for key, form in columns.values()]


def _gold(one: Diagnosis) -> str:
    """What the layers have of the gold tokens, in words."""
    full, late = one.first_full_recall, one.layer_regret
    if full is None:
        best = 0.0 if one.recall is None else one.recall.max()
        return f"no layer's first k tokens and window hold all of them, the best {best:.0%}"
    first = f"layer {full} is the first whose first k tokens and window hold all of them"
    if late is None or one.layer is None or one.recall is None:
        return first
    where = "it" if late == 0 else f"{abs(late)} {'behind' if late > 0 else 'before'} it"
    return f"{first}; the selection layer is {where} and holds {one.recall[one.layer]:.0%}"


def _print_selections(selections: pl.DataFrame) -> None:
    columns = {"of": ("n_layers", "d"), "relative\nvariance": ("relative_variance", ".3f")}
    if selections["gold_tokens"].is_not_null().any():
        columns |= _RECALL | _REGRET
    rows = []
    for row in selections.to_dicts():
        never = "fits" if row["prompt_len"] <= row["budget"] else "never"
        layer = never if row["layer"] is None else str(row["layer"])
        size = _budget(row["budget"], row["share"])
        rows.append([row["trace"], size, str(row["k"]), layer, *_formatted(row, columns)])
    echo_table(["trace", "budget", "k", "selects\nafter", *columns], rows, right=1)


def _print_distribution(found: pl.DataFrame) -> None:
    echo_text("Selection layers by task (the trace's meta, else the first part of its name):\n")
    rows = []
    for (task, budget), part in found.group_by("task", "budget", maintain_order=True):
        counts = [
            f"{'never' if row['layer'] is None else row['layer']}: {row['traces']}"
            for row in part.to_dicts()
        ]
        mean = number(part["mean_layer"][0], ".1f")
        rows.append([str(task), str(budget), str(part["of"][0]), mean, ", ".join(counts)])
    echo_table(["task", "budget", "traces", "mean layer", "layer: traces"], rows)


def _budget(budget: int, share: str | None) -> str:
    return str(budget) if share is None else f"{budget} ({share})"


# ------------------------------------------------------------------------------------------ JSON


def _document(
    traces: Sequence[Trace],
    rankings: Sequence[Ranking],
    found: Sequence[Diagnosis],
    rule: ASL,
    written: Sequence[Path],
) -> dict[str, Any]:
    from kvsim.analysis.prompt.tables import distribution, layer_table, selection_table

    selections = selection_table(found)
    per_trace = len(found) // len(traces)
    given = asdict(rule)
    del given["kv_before"]  # about caches, of which nothing is said here
    return {
        "traces": [
            {
                "name": trace.name,
                "digest": trace.digest,
                "layers": trace.n_layers,
                "prompt_len": trace.prompt_len,
                "ranked": one.ranked,
                "gold": None if own.gold is None else own.gold.tolist(),
            }
            for trace, one, own in zip(traces, rankings, found[::per_trace], strict=True)
        ],
        "parameters": given,
        "selections": selections.to_dicts(),
        "layers": layer_table(found).to_dicts(),
        "grids": [_grid(one) for one in found],
        "distribution": distribution(selections).to_dicts(),
        "figures": [str(path) for path in written],
    }


def _grid(one: Diagnosis) -> dict[str, Any]:
    """Selection layers over first layer and look-back; null for never."""
    grid = one.ranking.grid(one.curve.budget)
    rows = [[None if at < 0 else at for at in row] for row in grid.layers.tolist()]
    return {
        "trace": one.trace,
        "budget": grid.budget,
        "share": one.share,
        "tau": grid.tau,
        "first_layers": list(grid.first_layers),
        "look_backs": list(grid.look_backs),
        "selection_layers": rows,
        "fidelity": "exact",
    }


# --------------------------------------------------------------------------------------- figures


def _figures(
    traces: Sequence[Trace], rankings: Sequence[Ranking], found: Sequence[Diagnosis], device: str
) -> Iterator[tuple[str, Any]]:
    """Names and figures; of several traces those that compare them."""
    from kvsim import plots
    from kvsim.analysis.prompt.tables import distribution, selection_table

    yield "variance", plots.variance_curves(found)
    if any(one.recall is not None for one in found):
        yield "gold", plots.gold_recall(found)
    if len(traces) > 1:
        deepest = max(trace.n_layers for trace in traces)
        yield "selection", plots.selection_histogram(distribution(selection_table(found)), deepest)
        return
    (trace,), (of_trace,) = traces, rankings
    yield "overlap", plots.layer_overlap(found)
    window, selected = of_trace.rule.window, found[0].layer
    yield "attention", plots.layer_attention(trace, window, selected=selected, device=device)
    for one in found:
        size = one.asked.replace("%", "pct")
        grid = of_trace.grid(one.curve.budget)
        if len(grid.first_layers) > 1 and not one.curve.fits:  # else there is nothing to choose
            yield f"grid-{size}", plots.selection_grid(trace.name, grid)
        yield f"ranks-{size}", plots.rank_pattern(one)
        yield f"bumps-{size}", plots.rank_bumps(one, trace)
