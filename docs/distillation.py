# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""The shipped model before and after distillation under eviction: tables and figure of the page.

    python docs/distillation.py DIR         measures the model of `python -m apps.tiny.distill`
    python docs/distillation.py             the page of what is measured already: seconds
    python docs/distillation.py DIR --trial NAME   a line of a run that is not the main one, or of
                                                   `python -m apps.tiny.reinforce`

What was measured is kept in `docs/distillation-results.jsonl`, a line for each model, policy and
budget; `right` has a digit for each prompt. A cell of the same weights and prompts is not measured
again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
import torch
from matplotlib.figure import Figure
from study import ROOT, Rows, append, finished, picture, put, read
from transformers import PreTrainedModel
from transformers.utils import logging

import kvsim
from apps.tiny.adapt import draw, encode
from apps.tiny.card import proportion
from apps.tiny.card import table as markdown
from apps.tiny.results import digest
from kvsim.analysis.significance import at_least
from kvsim.analysis.summaries import Interval
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.plots.style import COLOURS
from kvsim.recorder import load_model
from kvsim.studies.language.ledger import check
from kvsim.studies.language.tasks import TASKS, Sample, prompts
from kvsim.tiny import PATH

PAGE, RESULTS = ROOT / "docs/distillation.md", ROOT / "docs/distillation-results.jsonl"
FIGURE, CURVES = "figures/distillation.png", "figures/reinforcement.png"
INTERVAL, N, SEED = 16, 200, "held out"
#: The policy and the budget of the training, and what else is measured.
MAIN = ("gkv", 64)
CELLS = (
    *(("gkv", budget) for budget in (48, 64, 80, 96)),
    ("adakv+gkv", 64),
    *((name, 96) for name in ("snapkv", "h2o", "expected_attention")),
)
#: What models of reinforcement learning are measured by.
REINFORCED = (*(("gkv", budget) for budget in (48, 64, 80)), ("adakv+gkv", 64), ("snapkv", 96))
#: Parameters made for thousands of tokens, made smaller.
PARAMS = {name: {"window": 8} for name in ("gkv", "snapkv", "adakv+gkv")}
METRICS = ("top_agreement", "response_kl", "output_error")
#: Levels of prompts that training did not draw, and samples of each task.
LEVELS_MEASURED, EACH = (1, 2, 3), 20
#: Attention from which a head reads a word.
READS = 0.1


# ------------------------------------------------------------------------------------- measurement


def samples() -> list[Sample]:
    """Held-out prompts: drawn as those of training, with other seeds."""
    return [draw(random.Random(f"{SEED} {number}")) for number in range(N)]


def full_right(model: PreTrainedModel, sample: Sample) -> bool:
    """Whether the model writes the right response with the full cache, greedily."""
    ids, prompt_len = encode(sample)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, prompt_len - 1 : -1]
    right: bool = logits.argmax(-1).tolist() == ids[prompt_len:]
    return right


def measured(
    folder: Path, has: Callable[..., bool], chosen: Sequence[tuple[str, int]], *, whole: bool
) -> Iterator[dict[str, Any]]:
    """Yield the results of the model in a folder that are missing: full cache, levels, cells."""
    model, tokenizer = load_model(folder, dtype="float32")
    prompts_held_out = samples()
    full = [full_right(model, sample) for sample in prompts_held_out]
    traces = [recorded(model, tokenizer, *pair) for pair in enumerate(prompts_held_out)]
    if not has(part="full"):
        pairs_of = zip(traces, prompts_held_out, strict=True)
        heads = np.mean([reading_heads(*pair) for pair in pairs_of])
        yield {"part": "full", "right": digits(full), "reading_heads": round(float(heads), 3)}
    for name, budget in sorted(chosen, key=lambda pair: pair != MAIN):  # the main one first
        if has(part="policy", policy=name, budget=budget):
            continue
        written = (name, budget) == MAIN and whole
        run = kvsim.live(
            model,
            traces,
            [kvsim.policy(name, **PARAMS.get(name, {}))],
            [budget],
            tokenizer=tokenizer,
            interval=INTERVAL,
            prefill=True,
            max_new_tokens=64 if written else 0,
            metrics=METRICS,
        )
        yield cell(name, budget, finished(run), full, prompts_held_out)
    for level in LEVELS_MEASURED if whole else ():
        if has(part="level", level=level):
            continue
        more = [each for task in TASKS for each in prompts(EACH, 4242, task=task, level=level)]
        answers = digits(full_right(model, sample) for sample in more)
        yield {"part": "level", "level": level, "right": answers}


def recorded(model: PreTrainedModel, tokenizer: Any, number: int, sample: Sample) -> Trace:
    """The right response to a prompt, recorded."""
    ids, prompt_len = encode(sample)
    return kvsim.capture(
        model,
        tokenizer,
        sample.prompt,
        response=ids[prompt_len:],
        name=f"held-out-{number}",
    )


def cell(
    name: str, budget: int, run: Any, full: Sequence[bool], drawn: Sequence[Sample]
) -> dict[str, Any]:
    """The line of a policy and a budget."""
    means = run.table.group_by("trace", "metric", maintain_order=True).agg(pl.col("value").mean())
    wide = means.pivot(on="metric", values="value", maintain_order=True)
    same = (wide["top_agreement"] == 1).to_list()
    line = {
        "part": "policy",
        "policy": name,
        "budget": budget,
        # the most likely tokens are those of the full cache, which are right
        "right": digits(a and b for a, b in zip(same, full, strict=True)),
        "seen": round(float(np.mean(list(map(seen, run.records, drawn)))), 4),
    }
    for metric in ("response_kl", "output_error"):
        line[metric] = round(float(wide[metric].mean()), 4)
    if run.responses is not None and len(run.responses):
        texts = zip(drawn, run.responses["text"], strict=True)
        line["written"] = digits(check(sample.prompt, text).exact for sample, text in texts)
    return line


def digits(values: Any) -> str:
    """A digit for each prompt: 1 for right."""
    return "".join(str(int(value)) for value in values)


def needed(sample: Sample) -> list[tuple[int, int]]:
    """The row of each retrieval of the response, and the position of each word that it reads."""
    return [
        (1 + retrieval.at, 1 + at)
        for retrieval in sample.retrievals
        for at in retrieval.path
        if 1 + at <= sample.prompt_words
    ]


def seen(record: Record, sample: Sample) -> float:
    """Share of the needed words of the prompt that rows see, mean over heads of layers 1 and 2."""
    rows, at = np.array(needed(sample)).T
    return float((record.evicted_at[1:, :, at] >= rows).mean())


def reading_heads(trace: Trace, sample: Sample) -> float:
    """Query heads of layers 1 and 2 that read a needed word, with the full cache; mean of words."""
    rows, at = np.array(needed(sample)).T
    each = range(len(rows))
    reads = [trace.attention(layer, rows)[:, each, at] > READS for layer in (1, 2)]
    return float(torch.cat(reads).sum(0).float().mean())


# ---------------------------------------------------------------------------------------- the page


def lines() -> Rows:
    """Return the measured cells, a line each."""
    return read(RESULTS)


def right(line: Mapping[str, Any], key: str = "right") -> np.ndarray[Any, np.dtype[np.float64]]:
    """1 for each prompt that is answered right, else 0."""
    return np.array([int(digit) for digit in line[key]], np.float64)


def count(line: Mapping[str, Any], key: str = "right") -> str:
    """Right answers, with Wilson's interval."""
    return proportion(int(right(line, key).sum()), len(line[key]))


def pairs(rows: Sequence[Mapping[str, Any]], part: str) -> list[tuple[Any, Any]]:
    """The lines of a part before and after the main run."""
    after = next(row["weights"] for row in rows if row["part"] == "training" and "trial" not in row)
    names = ("policy", "budget", "level")
    of = {
        (row["weights"], *(row.get(name) for name in names)): row
        for row in rows
        if row["part"] == part
    }
    before = digest(PATH)
    keys = [key[1:] for key in of if key[0] == before and (after, *key[1:]) in of]
    place = {cell: at for at, cell in enumerate(CELLS)}
    keys.sort(key=lambda key: (place.get(key[:2], 0), key[2] or 0))
    return [(of[before, *key], of[after, *key]) for key in keys]


def policies(cells: Sequence[tuple[Any, Any]]) -> str:
    """The table of policies and budgets."""
    gaps = [right(after) - right(before) for before, after in cells]
    body = []
    for (before, after), gap in zip(cells, gaps, strict=True):
        main = (before["policy"], before["budget"]) == MAIN
        body.append(
            [
                f"**`{before['policy']}`**" if main else f"`{before['policy']}`",
                f"**{before['budget']}**" if main else str(before["budget"]),
                count(before),
                count(after),
                Interval.of(100 * gap).text("+.0f"),
                f"{before['response_kl']:.2f} → {after['response_kl']:.2f}",
                f"{before['output_error']:.2f} → {after['output_error']:.2f}",
                f"{before['seen']:.0%} → {after['seen']:.0%}",
            ]
        )
    head = ["policy", "budget", "right before", "right after", "points gained"]
    of_gkv = [gap for (cell, _), gap in zip(cells, gaps, strict=True) if "gkv" in cell["policy"]]
    p = at_least(np.stack(of_gkv, 1), len(of_gkv))
    text = (
        f"More responses are right in all {len(of_gkv)} lines of `gkv` and `adakv+gkv` (one test "
        f"over {len(gaps[0])} prompts, p = {p:.2g})."
    )
    return markdown([*head, "KL", "output error", "needed words seen"], body) + f"\n\n{text}"


def levels(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of right answers with the full cache."""
    full = [("prompts as in training, held out", *pair) for pair in pairs(rows, "full")]
    more = [(f"level {pair[0]['level']}", *pair) for pair in pairs(rows, "level")]
    body = [
        [name, count(a), count(b), Interval.of(100 * (right(b) - right(a))).text("+.1f")]
        for name, a, b in [*full, *more]
    ]
    return markdown(["full cache", "right before", "right after", "points gained"], body)


def training(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the cost of the run, and summarise its effect."""
    run = next(row for row in rows if row["part"] == "training" and "trial" not in row)
    settings, curve = run["settings"], np.array(run["kl"])
    tenth = max(1, len(curve) // 10)
    before, after = next(
        pair for pair in pairs(rows, "policy") if (pair[0]["policy"], pair[0]["budget"]) == MAIN
    )
    full = pairs(rows, "full")[0]
    gap = right(full[0]).mean() - right(before).mean()
    gain = right(after).mean() - right(before).mean()
    verdicts = [(right(x) == right(x, "written")).sum() for x in (before, after)]
    return f"""{settings["steps"]} steps of {settings["batch"]} sequences, {run["seconds"] / 60:.0f} minutes of one CPU core. The divergence of a token under the policy falls from {curve[:tenth].mean():.2f} to {curve[-tenth:].mean():.2f} nats (means of the first and the last tenth of the steps).

Under `{MAIN[0]}` with {MAIN[1]} entries, {count(before)} responses to held-out prompts are right before and {count(after)} after. That closes {gain / gap:.0%} of the gap to the full cache, with which {count(full[0])} are right before and {count(full[1])} after. Each head of layers 1 and 2 sees {before["seen"]:.0%} of the needed words before and {after["seen"]:.0%} after; with the full cache, such a word is read (attention above {READS}) by {full[0]["reading_heads"]:.1f} query heads before and {full[1]["reading_heads"]:.1f} after.

A response counts as right if each token of the right one is the likeliest under the live model. In the main cell the model also wrote its own responses; the verdict is the same for {verdicts[0]} of {len(before["right"])} prompts before and {verdicts[1]} after."""


def trials(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of all runs, the main one and the others."""
    body = []
    for run in (row for row in rows if row["part"] == "training"):
        of = {row["part"]: row for row in rows if row["weights"] == run["weights"]}
        main = [
            row
            for row in rows
            if row["weights"] == run["weights"] and (row.get("policy"), row.get("budget")) == MAIN
        ]
        settings = run["settings"]
        changed = [
            f"{settings['learning_rate']:g}",
            str(settings["batch"]),
            f"{settings['full']:.0%}",
            f"{settings.get('share', 1.0):.0%}",
            str(len(run["kl"])),
        ]
        body.append([run.get("trial", "main run"), *changed, count(main[0]), count(of["full"])])
    head = ["run", "learning rate", "batch", "without eviction", "share", "steps"]
    return markdown([*head, f"right, `{MAIN[0]}` at {MAIN[1]}", "right, full cache"], body)


def reinforced(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the runs of reinforcement learning, beside the start and distillation."""
    of = {
        (row["weights"], row["part"], row.get("policy"), row.get("budget")): row
        for row in rows
        if row["part"] in ("policy", "full")
    }
    main = next(row for row in rows if row["part"] == "training" and "trial" not in row)
    runs = [row for row in rows if row["part"] == "reinforcement"]
    models = [("the shipped model", digest(PATH)), ("distilled", main["weights"])]
    models += [(run["trial"], run["weights"]) for run in runs]
    body = [
        [
            name,
            *(count(of[weights, "policy", *cell]) for cell in REINFORCED),
            count(of[weights, "full", None, None]),
        ]
        for name, weights in models
    ]
    head = ["model", *(f"`{name}`, {budget}" for name, budget in REINFORCED), "full cache"]
    return markdown(head, body)


def curves(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Reward and length of the responses of reinforcement learning by step, means of ten steps."""
    runs = [row for row in rows if row["part"] == "reinforcement"]
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.4), layout="constrained")
    labels = {"reward": "right words", "right": "right responses", "length": "tokens of a response"}
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        for run, colour in zip(runs, COLOURS, strict=False):
            values = np.array(run[name])
            tens = values[: len(values) // 10 * 10].reshape(-1, 10).mean(1)
            scale = 1 if name == "length" else 100
            at = np.arange(len(tens)) * 10 + 5.5
            axis.plot(at, scale * tens, color=colour, marker="o", markersize=3, label=run["trial"])
        axis.set(xlabel="step", ylabel=label if name == "length" else f"{label} [%]")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize="small")
    return figure


def drawn(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Right answers before and after, and the divergence by step."""
    cells = pairs(rows, "policy")
    figure, (left, axis) = plt.subplots(
        1, 2, figsize=(9.5, 4.6), width_ratios=(2, 1), layout="constrained"
    )
    for at, (name, colour) in enumerate((("before", COLOURS[0]), ("after", COLOURS[1]))):
        spans = [Interval.of(100 * right(pair[at])) for pair in cells]
        y = np.arange(len(cells)) + (at - 0.5) * 0.3
        means = np.array([span.mean for span in spans])
        ends = np.abs(np.array([(span.low, span.high) for span in spans]).T - means)
        left.errorbar(means, y, xerr=ends, fmt="o", color=colour, label=name, markersize=4)
    labels = [f"{a['policy']}, {a['budget']}" for a, _ in cells]
    left.set(
        yticks=range(len(cells)),
        yticklabels=labels,
        xlabel="right answers [%]",
        xlim=(-3, 103),
        title=f"{len(cells[0][0]['right'])} held-out prompts, 95 % interval (closed loop)",
    )
    left.invert_yaxis()
    left.legend(loc="upper right")
    run = next(row for row in rows if row["part"] == "training" and "trial" not in row)
    curve = np.array(run["kl"])
    tens = curve[: len(curve) // 10 * 10].reshape(-1, 10).mean(1)
    axis.plot(np.arange(1, 1 + len(curve)), curve, color=COLOURS[2], linewidth=0.6, alpha=0.5)
    axis.plot(np.arange(len(tens)) * 10 + 5.5, tens, color=COLOURS[2], marker="o", markersize=3)
    axis.set(
        xlabel="step",
        ylabel="KL(teacher ‖ student) of a token [nats]",
        title=f"training, {MAIN[0]} at {MAIN[1]}",
        ylim=(0, None),
    )
    return figure


def sections(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The generated parts of the page."""
    return {
        "training": training(rows),
        "policies": policies(pairs(rows, "policy")),
        "levels": levels(rows),
        "trials": trials(rows),
        "reinforced": reinforced(rows),
    }


def write() -> None:
    """Write the generated parts of the page, and its figure."""
    rows = lines()
    put(PAGE, sections(rows))
    for name, draw_figure in ((FIGURE, drawn), (CURVES, curves)):
        picture(draw_figure(rows), PAGE.parent / name, dpi=110, metadata={"Software": None})


def measure(folder: Path, trial: str | None) -> None:
    """Add what is not in the results yet of a model."""
    weights, summary = digest(folder), folder / "training.json"

    def has(**keys: Any) -> bool:
        keys["weights"] = weights
        return any(keys.items() <= row.items() for row in lines())

    run = json.loads(summary.read_text("utf-8")) if summary.exists() else {}
    part = "reinforcement" if "reward" in run else "training"
    if run and not has(part=part):
        name = {"trial": trial} if trial else {}
        append(RESULTS, [{"weights": weights, "part": part, **run, **name}])
    chosen = REINFORCED if part == "reinforcement" else [MAIN] if trial else CELLS
    for row in measured(folder, has, chosen, whole=trial is None):
        print(json.dumps(row), flush=True)
        append(RESULTS, [{"weights": weights, **row}])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure models, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of the adapted model")
    parser.add_argument("--trial", help="the name of a run that is not the main one")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if args.folder is None:
        write()
        return
    for folder in (args.folder,) if args.trial else (PATH, args.folder):
        measure(folder, args.trial)


if __name__ == "__main__":
    main()
