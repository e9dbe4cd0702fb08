"""The text of the page: tables, and what they say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version

import numpy as np
import polars as pl
import validity
from scipy.stats import binomtest, spearmanr

from fidelity_page.loops import AGREEMENT, Coverage, Loops, coverage, judged, summary
from kvsim.analysis.prediction import FLOOR, FOLDS, Calibration, fit
from kvsim.analysis.summaries import over_layers
from kvsim.analysis.validity import errors_by_layer

#: The aim of the page: the coverage of intervals.
COVERED = 0.9

#: Why policies come in this order: what each one does, in the order of the tables.
KINDS = {
    "random": "keeps a random set",
    "streaming_llm": "keeps the first and the most recent entries",
    "h2o": "keeps entries with much accumulated attention",
    "tova": "keeps what the last row attends to",
    "snapkv": "keeps what the last rows attend to, and their neighbours",
    "knorm": "keeps keys with a small norm",
    "keydiff": "keeps keys that differ from the mean key",
    "expected_attention": "keeps what expected queries attend to",
    "gkv": "keeps entries with much attention, decayed over events",
    "ams": "gives each segment of equal attention mass its quota",
    "pyramidkv": "as snapkv, with more entries in the first layers",
    "adakv+snapkv": "as snapkv, with more entries in heads that need them",
}


def page(measured: Sequence[Loops], curves: Sequence[Calibration], image: str) -> str:
    """The whole page."""
    parts = [_head(measured), _labels(), _ranks(), _prediction(measured, curves, image)]
    parts += [_answers(measured), _depth(measured), _kept(measured), _limits(), _yours()]
    return "\n\n".join(parts) + "\n"


def _name(of: Loops) -> str:
    return {"tiny": "`tiny`", "smollm2": "SmolLM2"}[of.study.prompts.model]


def _head(measured: Sequence[Loops]) -> str:
    lines = []
    for of in measured:
        plan, tokens = of.study.prompts, of.rows["tokens"]
        tasks = of.rows.select("prompt", "task").unique()["task"].value_counts(sort=True)
        named = ", ".join(f"{count} {task}" for task, count in sorted(tasks.iter_rows()))
        after = "and after the prompt" if plan.prefill else "none after the prompt"
        lines.append(
            f"* {_name(of)}: {of.prompts} prompts ({named}; seed {plan.seed}) of {tokens.min()} to "
            f"{tokens.max()} tokens with their response; budgets "
            f"{', '.join(map(str, of.study.budgets))}; an event every {plan.interval} rows, "
            f"{after}."
        )
    policies = ", ".join(f"`{name}`" for name in KINDS)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"""# How well replay predicts the running model

A replay decides on queries, keys and values of a model that never lost an entry. On the running model, evictions also change what deeper layers compute, and what the model writes. kvsim runs the same policies on the model itself (`kvsim live`) and measures how well its replays predict that: which metric orders policies as the model does, by how much errors differ, and how far the kept sets agree. `kvsim predict` estimates the divergence of a live run from a replay alone. This page has the numbers of two models; [yours](#on-your-own-traces) take two commands.

<!-- not run: takes hours, and this page is what it writes -->
```bash
python docs/fidelity.py
```

{chr(10).join(lines)}
* Policies: {policies}, with windows and segments made smaller as on the page of [results](results.md#parameters-made-smaller). No earlier page used these prompts.
* Each prompt was recorded with the full cache, replayed, and run twice on the model under each policy at each budget: with the recorded response fed to it (teacher forcing), and writing its own response greedily, where the prompt asks something that can be checked.
* A *cell* is a policy at a budget. Cells of a prompt in which nothing is evicted are left out of correlations and predictions. Brackets are 95 % bootstrap intervals over prompts. {versions}, CPU, float32."""


def _labels() -> str:
    return """## What the labels mean

| fidelity | the value | what it lacks |
| --- | --- | --- |
| `exact` | equals that of a live run that is fed the recorded tokens: the first layer, a layer replayed alone, sets decided once at the end of the prompt | nothing |
| `open` | is computed from the recorded queries, keys and values | errors of a layer change the input of the next one; later decisions are made on what earlier ones changed; the model may write other tokens |
| `semi` | equals that of a live prefill: deeper layers are computed again from the recorded residual stream (`kvsim recompute`) | the same, behind the prefill |
| `judged` | is measured on the model as it runs over the recorded tokens with the kept sets of the replay (`--judge`) | later decisions are those made on the recording |
| `closed` | is measured on the running model, all layers evicting (`kvsim live`) | nothing, but it costs a run of the model for every policy and budget |

[Concepts](concepts.md#fidelity) says which results are exact. The rest of this page is about `open` and `judged` next to `closed`."""


def _ranks() -> str:
    return f"""## Which number orders policies at one budget

Other prompts than those above: 30 of each model, drawn by seed 11, 16 policies that somebody might deploy, and `random`, which is not counted. Each cell is Spearman's rank correlation with live KL over the 16 policies: of means over prompts, with a 95 % bootstrap interval over prompts and policies, and behind it the mean of the correlations within each prompt. Metrics of which more is better count with their sign turned. Values of every prompt are in `docs/validity-results.parquet`; `python docs/validity.py` prints these tables from it, and `--measure` makes it again in about two hours.

<!-- generated: validity -->
{validity.part()}
<!-- /generated -->

So the judge decides as the live run does, and no metric of the replay alone does so reliably: the best, `layer_error`, orders cells of different budgets well, because the budget moves both sides, and policies at one budget less well the more entries they have. It was chosen on earlier prompts of `tiny`. The two models disagree on `layer_error_relative`. An interval over policies is wide with 16 of them: it is for other policies than these."""


def _prediction(measured: Sequence[Loops], curves: Sequence[Calibration], image: str) -> str:
    lines = [
        "| fitted on | tested on | values | covered | lowest | cells covered | typical factor |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    covered = {}
    for of in measured:
        points = of.points().with_columns(fold=pl.col("trace").rank("dense") % FOLDS)
        for title, by in (
            ("other prompts", ["trace"]),
            ("other policies", ["policy"]),
            ("other prompts and policies", ["fold", "policy"]),
            ("other budgets", ["asked"]),
        ):
            result = covered[of.study.prompts.model, title] = coverage(points, *by)
            lines.append(_coverage_row(_name(of), f"{_name(of)}, {title}", result))
    for metric in ("layer_error", "layer_error_relative"):
        for of, other in _pairs(measured):
            curve = fit(of.points(metric))
            result = summary(judged(curve, other.points(metric)), "policy")
            lines.append(_coverage_row(f"{_name(of)}, `{metric}`", _name(other), result))
    unseen = [covered[of.study.prompts.model, "other prompts and policies"] for of in measured]
    reached = all(each.covered >= COVERED for each in unseen)
    shares = " and ".join(
        f"{each.covered:.1%} on {_name(of)}" for each, of in zip(unseen, measured, strict=True)
    )
    return f"""## Prediction

`kvsim predict` has one model: log KL is a function of log `layer_error` that never falls, fitted by isotonic regression on prompts under policies at budgets, one curve per model. KL below {FLOOR} nats counts as {FLOOR}. Its interval is conformal, for at least 90 % of new values: its ends are quantiles of the residuals of prompts and policies that were left out of the fit, wider by what a policy may differ from {len(KINDS)} others ([hierarchical conformal prediction](https://arxiv.org/abs/2306.06342)). This correction was added when seven prompts of each model had been measured, because intervals without it covered 89.9 % and 90.1 % of unseen values; the others had no part in any choice.

![Live KL over layer error and over output error, for both models: a point for each policy and budget, points of a policy joined]({image})

Coverage below is that of values on which neither the curve nor its interval was fitted. A value is a prompt under a policy at a budget; *lowest* is the coverage of the worst prompt, policy or budget; *cells* are means over prompts of a policy at a budget; the *factor* is the median one between KL and its estimate. The number of values is that of those inside the layer errors of the fit; there are no others in an answer of `kvsim predict`.

{chr(10).join(lines)}

The aim was {COVERED:.0%} of unseen values: {"reached" if reached else "missed"}, with {shares}, where prompts and policies were both left out. Intervals cover more than they claim: with {len(KINDS)} policies the correction is large, and it is for a policy unlike the others, whose coverage *lowest* shows. **The curve does not carry over to another model**: neither the absolute layer error nor that relative to the residual stream has the same meaning in both, so `kvsim predict` refuses traces of a model that it has no curve of. `kvsim fidelity --calibration FILE` fits one on your own live runs.

What ships with kvsim:

{_curves(curves)}"""


def _pairs(measured: Sequence[Loops]) -> Iterator[tuple[Loops, Loops]]:
    yield from ((a, b) for a in measured for b in measured if a is not b)


def _coverage_row(fitted: str, tested: str, of: Coverage) -> str:
    numbers = [
        "" if np.isnan(share) else f"{share:.1%}" for share in (of.covered, of.least, of.cells)
    ]
    factor = "" if np.isnan(of.factor) else f"{of.factor:.2f}"
    return f"| {fitted} | {tested} | {of.n} of {of.of} | {' | '.join(numbers)} | {factor} |"


def _curves(curves: Sequence[Calibration]) -> str:
    lines = [
        "| model | layer error | interval, times the estimate | layer error: right answers lost |",
        "| --- | --- | --- | --- |",
    ]
    for of in curves:
        curve = of.curve
        shares = "; ".join(
            f"up to {upto:.3g}: {share:.0%} [{low:.0%}, {high:.0%}]"
            for upto, share, low, high in curve.risk
        )
        lines.append(
            f"| {of.model} | {curve.lowest:.2g} to {curve.highest:.3g} | {curve.below:.2f} to "
            f"{curve.above:.2f} | {shares} |"
        )
    return "\n".join(lines)


def _answers(measured: Sequence[Loops]) -> str:
    parts = ["## Answers"]
    for of in measured:
        checked = of.rows.filter(pl.col("full_right").is_not_null())
        right = checked.select("prompt", "full_right").unique()["full_right"]
        full = binomtest(int(right.sum()), len(right))
        low, high = full.proportion_ci(method="wilson")
        table, means = _outcomes(of), _means(of)
        budgets = of.study.budgets
        lines = [
            f"| policy | {' | '.join(f'budget {n}' for n in budgets)} | layer error | retained mass | what it does |",
            f"| --- | {'---: | ' * len(budgets)}---: | ---: | --- |",
        ]
        for name in sorted(means["response_kl"], key=lambda name: means["response_kl"][name]):
            cells = []
            for budget in budgets:
                cell = table.filter(policy=name, budget=budget)
                kl = cell.filter(metric="response_kl")["value"].mean()
                answers = cell.filter(metric="answer_right")["value"].drop_nulls()
                share = f"{answers.mean():.0%}" if len(answers) else ""
                cells.append(f"{share} ({kl:.2g})")
            cells += [f"{means['layer_error'][name]:.3g}", f"{means['retained_mass'][name]:.1%}"]
            lines.append(f"| `{name}` | {' | '.join(cells)} | {KINDS[name]} |")
        parts.append(
            f"### pass@1 of {_name(of)}\n\nWith the full cache {full.statistic:.0%} [{low:.0%}, "
            f"{high:.0%}] of {full.n} prompts that can be checked are right. Under policies: the share that is right, and "
            "(live KL, all prompts); next to them the layer error and the retained mass of the "
            "replay, means over budgets. Sorted by live KL, mean over budgets.\n\n"
            + "\n".join(lines)
        )
    parts.append(_order(measured))
    return "\n\n".join(parts)


def _outcomes(of: Loops) -> pl.DataFrame:
    """Live outcomes of each prompt and cell."""
    return of.rows.filter(
        pl.col("loop") == "closed", pl.col("metric").is_in(["response_kl", "answer_right"])
    ).select("prompt", "policy", "budget", "metric", "value")


def _means(of: Loops) -> dict[str, dict[str, float]]:
    """Means over prompts and budgets of each policy, by metric."""
    out = {}
    for metric in ("layer_error", "retained_mass", "output_error"):
        table = over_layers(of.replayed.filter(metric=metric), ["trace", "policy", "budget"])
        out[metric] = dict(table.group_by("policy").agg(pl.col("value").mean()).iter_rows())
    kl = _outcomes(of).filter(metric="response_kl").group_by("policy")
    return out | {"response_kl": dict(kl.agg(pl.col("value").mean()).iter_rows())}


def _order(measured: Sequence[Loops]) -> str:
    """What the order of policies goes with: their means over prompts and budgets."""
    lines = []
    for of in measured:
        means = _means(of)
        rhos = {}
        for metric in ("layer_error", "output_error", "retained_mass"):
            pairs = [(means[metric][name], kl) for name, kl in means["response_kl"].items()]
            rhos[metric] = spearmanr(*zip(*pairs, strict=True)).statistic
        lines.append(
            f"* {_name(of)}: {rhos['layer_error']:+.2f} with layer error, "
            f"{rhos['output_error']:+.2f} with output error, {rhos['retained_mass']:+.2f} with "
            "retained mass."
        )
    return (
        "### What the order goes with\n\nRank correlation of live KL, means over prompts and "
        f"budgets, over the {len(KINDS)} policies; the differences are not tested:\n\n"
        + "\n".join(lines)
    )


def _depth(measured: Sequence[Loops]) -> str:
    lines = [
        "| model | layer | output error, replay | live | ratio | layer error, replay | live | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    growth = []
    for of in measured:
        table = errors_by_layer(of.replayed, of.live)
        layers = table["layer"].unique().sort().to_list()
        step = max(1, (len(layers) - 1) // 6)
        for layer in sorted({*layers[::step], layers[-1]}):
            cells = []
            for metric in ("output_error", "layer_error"):
                row = table.filter(metric=metric, layer=layer).row(0, named=True)
                ratio = f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
                cells += [f"{row['open']:.3g}", f"{row['closed']:.3g}", ratio]
            lines.append(f"| {_name(of)} | {layer} | {' | '.join(cells)} |")
        most = table.filter(metric="output_error").sort("ratio", descending=True).row(0, named=True)
        least = table["between"].min()
        growth.append(
            f"on {_name(of)} up to {most['ratio']:.1f} times (layer {most['layer']}), with a rank "
            f"correlation of both loops over cells of at least {least:.2f} in every layer"
        )
    return (
        "## Errors grow with depth\n\nThe replay leaves out that errors of a layer change the "
        "input of the next one. Ratio: the sum over cells of the error in the live run by that in "
        "the replay, mean over prompts. The first layer is exact; deeper ones have more error in "
        f"the live run, {'; '.join(growth)}. So an `open` error is a lower estimate of the live "
        "one in deep layers, and still orders policies there.\n\n" + "\n".join(lines)
    )


def _kept(measured: Sequence[Loops]) -> str:
    lines = [
        "| policy | "
        + " | ".join(f"{_name(of)}: first layer | middle | last" for of in measured)
        + " |",
        "| --- |" + " ---: |" * 3 * len(measured),
    ]
    shares = []
    for of in measured:
        rows = _smallest(of)
        last = rows["layer"].max()
        shares.append({layer: rows.filter(layer=layer) for layer in (0, (last + 1) // 2, last)})
    for name in KINDS:
        cells = [
            f"{table.filter(policy=name)['value'].mean():.0%}"
            for of_model in shares
            for table in of_model.values()
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    chances = ", ".join(f"{_chance(of):.0%} on {_name(of)}" for of in measured)
    return (
        "## Kept sets of both loops\n\n|A and B| / |A or B| of the sets that replay and live run "
        "keep at the smallest budget, mean over events, heads and prompts. Two random sets have about "
        f"{chances}. Policies that look at positions alone (`random`, `streaming_llm`) decide the "
        "same in both. In the first layer the rest differ only where scores are equal or nearly so; "
        "deeper, hidden states differ more with every event, and the sets with them.\n\n"
        + "\n".join(lines)
    )


def _smallest(of: Loops) -> pl.DataFrame:
    """Agreement at the smallest budget."""
    rows = of.rows.filter(pl.col("metric") == AGREEMENT, budget=of.study.budgets[0])
    return rows.drop_nulls("value")


def _chance(of: Loops) -> float:
    """Agreement of random sets of the smallest budget at the middle of the response, mean."""
    rows = _smallest(of)
    seen, kept = (rows["tokens"] + rows["prompt_tokens"]) / 2, rows["budget"]
    both = kept * kept / seen
    return float((both / (2 * kept - both)).mean())


def _limits() -> str:
    return """## When not to trust replay

* **For the size of what happens.** Errors of deep layers are lower in a replay than in a live run, and KL is no linear function of any of them. Take `kvsim predict`, with its interval, or `kvsim live`.
* **For two policies that are close.** Correlations are over cells that differ by orders of magnitude in KL; neighbours swap places. The *within* column says how often that happens on a single prompt.
* **For single answers.** Whether an answer survives depends on a few entries and a few rows. A correlation with pass@1 below that with KL is no accident, and many cells have pass@1 0 or 1.
* **By wipe-out or the overlap of sets alone.** They say what a policy does to the cache, not what it does to the model.
* **With relative errors across layers.** A mean of relative errors counts heads that add nothing. Compare `layer_error`, which traces with output projections have.
* **For another model, other lengths, another schedule.** All numbers here are of two small models and texts of a few hundred tokens. `kvsim fidelity` measures the same on yours."""


def _yours() -> str:
    return """## On your own traces

`kvsim fidelity` replays policies over traces, runs them on the model, and prints these tables; `kvsim predict` needs no model. Layer error takes the output projections, which `kvsim capture` stores by default:

```bash exec
kvsim prompts --task walk --level 1 --n 1 > prompt.jsonl
kvsim capture --model tiny --prompts prompt.jsonl --out traces/walk.zarr
kvsim fidelity traces/walk.zarr --model tiny --policy h2o,snapkv,knorm --budget 128 --interval 16 --no-prefill
kvsim predict traces/walk.zarr --policy h2o,snapkv,knorm --budget 128 --interval 16 --no-prefill
```

With `--out DIR` the live run is kept, and `--resume` continues it. `kvsim fidelity --calibration FILE` fits a curve on at least five prompts and four policies, for `kvsim predict --calibration FILE`. In Python, the tables are `rank_correlations`, `errors_by_layer` and `kept_agreement` of `kvsim.analysis.validity`, and the curve is in `kvsim.analysis.prediction`."""
