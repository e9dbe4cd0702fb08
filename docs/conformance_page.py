# ruff: noqa: INP001 - lies in docs/, which is no package
"""The tables of conformance.md: what was run, what `conform` says, the cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "conformance"


def read(name: str) -> dict[str, Any]:
    """The content of a file of results."""
    content: dict[str, Any] = json.loads((FOLDER / name).read_text("utf-8"))
    return content


def releases() -> str:
    """A row for each repository: what was run of which commit, and the verdict in short."""
    lines = ["| implementation | commit | what ran | how | cases | equal |", "| --- " * 6 + "|"]
    for name, facts in read("cases.json").items():
        cases = facts["cases"]
        equal = sum(not case["apart"] for case in cases)
        address = f"https://github.com/{facts['repository']}"
        commit = f"[`{facts['commit'][:7]}`]({address}/tree/{facts['commit']})"
        cells = (f"[{name}]({address})", commit, facts["runs"], facts["how"], len(cases), equal)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def cases() -> str:
    """A row for each dump: its trace, its definition, and what `conform` says."""
    lines = ["| dump | trace | definition | `conform` says |", "| --- " * 4 + "|"]
    for facts in read("cases.json").values():
        for case in facts["cases"]:
            link = f"[{case['dump']}](conformance/{case['dump']}.npz)"
            settings = "".join(f" --set {key}={x}" for key, x in case["settings"].items())
            rule = f"`{case['policy']}{settings} --budget {case['budget']}`"
            lines.append(f"| {link} | {case['trace']} | {rule} | {_verdict(case)} |")
    return "\n".join(lines)


def _verdict(case: Mapping[str, Any]) -> str:
    sets = f"{case['compared']} sets"
    if not case["apart"]:
        ties = f", {case['ties']} of them but for ties" * bool(case["ties"])
        return f"equal: {sets}{ties}"
    first = case["first"]
    text = f"differs: {case['apart']} of {sets}, first after row {first['row']}, layer "
    text += f"{first['layer']}, head {first['head']}: keeps {first['keeps']} others, evicts "
    text += str(first["evicts"])
    if first["gap"] is not None:
        text += f", score gap {first['gap']:g}"
    if case["counts"]:
        text += "; each set is larger or smaller, of the same ranking"
    why = ", ".join(f"`{each}`" for each in case["explained"]) or "no known deviation"
    return f"{text}; explained by {why}"


def costs() -> str:
    """A row for each deviation whose cost was judged."""
    lines = ["| deviation | prompts | definition | deviating |", "| --- | ---: | ---: | ---: |"]
    for name, x in read("costs.json").items():
        a, b = (sum(x[key]) / x["prompts"] for key in ("definition", "deviating"))
        lines.append(f"| `{name}` | {x['prompts']} | {a:.3f} | {b:.3f} |")
    return "\n".join(lines)
