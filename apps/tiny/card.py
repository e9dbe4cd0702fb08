"""The generated sections of the card of both models, from files of measurements.

A section is between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Sections about the language
follow from the language alone, the others from rows of `apps.tiny.evaluate` and from the summary of
the training next to the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from scipy.stats import binomtest

from apps.tiny.heads import head_masses
from apps.tiny.results import Results, Row, best, digest
from kvsim.plots import save
from kvsim.studies.language.tasks import LEVELS, TASKS, prompts
from kvsim.tiny import MODELS

#: The role of a head is where it puts at least this share of its attention: sink on the first
#: positions, marks on punctuation, local on the last positions (all three `RESTS`), retrieval on
#: the position that some word needs.
RESTS, RETRIEVAL = 1 / 3, 0.5


def write(card: Path) -> None:
    """Fill the sections of ``card`` and draw its picture, from the results next to it."""
    card.write_text(fill(card.read_text("utf-8"), sections(card.parent)), "utf-8")
    picture = card.parent / "images" / "tiny-retrieval.png"
    save(head_masses(measured(card.parent)["tiny"]), picture, overwrite=True)


def measured(folder: Path) -> dict[str, Sequence[Row]]:
    """Return the measurements of each shipped model from the files in ``folder``."""
    return {
        name: Results(folder / f"{name}-results.jsonl", digest(model)).rows()
        for name, model in MODELS.items()
    }


def sections(folder: Path) -> dict[str, str]:
    """Return all generated sections by name, from the results in ``folder``."""
    rows = measured(folder)
    columns = {name: [*shape(MODELS[name]), *accuracy(rows[name])] for name in rows}
    titles = [title for title, _ in next(iter(columns.values()))]
    values = zip(*([value for _, value in column] for column in columns.values()), strict=True)
    lines = [[title, *row] for title, row in zip(titles, values, strict=True)]
    return {
        "example": example(),
        "levels": levels(),
        "models": table(["", *(f"`{name}`" for name in columns)], lines),
        "layers": "\n".join(f"* `{name}`: {layers(rows[name])}." for name in rows),
    }


def fill(card: str, texts: Mapping[str, str]) -> str:
    """Return ``card`` with each section's text between its ``begin`` and ``end`` marker."""
    for name, text in texts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, opened, rest = card.partition(begin)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"the card lacks the markers {begin} and {end}")
        card = f"{before}{begin}\n{text}\n{end}{after}"
    return card


def proportion(hits: int, n: int, spec: str = ".0f") -> str:
    """Return ``hits`` of ``n`` with Wilson's 95 % interval in percent."""
    ends = binomtest(hits, n).proportion_ci(method="wilson")
    return f"{hits}/{n} ({100 * ends.low:{spec}} to {100 * ends.high:{spec}} %)"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def example() -> str:
    """Return a prompt and its response, with a line for each part."""
    (sample,) = prompts(
        1, 87, task="walk", domain="ore", facts=4, kinds=3, filler=0.6, report=2, lines=4
    )
    prompt = sample.prompt
    for part in ("key :", "question :", "report #"):
        prompt = prompt.replace(f" {part}", f"\n{part}")
    return f"```text\n{prompt}\n\n{sample.response.replace(' done', chr(10) + 'done')}\n```"


def levels() -> str:
    """Return the sizes of each level and the lengths of its sequences."""
    lines = []
    for level, size in enumerate(LEVELS["walk"], 1):
        samples = [each for task in TASKS for each in prompts(20, seed=2, task=task, level=level)]
        tokens = [sample.tokens for sample in samples]
        numbers = f"{size.facts} facts, {size.kinds} kinds, cycles of {size.cycle} nodes"
        lines.append(f"* Level {level}: {numbers}, {min(tokens)} to {max(tokens)} tokens.")
    return "\n".join(lines)


def shape(model: Path) -> list[tuple[str, str]]:
    """Return what a model is and how long it was trained: configuration, weights and summary."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    progress = json.loads((model / "training.json").read_text("utf-8"))["progress"]
    with safe_open(model / "model.safetensors", "pt") as tensors:
        slices = [tensors.get_slice(name) for name in tensors.keys()]  # noqa: SIM118 - no mapping
    kind = {"F32": "float32", "BF16": "bfloat16"}[slices[0].get_dtype()]
    parameters = sum(math.prod(each.get_shape()) for each in slices)
    heads = f"{config['num_attention_heads']}, {config['num_key_value_heads']}"
    widths = f"{config['hidden_size']}, {config['head_dim']}, {config['intermediate_size']}"
    minutes = f"{progress['seconds'] / 60:.0f}"
    return [
        ("parameters", f"{parameters:,}, {kind}"),
        ("layers", str(config["num_hidden_layers"])),
        ("query heads, KV heads", heads),
        ("hidden, head, SwiGLU size", widths),
        ("million tokens, minutes", f"{progress['tokens'] / 1e6:.1f}, {minutes}"),
    ]


def accuracy(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the exact chains of levels, all tasks together, with Wilson's 95 % interval."""
    cells = best(rows, "accuracy")
    lines = []
    for label, wanted in (("levels 1 to 4", range(1, 5)), ("level 5", (5,))):
        same = [row for (_, level), row in cells.items() if level in wanted]
        hits, n = sum(row["chain"] for row in same), sum(row["n"] for row in same)
        lines.append((f"exact chains, {label}", proportion(hits, n, ".1f")))
    return lines


def layers(rows: Sequence[Row]) -> str:
    """Return how many chains stay exact without the attention of a layer, all tasks together."""
    cells = [*best(rows, "ablation").values()]
    parts = [name for name in cells[0]["removed"] if "head" not in name and "mean" not in name]
    exact = {name: sum(row["removed"][name]["exact"] for row in cells) for name in parts}
    same = {n: [name.split()[-1] for name in parts[1:] if exact[name] == n] for n in exact.values()}
    without = [f"{n} without layer {_any(of)}" for n, of in same.items() if of]
    total = sum(row["n"] for row in cells)
    return f"{exact['nothing']} of {total} chains are exact; {'; '.join(without)}"


def _any(of: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(of[:-1]), of[-1])))


def roles(head: Row) -> list[str]:
    """Return the roles of a head."""
    names = ["retrieval"] if max(head["mass"].values(), default=0.0) >= RETRIEVAL else []
    rests = {"first": "sink", "marks": "marks", "last": "local"}
    names += [role for name, role in rests.items() if head[name] >= RESTS]
    return names or ["mixed"]
