"""Claims of the paper on AMS, arXiv 2605.23200: Q1 to Q13."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np

from kvsim.analysis.results import Result
from kvsim.analysis.significance import FEWEST
from kvsim.studies.claims.claim import ALL, Claim
from kvsim.studies.claims.evidence import Cells, Evidence, PolicySetting, joined, of, paired

#: The first scorer inside AMS in the paper, requested where a table has no other.
BASE = "tova"


def around(name: str) -> str:
    """The policy of AMS around another one."""
    return "ams" if name == BASE else f"ams+{name}"


def ams(e: Evidence) -> Iterator[Claim]:
    """Claims on AMS, around TOVA and every other policy that was replayed with and without it."""
    policies = dict.fromkeys(result.policy for result in e.results)
    bases = dict.fromkeys([BASE, *(name for name in policies if around(name) in policies)])
    less = [(of(name), of(around(name))) for name in bases]
    more = [(with_ams, base) for base, with_ams in less]
    says = "AMS wipes out fewer regions, whatever their length and the threshold"
    grid = e.variants("wipeout")  # the paper does not define its rate
    yield e.claim("Q1", says, *less, metric="wipeout", variants=grid, where=ALL)
    says, depths = ("AMS raises the IoU of consecutive kept sets at every depth", "retained_iou")
    yield e.claim("Q2", says, *more, metric=depths, layers=e.layers(depths), where=ALL)
    says = "AMS keeps more of the middle of the text"
    yield e.claim("Q3", says, *more, metric="middle_coverage")
    says = "The longest run of tokens that AMS evicts is shorter"
    yield e.claim("Q4", says, *less, metric="burst_length", variants=["longest"])
    yield from _ablations(e)
    yield e.claim("Q8", "AMS makes every scorer better", *less, where=ALL)
    yield from _protected(e, less)
    says = "Sets per head alone, which AMS brings too, make tova better"
    yield e.claim("Q8", says, (of("tova", heads="all"), of("tova", heads="group")))
    yield from _shares_of_mass(e)
    yield _small_budgets(e, *less[0])
    yield _segments_by_depth(e)
    says, tested = ("The length of the window hardly matters", "of ams with another window")
    windows = of("ams"), of("ams", window=32)
    yield e.alike("Q12", says, tested, e.around("ams", "window"), windows)
    yield from _cost(e)


def _ablations(e: Evidence) -> Iterator[Claim]:
    """Q5 to Q7: each part of AMS, compared with AMS without it."""
    plain, credit = of("ams", credit=False), of("ams", credit=True)
    says = "Credit makes segments move less from event to event"
    yield e.claim("Q5", says, (plain, credit), metric="boundary_shift")
    says = "Credit raises the IoU of consecutive kept sets"
    yield e.claim("Q5", says, (credit, plain), metric="retained_iou")
    by_mass = of("ams", weights="mass")
    others = [(of("ams", weights=weights), by_mass) for weights in ("length", "equal")]
    says = "Quotas by mass are better than by length and equal ones"
    yield e.claim("Q6", says, *others, where=ALL)
    adaptive = of("ams", segmentation="mass", segment_length=...)
    says = "Segments by mass are better than fixed ones"
    yield e.claim("Q7", says, (of("ams", segmentation="fixed"), adaptive))


def _protected(e: Evidence, couples: list[tuple[PolicySetting, PolicySetting]]) -> Iterator[Claim]:
    """Q8: the gain of AMS over scorers that protect the same entries."""
    alone, beside = [], []
    for base, with_ams in couples:
        sink, recent = 4, 32
        for _, result in e.found(with_ams):
            sink, recent = (result.parameters.get("sink", 4), result.parameters.get("recent", 32))
        kept = of(base.policy, protect={"sink": sink, "recent": recent, "prompt": False})
        if base.policy == BASE or any(map(kept.fits, e.results)):
            alone.append((of(base.policy, protect=None), kept))
            beside.append((kept, with_ams))
    yield e.claim("Q8", "Keeping sinks and recent entries alone makes scorers better", *alone)
    yield e.claim("Q8", "AMS is better than scorers with sinks and recent entries kept", *beside)


def _shares_of_mass(e: Evidence) -> Iterator[Claim]:
    """Q9: whether the mass really steers the quotas."""
    modes = (of("ams"),), (of("ams@release"),)

    def filled_in(budget: str, result: Result) -> str:
        """Why the mass that allocates a budget is not that of AMS; empty where it is."""
        share = e.value("suffix_mass", of=(result, budget))
        mostly = not np.isnan(share).all() and np.nanmean(share) > 0.5
        return "mass that is mostly filled in" if mostly else e.outside(budget, result)

    tested = "share of the budget that AMS (as in the paper, as released) allocates by mass, "
    mass: dict[str, Any] = {"metric": "quota_share", "variants": ["mass"], "outside": filled_in}
    mass |= {"tested": f"{tested}minus 1/2", "cell": partial(np.add, -0.5)}
    yield e.claim("Q9", "The mass decides about most of the budget", *modes, **mass)
    says = "Most of that mass is measured, and not filled in for the window's entries"
    tested = "1/2 minus the share of the mass on the window's own entries"
    suffix: dict[str, Any] = {"metric": "suffix_mass", "cell": partial(np.subtract, 0.5)}
    yield e.claim("Q9", says, *modes, **suffix, tested=tested)
    filled = (of("ams", suffix_fill="observed"), of("ams", suffix_fill=("head_max", "global_max")))
    says = "Filling in the largest usage for the window's entries is better than what was observed"
    yield e.claim("Q9", says, filled)
    yield e.claim("Q9", "Filling in wipes out fewer regions", filled, metric="wipeout")


def _small_budgets(e: Evidence, base: PolicySetting, with_ams: PolicySetting) -> Claim:
    """Q10: the smallest budget compared with the largest; no lead grows where nothing leads."""
    pairs, cells = e.found(base, with_ams), Cells()
    metric = e.quality(pairs)
    for label, *pair in pairs:
        within = (budget for budget in e.budgets if not e.outside(budget, *pair))
        both = {n: [e.value(metric, of=(side, n)) for side in pair] for n in within}
        both = {n: x for n, x in both.items() if np.isfinite(np.subtract(*x)).sum() >= FEWEST}
        if len(both) > 1:
            (small, lead), *_, (large, last) = both.items()
            growth = [np.subtract(*lead) - np.subtract(*last), paired(*lead)[1]]
            cells[joined(f"budget {small}", label)] = paired(*lead)
            cells[joined(f"budget {small} against {large}", label)] = np.stack(growth)
    says = "The lead of AMS over tova grows as the budget falls"
    tested = f"{metric}: {base} minus {with_ams} at the smallest budget, and this minus the same "
    tested += "at the largest"
    needs = "needs two budgets in the range of both policies: kvsim replay --budget N,M"
    needs = needs if pairs else e.lacks([base, with_ams], metric)
    return Claim("Q10", says, tested, cells, ALL, needs=needs)


def _segments_by_depth(e: Evidence) -> Claim:
    cells, metric, setting = {}, "segment_count", of("ams")
    for label, side in e.found(setting):
        for (first, second), budget in product(pairwise(e.layers(metric)), e.budgets):
            if not e.outside(budget, side):
                many, few = (e.value(metric, None, x, of=(side, budget)) for x in (first, second))
                where = f"layers {first} and {second}, budget {budget}"
                cells[joined(where, label)] = many - few
    says, tested = (
        "Earlier layers have more segments",
        "segments of a layer minus those of the next",
    )
    return Claim("Q11", says, f"{tested}, ams", cells, needs=e.lacks([setting], metric))


def _cost(e: Evidence) -> Iterator[Claim]:
    """Q13, by seconds of a machine over random caches of several lengths."""
    needs = "needs seconds of events on caches of several lengths: python docs/results.py"
    slope, share = Cells(), Cells()
    if e.seconds is not None:
        taken, lengths = e.seconds.of, e.seconds.lengths
        added = (taken["ams"] - taken["tova"]).clip(1e-6)
        scoring = (taken["expected_attention"] - taken["random"]).clip(1e-6)
        slope = {"seconds": 1.2 - np.polyfit(np.log(lengths), np.log(added).T, 1)[0]}
        share = {"seconds": 0.1 - added[:, -1] / scoring[:, -1]}
    tested = (
        "1.2 minus the exponent with which its seconds grow from the shortest to the longest "
        "cache; prompts are repetitions on a random cache"
    )
    says = "The work that AMS adds to an event grows in proportion to the length of the cache"
    yield Claim("Q13", says, tested, slope, needs=needs)
    tested = "1/10 minus its seconds over those of the scores of Expected Attention, at the longest"
    says = "The work that AMS adds is negligible next to the scoring"
    yield Claim("Q13", says, f"{tested}; as before", share, needs=needs)
