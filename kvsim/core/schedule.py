"""When the events of a policy fire."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from kvsim.core.parameters import AtLeast, check_fields


@dataclass(frozen=True)
class Schedule:
    """When a policy acts: after rows prompt_len - 1 + m * interval.

    interval: rows between decode-time events; None where only the prefill event (m = 0) fires.
    prefill: whether m = 0 fires.
    """

    interval: Annotated[int, AtLeast(1)] | None = 1
    prefill: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "schedule")

    def rows(self, prompt_len: int, n_pos: int) -> list[int]:
        """Rows after which an event fires in a trace of n_pos tokens."""
        prompt = [prompt_len - 1] if self.prefill else []
        if self.interval is None:
            return prompt
        return prompt + list(range(prompt_len - 1 + self.interval, n_pos, self.interval))

    def longest(self, prompt_len: int, budget: int) -> int:
        """Entries that a head holds before an event at most, once it has been cut to the budget."""
        prompt = prompt_len if self.prefill else 0
        return max(prompt, budget + (self.interval or 0), 1)

    def override(self, interval: int | None, prefill: bool | None) -> Schedule:
        """This schedule with what is given replaced."""
        out = self
        if interval is not None:
            out = replace(out, interval=interval)
        return out if prefill is None else replace(out, prefill=prefill)
