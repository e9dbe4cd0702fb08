"""The page of claims: each claim of the papers, its test, and its result on each model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from kvsim.analysis.significance import ALPHA, FEWEST
from kvsim.policies import CATALOGUE
from kvsim.studies.claims import CLAIMS, HOLDS, NOT, OPEN, Claim
from kvsim.studies.claims.ams import around
from kvsim.studies.claims.claim import MATTERS, OF_TEN
from results_page.ranking import markdown
from results_page.statistics import Results

#: Where events are on a page of few policies, by whether there is only one.
_EVENTS = {True: "the only one is after the prompt", False: "events go on in the response"}


def claims_page(results: Mapping[str, Results]) -> str:
    """The whole page; results: by the name of the model."""
    tested = {
        paper: {
            model: {(c.number, c.says): c for c in claims(r.evidence)}
            for model, r in results.items()
        }
        for paper, claims in CLAIMS.items()
    }
    return (
        "\n\n".join(
            [
                "# Claims of the papers",
                _rules(results),
                _count(tested),
                *(f"## {paper}\n\n{_table(by_model)}" for paper, by_model in tested.items()),
            ]
        )
        + "\n"
    )


def _rules(results: Mapping[str, Results]) -> str:
    prompts = ", ".join(
        f"{r.plan.prompts} prompts of [{model}]({r.plan.page})" for model, r in results.items()
    )
    return (
        f"Which claims hold on {prompts}? A claim that fails on models this small and texts this "
        "short may hold on larger ones.\n\n"
        "Each claim becomes a number per prompt that is above 0 where the claim is right, mostly "
        "the difference between two policies on the same prompt. Where a paper speaks of accuracy, "
        "*better* means a lower judged KL here. P is each policy in the rows below a claim. "
        "Cases are budgets, unless the test says otherwise. "
        "Each is tested by sign flips over prompts, and its p corrected for the number of cases "
        f"(Holm). It counts with p up to {ALPHA:g} and a mean that matters: at least {MATTERS:g} "
        "of the mean of two settings that are compared, or of the unit of any other number. These "
        "limits were fixed before the results were known.\n\n"
        f"* **{HOLDS}**: above 0, or inside the margin where something is to change little, in at "
        f"least {OF_TEN} of 10 cases.\n"
        f"* **{NOT}**: on the other side (*against*) in more than {10 - OF_TEN} of 10 cases.\n"
        f"* **{OPEN}**: otherwise. Cases are *open*, have *few* prompts (less than {FEWEST}) or "
        "are *out of range*: a window of more than half of the budget, or, for claims on the mass "
        "of AMS, mass that is mostly filled in.\n\n"
        "After the cases: the least and the largest mean of a case, of a single one with its 95 % "
        "interval. "
        "Schedule and parameters are those of the results; Expected Attention is tested at one "
        "event, after the prompt, as in its paper. Claims that are plain arithmetic on printed "
        "numbers, or that need free generation or training, are left out."
        f" Claims on policies that a page does not have are not tested; {_where(results)}."
    )


def _where(results: Mapping[str, Results]) -> str:
    few = {model: r.plan for model, r in results.items() if r.plan.only}
    return ", ".join(f"on {model} {_EVENTS[plan.once]}" for model, plan in few.items())


def _count(tested: Mapping[str, Mapping[str, Mapping[tuple[str, str], Claim]]]) -> str:
    models = list(next(iter(tested.values())))
    lines = []
    for paper, by_model in tested.items():
        counts = []
        for claims in by_model.values():
            verdicts = [x.verdict for x in claims.values() if x.votes or x.outside]
            counts.append(", ".join(str(verdicts.count(x)) for x in (HOLDS, NOT, OPEN)))
        lines.append([paper, *counts])
    said = f"How many claims of each paper hold, do not hold, and are {OPEN}:"
    return f"{said}\n\n{markdown(['paper', *models], lines)}"


def _table(by_model: Mapping[str, Mapping[tuple[str, str], Claim]]) -> str:
    """A row for each claim; claims that differ in a policy alone are rows below one with P."""
    titles = ["", "claim", "test", *by_model]
    lines = [titles, ["---"] * len(titles)]
    similar: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    texts = {}
    for key in dict.fromkeys(key for claims in by_model.values() for key in claims):
        tests = dict.fromkeys(claims[key].tested for claims in by_model.values() if key in claims)
        of_models = [claims.get(key) for claims in by_model.values()]
        results = [_result(claim) if claim else "" for claim in of_models]
        if not any(results):  # nowhere for one reason; pages of few policies lack more
            if of_models[0] is None:
                continue
            tests |= {of_models[0].why: None}
        test = "; ".join(filter(None, tests))
        whole = *key, test.replace("KL to the full cache", "KL")
        policy, pattern = _pattern(*whole)
        texts[pattern] = whole
        similar.setdefault(pattern, {})[policy] = [result or "not tested" for result in results]
    for pattern, of_policies in similar.items():
        if len(of_policies) == 1:
            lines.append([*texts[pattern], *next(iter(of_policies.values()))])
            continue
        lines.append([*pattern, *[""] * len(by_model)])
        lines += [["", f"`{policy}`", "", *cells] for policy, cells in of_policies.items()]
    return _rows(lines)


def differing(r: Results, shorter: Results) -> str:
    """What claims that are decided on results say, where not the same as on shorter answers."""
    counts: Counter[str] = Counter()
    rows = []
    for claims in CLAIMS.values():
        known = {(claim.number, claim.says): claim for claim in claims(shorter.evidence)}
        for claim in claims(r.evidence):
            other = known.get((claim.number, claim.says))
            counts[claim.verdict] += bool(claim.votes or claim.outside)
            if claim.verdict != OPEN and other and other.verdict != claim.verdict:
                rows.append([claim.number, claim.says, _result(other), _result(claim)])
    text = (
        f"Of the [claims of the papers](claims.md), {counts[HOLDS]} hold on these answers, "
        f"{counts[NOT]} do not, and {counts[OPEN]} are not decided, most of them because a case is "
        f"a layer, which takes more prompts. Decided here, and otherwise than on "
        f"[{shorter.plan.prompts} shorter answers]({shorter.plan.page}):"
    )
    lines = [["", "claim", "shorter answers", "here"], ["---"] * 4, *rows]
    return f"{text}\n\n{_rows(lines)}"


def _pattern(number: str, says: str, tested: str) -> tuple[str, tuple[str, str, str]]:
    """The last policy that a claim names, and the claim and its test with P instead."""
    words = re.findall(r"[\w@+]+", says)
    policy = next((x for x in reversed(words) if re.split("[@+]", x)[0] in CATALOGUE), "")
    if not policy:
        return "", (number, says, tested)

    def hidden(text: str) -> str:
        text = re.sub(rf"(?<![\w@+]){re.escape(around(policy))}(?![\w@+])", "AMS around P", text)
        return re.sub(rf"(?<![\w@]){re.escape(policy)}(?![\w@+])", "P", text)

    return policy, (number, hidden(says), hidden(tested))


def _result(claim: Claim) -> str:
    """The verdict, cases by their votes, and the outermost means; empty if it was not tested."""
    if not (claim.votes or claim.outside):
        return ""
    votes = Counter(case.vote for case in claim.votes.values())
    cases = [f"{n} {vote}" for vote, n in votes.items()]
    if claim.outside:
        cases.append(f"{len(claim.outside)} out of range")
    parts = [f"**{claim.verdict}**", ", ".join(cases)]
    if claim.votes:
        intervals = sorted((case.interval for case in claim.votes.values()), key=lambda x: x.mean)
        form = "+.1f" if abs(intervals[0].mean) >= 10 else "+.3f"
        texts = [x.text(form) for x in dict.fromkeys((intervals[0], intervals[-1]))]
        parts.append(texts[0] if len(intervals) == 1 else " to ".join(x.split()[0] for x in texts))
    return "; ".join(filter(None, parts))


def _rows(lines: Sequence[Sequence[str]]) -> str:
    """The lines of a table; bars would end a cell."""
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
