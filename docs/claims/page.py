"""The page of claims: each claim of the papers, its test, and its result on each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
from study import markdown

from claims.statistics import Results
from kvsim.analysis.significance import ALPHA, FEWEST
from kvsim.studies.claims import CLAIMS
from kvsim.studies.claims.claim import HOLDS, MATTERS, NOT, OPEN, Claim

#: Models as the page calls them.
_NAMES = {
    "tiny": "`tiny`",
    "smollm2": "SmolLM2",
    "qwen-1.5b": "1.5B",
    "qwen-1.5b-8k": "1.5B-8k",
}
#: Verdicts as the page has them, in the order of a sentence.
_SHORT = {HOLDS: "holds", NOT: "**no**"}

ByModel = Mapping[str, Sequence[Claim]]


def claims_page(results: Mapping[str, Results]) -> str:
    """The whole page; results: by the name of the model."""
    tested = {
        paper: {model: list(claims(r.evidence)) for model, r in results.items()}
        for paper, claims in CLAIMS.items()
    }
    lists = (f"## {paper}\n\n{_list(by_model)}" for paper, by_model in tested.items())
    parts = ["# Claims of the papers", _rules(results), _count(tested), *lists]
    return "\n\n".join(parts) + "\n"


def _rules(results: Mapping[str, Results]) -> str:
    prompts = ", ".join(
        f"{r.plan.prompts} prompts of {_NAMES[model]}" for model, r in results.items()
    )
    return (
        f"Which claims hold on the [leaderboard's](leaderboard.md) values: {prompts} (1.5B is "
        "Qwen2.5-Coder-1.5B, 8k its long documents)? A claim that fails on models this small and "
        "texts this short may hold on larger ones.\n\n"
        "A claim is a sentence about cells, which are budgets, layers or policies. In each cell it "
        "becomes a number per prompt that is above 0 where the sentence is right, mostly a "
        "difference of two policies as a share of their mean. *Better* means a lower judged KL. "
        "All cells have to be right where the paper says consistently or every, or lists policies, "
        f"and most otherwise. A cell is right from {MATTERS:g} on. One test over prompts, by flips "
        "of signs, decides the sentence, and one its contrary (of *all*: the opposite in at least "
        "one cell). It *holds* if p is at most "
        f"{ALPHA:g}; **no** means that p of the contrary is. All others are {OPEN}, as always with "
        f"fewer than {FEWEST} prompts. Many cases have fewer prompts; Q13 has "
        "repetitions instead. Each claim is tested on its own: of 20 wrong ones, one may "
        "hold by chance.\n\n"
        "`docs/claims.csv` has each case: cells, prompts, p and means. `python docs/results.py "
        "--stored` writes page and file, and [`kvsim report`](compare.md) tests the same claims on "
        "runs of your own. Claims about printed numbers, free generation or training are left out."
    )


def _count(tested: Mapping[str, ByModel]) -> str:
    models = list(next(iter(tested.values())))
    lines = []
    for paper, by_model in tested.items():
        counts = []
        for claims in by_model.values():
            verdicts = [x.verdict for x in claims if x.n]
            counts.append(", ".join(str(verdicts.count(x)) for x in (HOLDS, NOT, OPEN)))
        lines.append([paper, *counts])
    head = ["hold, do not hold, not decided", *(_NAMES[model] for model in models)]
    return markdown(head, lines)


def _list(by_model: ByModel) -> str:
    """A line for each claim that is decided on some model; the numbers of the others."""
    lines, others = [], []
    for claims in zip(*by_model.values(), strict=True):
        of = {
            verdict: [_NAMES[x] for x, c in zip(by_model, claims, strict=True) if _is(c, verdict)]
            for verdict in _SHORT
        }
        shown = [
            f"{_SHORT[verdict]} on {', '.join(names)}" for verdict, names in of.items() if names
        ]
        if shown:
            lines.append(f"* {claims[0].number}. {claims[0].says}: {'; '.join(shown)}.")
        elif claims[0].number not in others:
            others.append(claims[0].number)
    rest = (
        f"\n\nClaims of these numbers that no model decides: {', '.join(others)}." if others else ""
    )
    return "\n".join(lines) + rest


def _is(claim: Claim, verdict: str) -> bool:
    return bool(claim.n) and claim.verdict == verdict


def cases(results: Mapping[str, Results]) -> pl.DataFrame:
    """Return a row for each claim and model: what was tested, the verdict, p, n and means."""
    return pl.DataFrame(
        {
            "paper": paper,
            "number": claim.number,
            "claim": claim.says,
            "cells": claim.where,
            "tested": claim.tested if claim.n else claim.why,
            "model": model,
            "verdict": claim.verdict if claim.n else "not tested",
            "result": claim.result if claim.n else claim.omitted,
        }
        for paper, claims in CLAIMS.items()
        for model, r in results.items()
        for claim in claims(r.evidence)
    )
