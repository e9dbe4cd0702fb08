"""Verdicts on two models beside each other, and why they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvsim.claims import OPEN, Claim
from results_page.reasons import REASONS

#: The verdicts on each model when its page was made, a line each.
FILE = Path(__file__).with_name("verdicts.jsonl")


def store(model: str, claims: Mapping[str, Sequence[Claim]], file: Path = FILE) -> None:
    """Keep the verdicts on one model; those on others stay."""
    rows = [row for row in _stored(file) if row["model"] != model]
    rows += [
        {"model": model, "paper": paper, "number": one.number, "says": one.says}
        | {"verdict": one.verdict, "why": one.why}
        for paper, each in claims.items()
        for one in each
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _stored(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def beside(
    claims: Mapping[str, Sequence[Claim]],
    file: Path = FILE,
    reasons: Mapping[tuple[str, str], str] = REASONS,
) -> str:
    """Every claim with its verdict on tiny and on this model; where they differ, why."""
    tiny = {(row["number"], row["says"]): row for row in _stored(file) if row["model"] == "tiny"}
    parts = []
    for paper, each in claims.items():
        lines = ["|  | claim | `tiny` | SmolLM2 | why they differ |", "| --- |" + " --- |" * 4]
        for one in each:
            there = tiny.get((one.number, one.says))
            verdict = there["verdict"] if there else "not tested"
            why = reasons.get((one.number, one.says), "") if verdict != one.verdict else ""
            if not why and one.verdict == OPEN and one.why:
                why = one.why
            cells = (one.number, one.says, verdict, f"**{one.verdict}**", why)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append(f"### {paper}, side by side\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
