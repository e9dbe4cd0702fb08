"""The section on what the papers say: every claim, with its verdict or what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import polars as pl

from kvsim.claims import HOLDS, NOT, OPEN, Claim, claims
from kvsim.report.html import details, section, table_of


def answers(table: pl.DataFrame) -> str:
    """What the papers say, and whether it is so on the traces of a Table."""
    found = claims(table)
    prompts = table["trace"].n_unique()
    every = [one for of_paper in found.values() for one in of_paper]
    known = [one.verdict for one in every if one.votes]
    note = (
        f"An answer about these traces. Of {len(every)} claims these results have numbers for "
        f"{len(known)}: {known.count(HOLDS)} hold, {known.count(NOT)} do not, of "
        f"{known.count(OPEN)} it cannot be said. A claim becomes a number per prompt that is above "
        "0 where it is right. It <b>holds</b> where the interval lies above 0 in every case (where "
        "something is to change little, inside a margin), <b>does not hold</b> where it lies on "
        "the other side in any, and otherwise <b>cannot be said</b>, as always from one prompt. "
        "Policies are compared at the same budget, schedule and prompts; where a paper speaks of "
        "accuracy, <i>better</i> is a lower output error here, which is not the same."
    )
    parts = [_paper(paper, of_paper, prompts) for paper, of_paper in found.items()]
    return section("What the papers say", note, "\n".join(parts))


def _paper(paper: str, found: Sequence[Claim], prompts: int) -> str:
    """The claims that have numbers, and folded below them those that have none."""
    rows = [
        [one.number, escape(one.says), f"<b>{one.verdict}</b>", escape(one.tested), _cases(one, n)]
        for n, one in ((prompts, one) for one in found if one.votes)
    ]
    lacking = [
        [one.number, escape(one.says), OPEN, escape(one.why)] for one in found if not one.votes
    ]
    parts = [f"<h3>{escape(paper)}</h3>"]
    if rows:
        parts.append(table_of(["", "claim", "here", "number", "cases"], rows))
    if lacking:
        said = f"{len(lacking)} that cannot be said without more"
        parts.append(details(table_of(["", "claim", "here", "why"], lacking), said))
    return "\n".join(parts)


def _cases(one: Claim, prompts: int) -> str:
    """The cases, the outermost of many first and all of them on demand."""
    few, every = ("<br>".join(map(escape, one.lines(prompts, every=x))) for x in (False, True))
    return few if few == every else few + details(every, "all")
