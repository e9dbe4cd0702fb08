"""What is recorded and replayed: prompts, budgets and schedules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What is recorded and replayed."""

    prompts: int = 24
    seed: int = 1
    level: int | None = 2  #: of difficulty; without one the sizes below
    facts: int = 12
    lines: int = 12
    budgets: tuple[int, ...] = (32, 48, 64, 96)
    cost: tuple[int, ...] = (1024, 2048, 4096, 8192)


FULL = Plan()
SMALLEST = Plan(prompts=2, level=None, budgets=(32, 64), cost=(128, 256))

#: Rows between events, the same for every policy; no event follows the prompt.
INTERVAL = 16
