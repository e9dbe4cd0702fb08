"""The section of a report on the claims of the papers."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
from markupsafe import Markup

from kvsim.report.html import details, lines, section, table_of, tag
from kvsim.studies.claims import claims
from kvsim.studies.claims.claim import HOLDS, NOT, OPEN, Claim, shown


def claims_section(table: pl.DataFrame) -> str:
    """Return the section as HTML."""
    by_paper = claims(table)
    every = [claim for of_paper in by_paper.values() for claim in of_paper]
    verdicts = [claim.verdict for claim in every if claim.n]
    note = Markup(
        "An answer about these traces. Of {} claims these results have numbers for {}: {} hold, {} "
        "do not, {} are not decided. A claim becomes a number per prompt in each cell (budget, "
        "layer or policy), above 0 where it is right; a difference of two policies is a share of "
        "their mean. Whether it is right by a hundredth <i>in all</i> cells, where its paper says "
        "so, or <i>in most</i> is one test over prompts: a claim <b>holds</b> where p is at most "
        "5 %, <b>does not hold</b> where that of its contrary is, and is otherwise "
        "<b>not decided</b>, as always from fewer than 6 prompts. "
        "Policies are compared at the same budget, schedule and prompts; where a paper speaks of "
        "accuracy, <i>better</i> is a lower KL to the full cache here where the model judged "
        "the replays (--judge), else a lower error, which is not the same."
    ).format(
        len(every), len(verdicts), *(verdicts.count(verdict) for verdict in (HOLDS, NOT, OPEN))
    )
    return section("What the papers say", note, lines(map(_paper, by_paper, by_paper.values())))


def _paper(paper: str, of_paper: Sequence[Claim]) -> str:
    """The claims with numbers, and folded below them those without."""
    rows = [
        [claim.number, claim.says, claim.where, tag("b", claim.verdict), claim.tested, _test(claim)]
        for claim in of_paper
        if claim.n
    ]
    lacking = [[claim.number, claim.says, OPEN, claim.why] for claim in of_paper if not claim.n]
    parts = [tag("h3", paper)]
    if rows:
        parts.append(table_of(["", "claim", "cells", "here", "number", "test"], rows))
    if lacking:
        summary = f"{len(lacking)} that are not decided without more"
        parts.append(details(table_of(["", "claim", "here", "why"], lacking), summary))
    return lines(parts)


def _test(claim: Claim) -> str:
    """The test, and on demand the mean of each cell."""
    cells = [f"{name}: {shown(mean)}" for name, mean in claim.means.items()]
    of_cells = details(Markup("<br>").join(cells), "cells")
    return Markup("<br>").join(filter(None, (claim.result, claim.omitted, claim.why, of_cells)))
