"""Training batches: samples of growing size, then a mix of all sizes.

All randomness comes from the ``random.Random`` of the caller.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsim.studies.language.ledger import Retrieval
from kvsim.studies.language.tasks import MAX_KINDS, PERIOD, Sample, make
from kvsim.tiny.vocabulary import BOS, EOS, ID

IGNORE = -100  # label of a position without a target, as in torch's cross-entropy

#: How often each task is drawn, in percent.
SHARES: dict[str, int] = {
    "walk": 14,
    "get": 18,
    "join": 20,
    "check": 16,
    "wait": 16,
    "fork": 12,
    "needle": 4,
}


def draw_task(rng: random.Random) -> str:
    """Draw a task by `SHARES`."""
    return rng.choices(list(SHARES), list(SHARES.values()))[0]


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum; each pair is the smallest and the largest value drawn."""

    facts: tuple[int, int]
    lines: tuple[int, int]
    filler: float
    kinds: tuple[int, int]

    def draw(self, rng: random.Random) -> Sample:
        """Draw one sample of this stage."""
        task = draw_task(rng)
        needle = task == "needle"
        return make(
            rng,
            task=task,
            facts=rng.randint(*self.facts),
            lines=rng.randint(1, 4) if needle else rng.randint(*self.lines),
            filler=3 * rng.random() if needle else self.filler * rng.random(),
            kinds=rng.randint(*self.kinds),
        )


STAGES: tuple[Stage, ...] = (
    Stage(facts=(4, 8), lines=(4, 16), filler=0.0, kinds=(3, 6)),
    Stage(facts=(8, 16), lines=(8, 24), filler=0.1, kinds=(4, 6)),
    Stage(facts=(12, 24), lines=(12, 32), filler=0.2, kinds=(4, 8)),
    Stage(facts=(24, 40), lines=(24, 48), filler=0.3, kinds=(6, 12)),
)

MIX_FACTS = (8, 108)
MIX_LINES = (12, 116)
MIX_NEEDLE = (4, 16)  # facts
MIX_HAYSTACK = 24.0  # filler sentences before each of them, at most


def draw_mix(rng: random.Random) -> Callable[[], Sample]:
    """Draw a source of samples of similar size, so that batches have little padding.

    One batch in 25 is of needles. One sample in four has a single cycle over all facts, so that a
    walk reads all facts before it reads one twice.
    """
    if rng.random() < SHARES["needle"] / 100:
        haystack = MIX_HAYSTACK * rng.random()

        def draw_needle() -> Sample:
            return make(
                rng,
                task="needle",
                facts=rng.randint(*MIX_NEEDLE),
                lines=rng.randint(1, 4),
                filler=haystack * rng.uniform(0.8, 1.0),
                kinds=rng.randint(4, 12),
            )

        return draw_needle
    facts = MIX_FACTS[0] * (MIX_FACTS[1] / MIX_FACTS[0]) ** rng.random()
    lines = MIX_LINES[0] * (MIX_LINES[1] / MIX_LINES[0]) ** (rng.random() ** 0.7)
    filler = rng.choice((0.0, 0.1, 0.2, 0.3))

    def near(size: float, largest: int) -> int:
        return max(4, min(largest, int(size * rng.uniform(0.8, 1.25))))

    def draw() -> Sample:
        task = "needle"
        while task == "needle":
            task = draw_task(rng)
        count = near(facts, MIX_FACTS[1])
        length = near(lines, MIX_LINES[1])
        if task == "check":  # its agenda adds a line to every four
            length = max(4, int(length * 0.8))
        fewest = max(4, length // PERIOD["wait"])
        return make(
            rng,
            task=task,
            facts=count,
            lines=length,
            filler=filler,
            kinds=rng.randint(fewest, MAX_KINDS),
            report=rng.randint(1, 6),
            cycle=count if rng.random() < 0.25 else None,
        )

    return draw


#: Retrievals that training guides heads to (`model.Shape.guided`): the second of two in a row, the
#: next item of a list, and the kind and the digit of a correction.
GUIDED = ("second", "item", "kind", "digit")


def guided(retrieval: Retrieval, word: str) -> str | None:
    """Return which of `GUIDED` a retrieval after ``word`` is, or None."""
    if len(retrieval.path) == 2:
        return "second"
    if retrieval.purpose == "item":
        return "item" if word == ";" else None
    if retrieval.purpose == "correction":
        return "kind" if word == "wait" else "digit"
    return None


@dataclass(frozen=True)
class Batch:
    """Sequences padded at the end; tensors are [sequence, pos], int64 by default.

    Attributes:
        tokens: token ids.
        labels: the token itself in the response, else IGNORE.
        between: before two retrievals in a row, the token that the first one reads, else IGNORE.
        targets: for each of `GUIDED`, before such a retrieval the position that it reads, else
            IGNORE.
        idle: bool; the next word belongs to the response and needs no retrieval.
    """

    tokens: Tensor
    labels: Tensor
    between: Tensor
    targets: dict[str, Tensor]
    idle: Tensor


def collate(samples: Sequence[Sample]) -> Batch:
    """Build a batch of ``samples``."""
    longest = max(sample.tokens for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    labels, between = (torch.full_like(tokens, IGNORE) for _ in range(2))
    targets = {role: torch.full_like(tokens, IGNORE) for role in GUIDED}
    idle = torch.zeros_like(tokens, dtype=torch.bool)
    for row, sample in enumerate(samples):
        words = [BOS, *sample.prompt.split(), *sample.response.split(), EOS]
        start = 1 + sample.prompt_words
        tokens[row, : len(words)] = torch.tensor([ID[word] for word in words])
        labels[row, start : len(words)] = tokens[row, start : len(words)]
        idle[row, start - 1 : len(words) - 1] = True
        for retrieval in sample.retrievals:
            at = 1 + retrieval.at
            idle[row, at] = False
            role = guided(retrieval, words[at])
            if role is not None:
                targets[role][row, at] = 1 + retrieval.path[-1]
            if role == "second":
                between[row, at] = tokens[row, 1 + retrieval.path[0]]
    return Batch(tokens, labels, between, targets, idle)


def draw_batch(draw: Callable[[], Sample], tokens: int) -> Batch:
    """Draw as many samples as fit into ``tokens`` after padding, at least one."""
    samples: list[Sample] = []
    longest = 0
    while True:
        sample = draw()
        if samples and (len(samples) + 1) * max(longest, sample.tokens) > tokens:
            return collate(samples)
        samples.append(sample)
        longest = max(longest, sample.tokens)
