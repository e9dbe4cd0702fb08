"""What recording, replaying and judging a prompt take, and the answers under judged evictions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl

from kvsim import Trace
from kvsim.analysis.table import COLUMNS
from kvsim.core.outcome import Generated, Outcome
from kvsim.text.answers import is_right

#: The metric of the answers.
ANSWER = "answer_kept"
#: Stages, and the metrics of their rows: of the processor, and resident at the start and at most.
STAGES = ("capture", "replay", "judge")
SECONDS, BEFORE, PEAK = MEASURED = ("stage_seconds", "stage_bytes_before", "stage_bytes")


@dataclass(frozen=True)
class Stages:
    """Rows of a stored piece: a metric of `MEASURED`, the stage as its variant."""

    rows: list[tuple[str, str, float]] = field(default_factory=list)

    @contextmanager
    def on(self, stage: str) -> Iterator[None]:
        """Measure what is done meanwhile; the memory on Linux alone."""
        proc = Path("/proc/self")
        if (proc / "clear_refs").exists():
            (proc / "clear_refs").write_text("5")  # the peak begins here
        before, start = _resident("VmRSS"), time.process_time()
        yield
        peak = max(before, _resident("VmHWM"))  # counted apart, it can lag behind
        values = time.process_time() - start, before, peak
        self.rows.extend((name, stage, x) for name, x in zip(MEASURED, values, strict=True))

    def table(self) -> pl.DataFrame:
        """A row of each metric and stage, as those of a Table without a policy."""
        folds = {SECONDS: sum, BEFORE: min, PEAK: max}
        of: dict[tuple[str, str], list[float]] = {}
        for metric, stage, value in self.rows:
            of.setdefault((metric, stage), []).append(value)
        rows = [
            {"metric": metric, "variant": stage, "value": float(folds[metric](values))}
            for (metric, stage), values in of.items()
        ]
        return pl.DataFrame([dict.fromkeys(COLUMNS) | row for row in rows], schema=COLUMNS)


def _resident(kind: str) -> float:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    sizes = (float(line.split()[1]) * 1024 for line in lines if line.startswith(kind))
    return next(sizes, math.nan)


def answered(trace: Trace, outcome: Outcome) -> Outcome:
    """The outcome with what the model would write, if it answers right with the full cache.

    Where the only event is after the prompt, the judged rows are those of greedy decoding up to the
    first token that differs; the answer is kept if there is none before it is complete.
    """
    check, texts = trace.meta.get("answer_check") or {}, trace.token_text
    if not check.get("right") or "expected" not in check or not texts or outcome.forced is None:
        return outcome
    response = texts[trace.prompt_len :]
    whole = (
        n for n in range(1, len(response) + 1) if is_right("".join(response[:n]), check["expected"])
    )
    until = next(whole, len(response))
    kept = bool(outcome.forced.agreement[:until].all())
    return replace(outcome, generated=Generated((), kept, None, full_right=True, seconds=math.nan))
