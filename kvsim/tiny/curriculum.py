"""What the tiny model is trained on: samples of growing size, then a mix of all sizes, in batches.

All randomness comes from the ``random.Random`` passed in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsim.tiny.ledger import Sample, make
from kvsim.tiny.vocabulary import BOS, COLOURS, EOS, ID

IGNORE = -100  # label of a position without a target, as in torch's cross-entropy


@dataclass(frozen=True)
class Level:
    """One step of the curriculum; each pair is the smallest and the largest value drawn."""

    facts: tuple[int, int]
    lines: tuple[int, int]
    filler: float
    colours: tuple[int, int]

    def draw(self, rng: random.Random) -> Sample:
        """One sample of this level."""
        return make(
            rng,
            facts=rng.randint(*self.facts),
            lines=rng.randint(*self.lines),
            filler=self.filler * rng.random(),
            colours=rng.randint(*self.colours),
        )


LEVELS: tuple[Level, ...] = (
    Level(facts=(4, 8), lines=(4, 16), filler=0.0, colours=(3, 6)),
    Level(facts=(8, 16), lines=(8, 24), filler=0.1, colours=(4, 6)),
    Level(facts=(12, 24), lines=(12, 32), filler=0.2, colours=(4, 8)),
    Level(facts=(24, 40), lines=(24, 48), filler=0.3, colours=(6, 12)),
)

MIX_FACTS = (8, 64)
MIX_LINES = (12, 80)


def draw_mix(rng: random.Random) -> Callable[[], Sample]:
    """A source of samples of about one size, itself drawn: little padding within a batch.

    One sample in eight has a single cycle over all facts, so that a walk meets no fact twice
    before it has met all of them.
    """
    facts = MIX_FACTS[0] * (MIX_FACTS[1] / MIX_FACTS[0]) ** rng.random()
    lines = MIX_LINES[0] * (MIX_LINES[1] / MIX_LINES[0]) ** (rng.random() ** 0.7)
    filler = rng.choice((0.0, 0.1, 0.2, 0.3))

    def near(size: float, largest: int) -> int:
        return max(4, min(largest, int(size * rng.uniform(0.8, 1.25))))

    def draw() -> Sample:
        count = near(facts, MIX_FACTS[1])
        return make(
            rng,
            facts=count,
            lines=near(lines, MIX_LINES[1]),
            filler=filler,
            colours=rng.randint(4, 16),
            report=rng.randint(1, 6),
            cycle=count if rng.random() < 0.125 else None,
        )

    return draw


@dataclass(frozen=True)
class Batch:
    """Sequences padded at the end; all tensors int64 [sequence, pos].

    Attributes:
        tokens: token ids.
        labels: the token itself where it belongs to the response, else IGNORE.
        colours: at the ``y`` of each line the index of the colour that is looked up, else IGNORE.
        digits: at the ``y`` of each line the position of the digit in the key, else IGNORE.
    """

    tokens: Tensor
    labels: Tensor
    colours: Tensor
    digits: Tensor


def collate(samples: Sequence[Sample]) -> Batch:
    """Tokens and targets of ``samples``."""
    longest = max(sample.tokens for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    labels, colours, digits = (torch.full_like(tokens, IGNORE) for _ in range(3))
    for row, sample in enumerate(samples):
        words = [BOS, *sample.prompt.split(), *sample.response.split(), EOS]
        prompt = 1 + len(sample.prompt.split())
        tokens[row, : len(words)] = torch.tensor([ID[word] for word in words])
        labels[row, prompt : len(words)] = tokens[row, prompt : len(words)]
        for lookup in sample.lookups:
            pos = prompt + lookup.response_index
            colours[row, pos] = COLOURS.index(lookup.colour)
            digits[row, pos] = 1 + lookup.prompt_index
    return Batch(tokens, labels, colours, digits)


def draw_batch(draw: Callable[[], Sample], tokens: int) -> Batch:
    """As many samples as fit into ``tokens`` after padding, at least one."""
    samples: list[Sample] = []
    longest = 0
    while True:
        sample = draw()
        if samples and (len(samples) + 1) * max(longest, sample.tokens) > tokens:
            return collate(samples)
        samples.append(sample)
        longest = max(longest, sample.tokens)
