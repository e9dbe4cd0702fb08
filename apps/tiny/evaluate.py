"""Measure a shipped model: how often it is right, and what its layers and heads do.

    python -m apps.tiny.evaluate --results FILE [--tasks walk get] [--levels 1 2] [--n 100]
    python -m apps.tiny.evaluate --card docs/tiny.md

The first form measures, and adds a line of JSON to the results for each measurement. It skips
measurements of the same weights and as many samples that exist, so it can be interrupted and
started again. Two processes may share a file if they have different ``--tasks``.
The second form measures nothing: it writes the generated sections of the card of both models, and
its picture, from the results next to the card.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from apps.tiny.card import write
from apps.tiny.probes import ablation, structure
from apps.tiny.results import Results, Row, digest
from kvsim.recorder import load_model
from kvsim.studies.language.ledger import check
from kvsim.studies.language.tasks import LEVELS, TASKS, Sample, prompts
from kvsim.tiny import PATH
from kvsim.tiny.vocabulary import SPECIAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 20  # sequences that generate together
PROBED = 2  # level of the samples for ablation and structure

# --- answers ---


def respond(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]
) -> list[str]:
    """Generate greedy responses to the prompts of ``samples``, with a full cache.

    Samples of similar length share a batch; prompts are padded on the left and masked, so positions
    do not change.
    """
    responses = [""] * len(samples)
    order = sorted(range(len(samples)), key=lambda index: samples[index].tokens)
    for first in range(0, len(order), BATCH):
        batch_indices = order[first : first + BATCH]
        texts = [samples[index].prompt for index in batch_indices]
        longest = max(len(samples[index].response.split()) for index in batch_indices)
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        generate: Any = model.generate  # mypy takes the method for a tensor
        sequences = generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=False,
            max_new_tokens=longest + 8,  # room to continue where it should have stopped
        )
        written = sequences[:, batch["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        for index, text in zip(batch_indices, texts, strict=True):
            responses[index] = text
    return responses


def first_error(sample: Sample, response: str) -> str | None:
    """Return the purpose of the lookup of the first wrong word of ``response``.

    None if the response is right, "other" for a word that follows from the words before it.
    """
    expected, words = sample.response.split(), [w for w in response.split() if w not in SPECIAL[:3]]
    if words == expected:
        return None
    pairs = zip(words, expected, strict=False)
    agree = [word == other for word, other in pairs]
    at = sample.prompt_words + (agree.index(False) if False in agree else len(agree))
    due = {retrieval.at + 1: retrieval.purpose for retrieval in sample.retrievals}
    return due.get(at, "other")


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]
) -> Row:
    """Count the exact chains, reports and answers of ``samples``, and the first errors."""
    responses = respond(model, tokenizer, samples)
    pairs = list(zip(samples, responses, strict=True))
    checks = [check(sample.prompt, response) for sample, response in pairs]
    errors = Counter(filter(None, (first_error(*pair) for pair in pairs)))
    tokens = [sample.tokens for sample in samples]
    return {
        "chain": sum(each.chain_exact for each in checks),
        "report": sum(each.report_exact for each in checks),
        "answer": sum(each.answer_exact for each in checks),
        "right": round(sum(each.share for each in checks) / len(checks), 5),
        "errors": dict(errors.most_common()),
        "tokens": [min(tokens), max(tokens)],
        "reach": round(sum(sample.reach for sample in samples) / len(samples), 1),
    }


# --- the program ---

#: The parts of a measurement, and the seed of the first cell; training, development samples and
#: examples use other seeds.
PARTS = {"accuracy": 1000, "ablation": 2000, "structure": 3000}


def _measure(options: argparse.Namespace, results: Results) -> None:
    """Measure the requested parts, levels and tasks that are not in the results."""
    model, tokenizer = load_model(options.model, dtype="float32")
    probes: dict[str, Callable[[Sequence[Sample]], Row]] = {
        "accuracy": partial(accuracy, model, tokenizer),
        "ablation": partial(ablation, model),
        "structure": partial(structure, model),
    }
    for part in options.parts:
        counted = part == "accuracy"
        n = options.n if counted else options.probed
        for level in options.levels if counted else [PROBED]:
            for task in options.tasks:
                seed = PARTS[part] + 10 * TASKS.index(task) + level
                cell = {"part": part, "task": task, "level": level, "n": n, "seed": seed}
                if results.has(**cell):
                    continue
                began = time.perf_counter()
                values = probes[part](prompts(n, seed, task=task, level=level))
                cell["seconds"] = round(time.perf_counter() - began, 1)
                results.add(**cell, **values)
                print(json.dumps(cell), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a shipped model, or write its card from the measurements."""
    parser = argparse.ArgumentParser(prog="python -m apps.tiny.evaluate", description=main.__doc__)
    parser.add_argument("--results", type=Path, help="file of measurements")
    parser.add_argument(
        "--model", type=Path, default=PATH, help="folder; default: the shipped model tiny"
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    levels = range(1, 1 + len(LEVELS[TASKS[0]]))
    parser.add_argument("--levels", nargs="+", type=int, choices=levels, default=levels)
    parser.add_argument("--n", type=int, default=100, help="samples for each cell of accuracy")
    parser.add_argument("--probed", type=int, default=32, help="samples of a task for other parts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--card", type=Path, help="Markdown file with markers to write into")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    if options.card:
        write(options.card)
    else:
        _measure(options, Results(options.results, digest(options.model)))


if __name__ == "__main__":
    main()
