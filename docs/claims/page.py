"""The page of claims: each claim of the papers, its test, and its result on each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
from study import markdown

from claims.statistics import Results
from kvsim.analysis.significance import ALPHA, FEWEST
from kvsim.studies.claims import CLAIMS
from kvsim.studies.claims.claim import ALL, HOLDS, MATTERS, MOST, NOT, OPEN, Claim

#: Where events are on a page of few policies, by whether there is only one.
_EVENTS = {True: "the only one is after the prompt", False: "events go on in the response"}

ByModel = Mapping[str, Sequence[Claim]]


def claims_page(results: Mapping[str, Results]) -> str:
    """The whole page; results: by the name of the model."""
    tested = {
        paper: {model: list(claims(r.evidence)) for model, r in results.items()}
        for paper, claims in CLAIMS.items()
    }
    tables = (f"## {paper}\n\n{_table(by_model)}" for paper, by_model in tested.items())
    return "\n\n".join(["# Claims of the papers", _rules(results), _count(tested), *tables]) + "\n"


def _rules(results: Mapping[str, Results]) -> str:
    prompts = ", ".join(
        f"{r.plan.prompts} prompts of [{model}](leaderboard.md)" for model, r in results.items()
    )
    return (
        f"Which claims hold on {prompts}? A claim that fails on models this small and texts this "
        "short may hold on larger ones.\n\n"
        "A claim is a sentence about cells: budgets, layers, or policies that it names. In each it "
        "becomes a number per prompt that is above 0 where the sentence is right: mostly the "
        "difference between two policies on the same prompt, as a share of their mean. Where a "
        "paper speaks of accuracy, *better* means a lower judged KL here. "
        f"How many cells have to be right is read from the paper: *{ALL}* where it says "
        "consistently, whatever or every, where something hardly changes, and where it lists "
        f"policies; *{MOST}* otherwise. A cell is right from {MATTERS:g} on. One test over the "
        "prompts that have all cells, by flips of signs, gives one p for the sentence and one for "
        "its contrary, which is the opposite in so many cells that the sentence is wrong.\n\n"
        f"* *holds*: p is at most {ALPHA:g}.\n"
        f"* **no**: p of the contrary is at most {ALPHA:g}.\n"
        f"* *open*: otherwise, as always with fewer than {FEWEST} prompts. *Left out* are "
        f"policies that were not replayed, and cells with fewer than {FEWEST} prompts, with a "
        "window of more than half of the budget, and for claims on the mass of AMS with mass that "
        "is mostly filled in.\n\n"
        "Each claim is tested at 5 % on its own: of 20 wrong ones, one may hold here by chance. "
        "What was compared, p of the sentence and of its contrary, prompts, cells whose mean is "
        "above 0, the least and the largest mean: `docs/claims.csv`. "
        "Schedule and parameters are those of the results; Expected Attention is tested at one "
        "event, after the prompt, as in its paper. Claims that are plain arithmetic on printed "
        "numbers, or that need free generation or training, are left out."
        f" Claims on policies that were not replayed are not tested; {_where(results)}."
    )


def _where(results: Mapping[str, Results]) -> str:
    few = {model: r.plan for model, r in results.items() if r.plan.only}
    return ", ".join(f"on {model} {_EVENTS[plan.once]}" for model, plan in few.items())


def _count(tested: Mapping[str, ByModel]) -> str:
    models = list(next(iter(tested.values())))
    lines = []
    for paper, by_model in tested.items():
        counts = []
        for claims in by_model.values():
            verdicts = [x.verdict for x in claims if x.n]
            counts.append(", ".join(str(verdicts.count(x)) for x in (HOLDS, NOT, OPEN)))
        lines.append([paper, *counts])
    said = f"How many claims of each paper hold, do not hold, and are {OPEN}:"
    return f"{said}\n\n{markdown(['paper', *models], lines)}"


#: Verdicts in a table.
_SHORT = {HOLDS: "holds", NOT: "**no**", OPEN: "open"}


def _table(by_model: ByModel) -> str:
    """A row for each claim."""
    titles = ["", "claim", "cells", *by_model]
    lines = [titles, ["---"] * len(titles)]
    for of_models in zip(*by_model.values(), strict=True):
        verdicts = [_SHORT[claim.verdict] if claim.n else "" for claim in of_models]
        lines.append([of_models[0].number, of_models[0].says, of_models[0].where, *verdicts])
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


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
