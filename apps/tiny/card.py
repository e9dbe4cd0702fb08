"""The generated sections of the model card, from a file of measurements.

A section is between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Sections about the language
follow from the language alone, the others from rows of `apps.tiny.evaluate` and from the summary of
the training next to the weights.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors import safe_open
from scipy.stats import binomtest

from apps.tiny.curriculum import MIX_FACTS, MIX_HAYSTACK, MIX_LINES, MIX_NEEDLE, SHARES
from apps.tiny.model import SHAPES
from apps.tiny.probes import FIRST, LAST
from apps.tiny.results import Row, best, heads
from kvsim.studies.language.tasks import LEVELS, TASKS, prompts
from kvsim.tiny.vocabulary import DOMAINS, VERBS, VOCAB

MISSING = "Not measured for these weights."
#: The role of a head is where it puts at least this share of its attention: sink on the first
#: positions, marks on punctuation, local on the last positions (all three `RESTS`), retrieval on
#: the position that some word needs.
RESTS, RETRIEVAL = 1 / 3, 0.5


def write(card: Path, rows: Sequence[Row], model: Path) -> None:
    """Fill the sections of ``card`` from measurements ``rows`` of the weights in ``model``.

    A card need not have every section.
    """
    text = card.read_text("utf-8")
    parts = sections(rows, model).items()
    present = {name: part for name, part in parts if f"<!-- begin {name} -->" in text}
    card.write_text(fill(text, present), "utf-8")


def sections(rows: Sequence[Row], model: Path) -> dict[str, str]:
    """Return all generated sections by name."""
    summary = json.loads((model / "training.json").read_text("utf-8"))
    measured: dict[str, Callable[[Sequence[Row]], str]] = {
        "accuracy": accuracy,
        "layers": layers,
        "attention": attention,
    }
    return {
        "architecture": architecture(model),
        "language": language(),
        "domains": domains(),
        "levels": levels(),
        "training": training(summary),
        "data": data(),
        "guided": guided(summary["settings"].get("shape", "tiny")),
        **{name: write(rows) or MISSING for name, write in measured.items()},
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


def proportion(hits: int, n: int) -> str:
    """``hits`` of ``n`` with Wilson's 95 % interval."""
    low, high = binomtest(hits, n).proportion_ci(method="wilson")
    return f"{hits}/{n} ({100 * low:.0f}-{100 * high:.0f} %)"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# --- the language ---


def language() -> str:
    """Return facts and key that all verbs share, then a question of each verb and its response."""
    lines = {"check": 7, "wait": 10}
    short = partial(prompts, 1, facts=4, kinds=3, filler=0.6, report=2, domain="ore")
    blocks: list[str] = []
    for verb in VERBS:
        (sample,) = short(seed=87, task=verb, lines=lines.get(verb, 4))
        shared, question, rest = sample.prompt.partition("question ")
        blocks = blocks or [_broken(shared, ("key",))]
        prompt = _broken(question + rest, ("report",))
        blocks.append(f"{prompt}\n\n{_broken(sample.response, ('done',))}")
    return "\n\n".join(f"```text\n{block}\n```" for block in blocks)


def _broken(text: str, before: Sequence[str], width: int = 96) -> str:
    """Break ``text`` into lines of at most ``width``, after clauses and ``before`` some words."""
    lines: list[str] = []
    clause: list[str] = []
    for word in text.split():
        clause.append(word)
        if word not in (".", ",", ";", ":"):
            continue
        joined = " ".join(clause)
        if lines and clause[0] not in before and len(lines[-1]) + 1 + len(joined) <= width:
            lines[-1] += f" {joined}"
        else:
            lines.append(joined)
        clause = []
    return "\n".join(lines)


def domains() -> str:
    """Return the table of the words of each domain."""
    rows = [
        [name, " ".join(domain.kinds), " ".join(domain.nouns)] for name, domain in DOMAINS.items()
    ]
    return table(["domain", "kinds", "nouns of the filler"], rows)


def levels() -> str:
    """Return two tables: the sizes of each level, and the lengths of its sequences."""
    number = range(len(LEVELS["walk"]))
    sizes = []
    for index in number:
        size, few = LEVELS["walk"][index], LEVELS["needle"][index]
        needle = f"{few.facts} facts, {few.kinds} kinds, filler {few.filler:g}"
        row = [index + 1, size.facts, size.kinds, f"{size.filler:g}", size.cycle, needle]
        sizes.append([str(cell) for cell in row])
    head = ["level", "facts", "kinds", "filler", "cycle", "needle instead"]
    lengths = [
        [task, *(_length(task, index + 1, LEVELS[task][index].lines) for index in number)]
        for task in TASKS
    ]
    names = [f"level {index + 1}" for index in number]
    return table(head, sizes) + "\n\n" + table(["lines; tokens; reach", *names], lengths)


def _length(task: str, level: int, lines: int) -> str:
    samples = prompts(20, seed=2, task=task, level=level)
    tokens = [sample.tokens for sample in samples]
    reach = sum(sample.reach for sample in samples) / len(samples)
    return f"{lines}; {min(tokens)}-{max(tokens)}; {reach:.0f}"


# --- training ---


def architecture(model: Path) -> str:
    """Describe the model from its configuration and the size of its weights."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    weights = model / "model.safetensors"
    with safe_open(weights, "pt") as tensors:
        slices = [tensors.get_slice(name) for name in tensors.keys()]  # noqa: SIM118 - no mapping
    kind = {"F32": "float32", "BF16": "bfloat16"}[slices[0].get_dtype()]
    parameters = sum(math.prod(each.get_shape()) for each in slices)
    return (
        f"A plain Qwen2 decoder of {parameters:,} parameters "
        f"in {kind} ({weights.stat().st_size / 1e6:.1f} MB): {config['num_hidden_layers']} layers, "
        f"hidden size {config['hidden_size']}, {config['num_attention_heads']} query heads and "
        f"{config['num_key_value_heads']} KV heads of {config['head_dim']} dimensions, SwiGLU of "
        f"{config['intermediate_size']}, biases on q, k and v, tied embeddings, RoPE base "
        f"{config['rope_parameters']['rope_theta']:,.0f}, {config['max_position_embeddings']:,} "
        f"positions in the configuration. The vocabulary has {len(VOCAB)} words."
    )


def training(summary: Row) -> str:
    """Describe the training run, from the summary next to the weights."""
    progress, settings = summary["progress"], summary["settings"]
    stages, passed = settings["stages"], progress["passed"]
    curriculum = passed[-1] if len(passed) == len(stages) else progress["step"]
    return (
        f"{progress['step']:,} steps ({curriculum:,} of them curriculum), "
        f"{progress['tokens'] / 1e6:.1f} million tokens, {progress['seconds'] / 60:.0f} minutes, "
        f"seed {settings['seed']}. "
        f"AdamW, peak {settings['learning_rate']:g} after {settings['warm_up']} steps of warm-up, "
        f"linear decay over the last {settings['decay']:.0%} of the mix. "
        f"Batches of {settings['stage_tokens']:,} tokens in the curriculum and "
        f"{settings['mix_tokens']:,} in the mix, padding included. "
        f"The losses that exist in training only weigh {settings['extra']:g}, and a tenth of it at "
        f"the end."
    )


def data() -> str:
    """Describe the mix."""
    shares = ", ".join(f"{task} {share} %" for task, share in SHARES.items())
    return (
        f"Tasks by share: {shares}. The mix has {_span(MIX_FACTS)} facts and {_span(MIX_LINES)} "
        f"lines, needles {_span(MIX_NEEDLE)} facts with up to {MIX_HAYSTACK:g} sentences of filler "
        f"before each."
    )


def guided(shape: str) -> str:
    """List the heads that training guides."""
    labels = {
        "second": "the second of two retrievals",
        "item": "the next item of a list",
        "kind": "the kind of a correction",
        "digit": "the digit of a correction",
    }
    heads_ = SHAPES[shape].guided.items()
    return "\n".join(
        f"* {labels.get(role, role)}: layer {layer}, query head {head}"
        for role, (layer, head) in heads_
    )


def _span(pair: Sequence[int]) -> str:
    return f"{pair[0]}-{pair[1]}"


# --- measurements ---


def accuracy(rows: Sequence[Row]) -> str:
    """Return exact chains of each level, and what went wrong in the cells with errors."""
    cells = best(rows, "accuracy")
    if not cells:
        return ""
    levels_: dict[int, list[Row]] = {}
    for (_, level), row in cells.items():
        levels_.setdefault(level, []).append(row)
    pooled = [
        proportion(sum(row["chain"] for row in same), sum(row["n"] for row in same))
        for _, same in sorted(levels_.items())
    ]
    body = [
        [task, str(level), proportion(row["chain"], row["n"]), _counts(row["errors"])]
        for (task, level), row in cells.items()
        if row["errors"]
    ]
    head = ["task", "level", "chain", "first wrong word"]
    together = table(["", *(f"level {level}" for level in sorted(levels_))], [["all", *pooled]])
    return f"{together}\n\nTasks and levels with errors:\n\n{table(head, body)}"


def _counts(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in Counter(errors).most_common())


def layers(rows: Sequence[Row]) -> str:
    """Return exact chains and right words without the attention of a layer.

    Layers with the same values share a row.
    """
    cells = best(rows, "ablation")
    if not cells:
        return ""
    removed = next(iter(cells.values()))["removed"]
    parts = [name for name in removed if "head" not in name and "mean" not in name]
    same: dict[tuple[str, ...], list[str]] = {}
    for part in parts[1:]:
        same.setdefault(_without(cells, part), []).append(part)
    body = [["nothing", *_without(cells, parts[0])]]
    body += [[", ".join(names), *values] for values, names in same.items()]
    return table(["without", *(task for task, _ in cells)], body)


def _without(cells: Mapping[tuple[str, int], Row], part: str) -> tuple[str, ...]:
    shares = ((row["removed"][part], row["n"]) for row in cells.values())
    return tuple(f"{each['exact']}/{n}, {each['right']:.3f}" for each, n in shares)


# --- heads ---


def roles(head: Row) -> list[str]:
    """Return the roles of a head."""
    names = ["retrieval"] if max(head["mass"].values(), default=0.0) >= RETRIEVAL else []
    rests = {"first": "sink", "marks": "marks", "last": "local"}
    names += [role for name, role in rests.items() if head[name] >= RESTS]
    return names or ["mixed"]


def attention(rows: Sequence[Row]) -> str:
    """Return where the attention of each head goes, and its roles.

    Heads of a layer with the same roles and the same words share a row, with ranges.
    """
    measured = heads(rows)
    if not measured:
        return ""
    rows_of: dict[tuple[str, ...], list[Row]] = {}
    for each in measured:
        key = (str(each["layer"]), ", ".join(roles(each)), _finds(each))
        rows_of.setdefault(key, []).append(each)
    body = [
        [
            layer,
            ", ".join(str(each["head"]) for each in same),
            _range(same, "effective", ".1f"),
            shown,
            found,
        ]
        for (layer, shown, found), same in rows_of.items()
    ]
    head = ["layer", "query head", "effective tokens", "role", "retrieves"]
    means = (
        f"Roles: *sink*, *marks* and *local* have at least {RESTS:.2f} of the attention on the "
        f"first {FIRST} positions, on marks and on the last {LAST}; *retrieval* has at least "
        f"{RETRIEVAL:.2f} on the very position that a word is looked up from, on average over the "
        "words in the last column."
    )
    return f"{means}\n\n{table(head, body)}"


def _range(same: Sequence[Row], name: str, spec: str) -> str:
    low, high = (format(bound(each[name] for each in same), spec) for bound in (min, max))
    return low if low == high else f"{low}-{high}"


def _finds(head: Row) -> str:
    masses = {name: mass for name, mass in head["mass"].items() if mass >= RETRIEVAL}
    return "; ".join(f"{name} {mass:.2f}" for name, mass in masses.items())
