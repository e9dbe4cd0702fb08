"""What a report says of the papers' claims."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
from markupsafe import Markup

from kvsim.report.html import details, lines, section, table_of, tag
from kvsim.report.section import Section
from kvsim.studies.claims import HOLDS, NOT, OPEN, Claim, claims


def _claims(table: pl.DataFrame) -> str:
    by_paper = claims(table)
    prompts = table["trace"].n_unique()
    every = [claim for of_paper in by_paper.values() for claim in of_paper]
    verdicts = [claim.verdict for claim in every if claim.votes]
    note = Markup(
        "An answer about these traces. Of {} claims these results have numbers for {}: {} hold, {} "
        "do not, {} are not decided. A claim becomes a number per prompt that is above 0 where "
        "it is right. A case counts where its mean is beyond chance, by sign flips over prompts "
        "corrected for the number of cases (Holm), and matters: at least a hundredth. A claim "
        "<b>holds</b> with nine tenths of the cases for it (where something is to change little, "
        "inside a margin), <b>does not hold</b> with more than a tenth against it, and is "
        "otherwise <b>not decided</b>, as always from fewer than 6 prompts. "
        "Policies are compared at the same budget, schedule and prompts; where a paper speaks of "
        "accuracy, <i>better</i> is a lower KL to the full cache here where the model judged "
        "the replays (--judge), else a lower error, which is not the same."
    ).format(
        len(every), len(verdicts), *(verdicts.count(verdict) for verdict in (HOLDS, NOT, OPEN))
    )
    parts = (_paper(paper, of_paper, prompts) for paper, of_paper in by_paper.items())
    return section("What the papers say", note, lines(parts))


def _paper(paper: str, of_paper: Sequence[Claim], prompts: int) -> str:
    """The claims that have numbers, and folded below them those that have none."""
    rows = [
        [claim.number, claim.says, tag("b", claim.verdict), claim.tested, _cases(claim, prompts)]
        for claim in of_paper
        if claim.votes
    ]
    lacking = [[claim.number, claim.says, OPEN, claim.why] for claim in of_paper if not claim.votes]
    parts = [tag("h3", paper)]
    if rows:
        parts.append(table_of(["", "claim", "here", "number", "cases"], rows))
    if lacking:
        summary = f"{len(lacking)} that are not decided without more"
        parts.append(details(table_of(["", "claim", "here", "why"], lacking), summary))
    return lines(parts)


def _cases(claim: Claim, prompts: int) -> str:
    """The cases, the outermost of many first and all of them on demand."""
    few, every = (Markup("<br>").join(claim.lines(prompts, every=x)) for x in (False, True))
    return few if few == every else few + details(every, "all")


CLAIMS = Section(_claims, "results")
