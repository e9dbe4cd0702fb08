"""Measure a tiny model: accuracy, what each layer is needed for, what its heads attend to.

    python -m kvsim.tiny.evaluate [--n 48] [--model PATH] [--card docs/tiny-model-card.md]

Prints one Markdown table for each question; with ``--card`` it also writes them between the
markers of the model card, so that no number there is typed.

Shape letters: B sequences, T positions, H query heads.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvsim.tiny import PATH
from kvsim.tiny.curriculum import IGNORE, collate
from kvsim.tiny.ledger import Check, Sample, Task, check, prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SEED = 1000  # of the first cell; development samples and examples use small seeds
BATCH = 16  # sequences that generate together
DEMO = range(24, 49)  # facts in a prompt of the demo


@dataclass(frozen=True)
class Cell:
    """One task at one size; ``ring`` puts all facts of a walk into one cycle."""

    task: Task
    facts: int
    lines: int
    ring: bool = False

    @property
    def name(self) -> str:
        """What the tables call it."""
        return f"{self.task}, one cycle" if self.ring else self.task

    def samples(self, n: int, seed: int) -> list[Sample]:
        """``n`` samples of this cell."""
        cycle = self.facts if self.ring else None
        return prompts(n, seed, task=self.task, facts=self.facts, lines=self.lines, cycle=cycle)


CELLS = (
    Cell("walk", 12, 24),
    Cell("walk", 24, 40),
    Cell("walk", 32, 48),
    Cell("walk", 40, 56),
    Cell("walk", 48, 64),
    Cell("walk", 64, 80),
    Cell("walk", 24, 40, ring=True),
    Cell("walk", 40, 56, ring=True),
    Cell("walk", 48, 64, ring=True),
    Cell("get", 12, 12),
    Cell("get", 24, 24),
    Cell("get", 32, 32),
    Cell("get", 40, 40),
    Cell("get", 48, 48),
    Cell("get", 64, 64),
)
PROBED = (Cell("walk", 40, 56), Cell("walk", 40, 56, ring=True), Cell("get", 40, 40))


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion (Wilson 1927, J. Am. Stat. Assoc. 22:209)."""
    z = 1.959964
    centre = (hits + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(hits * (n - hits) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def respond(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]
) -> list[str]:
    """The model's own greedy responses to the prompts of ``samples``, with a full cache.

    Prompts of different lengths are padded on the left and masked, so positions stay true.
    """
    found: list[str] = []
    longest = max(len(sample.response.split()) for sample in samples)
    for first in range(0, len(samples), BATCH):
        texts = [sample.prompt for sample in samples[first : first + BATCH]]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        generate: Any = model.generate  # mypy takes the method for a tensor
        sequences = generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=False,
            max_new_tokens=longest + 8,  # room to go on where it should have stopped
        )
        found += tokenizer.batch_decode(
            sequences[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return found


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cells: Sequence[Cell], n: int
) -> str:
    """Table of exact chains, reports and answers for each cell, with intervals.

    The last row pools the cells of the demo's sizes.
    """
    rows = []
    pooled: list[Check] = []
    for index, cell in enumerate(cells):
        samples = cell.samples(n, SEED + index)
        checks = [
            check(sample.prompt, response)
            for sample, response in zip(samples, respond(model, tokenizer, samples), strict=True)
        ]
        if cell.facts in DEMO:
            pooled += checks
        tokens = [sample.tokens for sample in samples]
        size = [str(cell.facts), str(cell.lines), f"{min(tokens)}-{max(tokens)}"]
        rows.append([cell.name, *size, *_verdict(checks)])
        print(*rows[-1], sep="  ", file=sys.stderr)
    if pooled:
        rows.append(["together", f"{DEMO[0]}-{DEMO[-1]}", "", "", *_verdict(pooled)])
    head = ["task", "facts", "lines", "tokens", "chain", "report", "answer", "right tokens"]
    return _table(head, rows)


def _verdict(checks: Sequence[Check]) -> list[str]:
    return [
        _proportion([found.chain_exact for found in checks]),
        _proportion([found.report_exact for found in checks]),
        _proportion([found.answer_exact for found in checks]),
        f"{sum(found.share for found in checks) / len(checks):.4f}",
    ]


def _proportion(hits: Sequence[bool]) -> str:
    low, high = wilson(sum(hits), len(hits))
    return f"{sum(hits)}/{len(hits)} ({100 * low:.0f}-{100 * high:.0f} %)"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@contextmanager
def without_attention(model: PreTrainedModel, layer: int | None) -> Iterator[None]:
    """The output of one layer's attention is zero inside the ``with``; None changes nothing."""
    if layer is None:
        yield
        return

    def zero(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.zeros_like(inputs[0]), *inputs[1:])

    projection: Any = model.get_submodule(f"model.layers.{layer}.self_attn.o_proj")
    handle = projection.register_forward_pre_hook(zero)
    try:
        yield
    finally:
        handle.remove()


def ablation(model: PreTrainedModel, cells: Sequence[Cell], n: int) -> str:
    """Table of exact chains and right tokens, teacher-forced, without one layer's attention."""
    layers: list[int | None] = [None, *range(model.config.num_hidden_layers)]
    rows = []
    for index, cell in enumerate(cells):
        samples = cell.samples(n, SEED + 100 + index)
        batch = collate(samples)
        row = [f"{cell.name}, {cell.facts} facts, {cell.lines} lines"]
        scored = batch.labels[:, 1:] != IGNORE
        for layer in layers:
            with without_attention(model, layer), torch.no_grad():
                predicted = model(input_ids=batch.tokens).logits[:, :-1].argmax(-1)
            right = (predicted == batch.labels[:, 1:]) | ~scored
            exact = sum(
                bool(right[at, : len(sample.prompt.split()) + 6 * sample.lines].all())
                for at, sample in enumerate(samples)
            )
            row.append(f"{exact}/{n}, {right[scored].float().mean():.3f}")
        rows.append(row)
    head = ["", "whole model", *(f"without layer {layer}" for layer in layers[1:])]
    return _table(head, rows)


@dataclass(frozen=True)
class Targets:
    """Where the retrievals of one sample start and end: positions, one entry for each line."""

    node: Tensor  # the line's x
    successor: Tensor  # its successor in the fact
    named: Tensor  # the line's y
    colour: Tensor  # the colour in the fact
    digit: Tensor  # the digit in the key


def targets(sample: Sample) -> Targets:
    """The positions of ``sample``'s retrievals, ``<bos>`` being position 0."""
    prompt, response = sample.prompt.split(), sample.response.split()
    start = 1 + len(prompt)
    facts = {
        node: index
        for index, node in enumerate(prompt[: prompt.index("key")])
        if prompt[index + 3] == "."  # x y c .
    }
    columns = []
    for lookup in sample.lookups:
        at = lookup.response_index
        fact = 1 + facts[response[at - 1]]
        columns.append((start + at - 1, fact + 1, start + at, fact + 2, 1 + lookup.prompt_index))
    return Targets(*torch.tensor(columns).T)


def _head_figures(pattern: Tensor, sample: Sample) -> Tensor:
    """Six figures for each head of one layer.

    Args:
        pattern: attention, [H, T, T] (query head, row, pos).
        sample: what the model read.

    Returns:
        [H, 6]: mass on the first 4 and the last 32 positions, effective tokens (exponential of
        the entropy in nats), averaged over the rows of the response; then the mean mass that a
        line's ``x`` puts on the successor, its ``y`` on the colour, its ``y`` on the digit.
    """
    start = 1 + len(sample.prompt.split())
    rows = pattern[:, start:]
    positions = torch.arange(pattern.shape[-1])
    recent = positions > torch.arange(start, pattern.shape[-1])[:, None] - 32
    at = targets(sample)
    figures = [
        rows[..., :4].sum(-1).mean(-1),
        (rows * recent).sum(-1).mean(-1),
        torch.special.entr(rows).sum(-1).exp().mean(-1),
        pattern[:, at.node, at.successor].mean(-1),
        pattern[:, at.named, at.colour].mean(-1),
        pattern[:, at.named, at.digit].mean(-1),
    ]
    return torch.stack(figures, dim=-1)


@torch.no_grad()
def structure(model: PreTrainedModel, cells: Sequence[Cell], n: int) -> str:
    """Table of what each head attends to while responding, averaged over ``n`` samples a cell."""
    model.set_attn_implementation("eager")  # the only one that returns attention
    figures = []
    for index, cell in enumerate(cells):
        for sample in cell.samples(n, SEED + 200 + index):
            output = model(input_ids=collate([sample]).tokens, output_attentions=True)
            patterns = output.attentions  # one [1, H, T, T] for each layer
            figures.append(torch.stack([_head_figures(one[0], sample) for one in patterns]))
    model.set_attn_implementation("sdpa")
    mean = torch.stack(figures).mean(0)  # [layer, H, 6]
    rows = [
        [str(layer), str(head), *(f"{v:.2f}" for v in values[:2]), f"{values[2]:.1f}"]
        + [f"{v:.2f}" for v in values[3:]]
        for layer, heads in enumerate(mean.tolist())
        for head, values in enumerate(heads)
    ]
    head = ["layer", "query head", "first 4", "last 32", "effective tokens"]
    return _table([*head, "x on successor", "y on colour", "y on digit"], rows)


def training(folder: Path) -> str:
    """One line about the run that made the weights, from the summary beside them."""
    summary = json.loads((folder / "training.json").read_text())
    progress, settings = summary["progress"], summary["settings"]
    return (
        f"{progress['step']:,} steps ({progress['passed'][-1]:,} of them curriculum), "
        f"{progress['tokens'] / 1e6:.1f} million tokens, {progress['seconds'] / 60:.0f} minutes, "
        f"seed {settings['seed']}."
    )


def fill(card: str, sections: dict[str, str]) -> str:
    """``card`` with each section's text between its ``begin`` and ``end`` marker."""
    for name, text in sections.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, found, rest = card.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the card lacks the markers {begin} and {end}")
        card = f"{before}{begin}\n{text}\n{end}{after}"
    return card


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a tiny model and print the tables of its card."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.tiny.evaluate", description=main.__doc__)
    parser.add_argument("--n", type=int, default=48, help="samples for each row of accuracy")
    parser.add_argument("--model", type=Path, default=PATH, help="folder; default: the shipped one")
    parser.add_argument("--card", type=Path, help="Markdown file with markers to write into")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    half = max(1, options.n // 2)
    sections = {
        "accuracy": accuracy(model, tokenizer, CELLS, options.n),
        "ablation": ablation(model, PROBED, half),
        "attention": structure(model, PROBED, max(1, options.n // 8)),
    }
    if (options.model / "training.json").exists():
        sections["training"] = training(options.model)
    for name, text in sections.items():
        print(f"\n{name}\n\n{text}")
    if options.card:
        options.card.write_text(fill(options.card.read_text(), sections))


if __name__ == "__main__":
    main()
