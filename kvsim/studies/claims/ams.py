"""Claims of the paper on AMS, arXiv 2605.23200: Q1 to Q13."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from kvsim.analysis.results import Result
from kvsim.analysis.significance import FEWEST
from kvsim.studies.claims.claim import Claim
from kvsim.studies.claims.evidence import (
    Cases,
    Evidence,
    PolicySetting,
    joined,
    least_of,
    metric_text,
    of,
)

#: The scorer that the paper puts AMS around first, requested where a table has no other.
BASE = "tova"


def around(name: str) -> str:
    """The policy that is AMS around another one."""
    return "ams" if name == BASE else f"ams+{name}"


def ams(e: Evidence) -> Iterator[Claim]:
    """Claims on AMS, around TOVA and every other policy that was replayed with and without it."""
    policies = dict.fromkeys(result.policy for result in e.results)
    bases = dict.fromkeys([BASE, *(name for name in policies if around(name) in policies)])
    couples = [(of(name), of(around(name))) for name in bases]
    for base, with_ams in couples:
        yield _wiped_out(e, base, with_ams)
    for base, with_ams in couples:
        says = f"AMS raises the IoU of consecutive kept sets over {base}, at every depth"
        yield e.compared("Q2", says, with_ams, base, "retained_iou", layers=True)
    for base, with_ams in couples:
        says = f"AMS keeps more of the middle of the text than {base}"
        yield e.compared("Q3", says, with_ams, base, "middle_coverage")
    for base, with_ams in couples:
        says = f"The longest run of tokens that AMS evicts is shorter than that of {base}"
        yield e.compared("Q4", says, base, with_ams, "burst_length", "longest")
    yield from _ablations(e)
    for base, with_ams in couples:
        yield from _must_keep(e, base, with_ams)
    says = "Sets per head alone, which AMS brings too, make tova better"
    yield e.compared("Q8", says, of("tova", heads="all"), of("tova", heads="group"))
    yield from _shares_of_mass(e)
    yield from _small_budgets(e, of(BASE), of(around(BASE)))
    yield _segments_by_depth(e)
    says, tested = "The length of the window hardly matters", "of ams with another window"
    windows = of("ams"), of("ams", window=32)
    yield e.alike("Q12", says, tested, e.around("ams", "window"), windows)
    yield from _cost(e)


def _wiped_out(e: Evidence, base: PolicySetting, with_ams: PolicySetting) -> Claim:
    """Q1: over all lengths and thresholds, since the paper does not define its rate."""
    cases, least, outside = {}, {}, {}
    for variant in e.variants("wipeout"):
        for label, plain, ours in e.pairs(base, with_ams):
            for budget in e.budgets:
                case = joined(f"budget {budget}", variant, label)
                if why := e.outside(budget, plain, ours):
                    outside[case] = why
                    continue
                a, b = (e.value("wipeout", variant, of=(side, budget)) for side in (plain, ours))
                if np.nansum(a + b):
                    cases[case], least[case] = a - b, least_of(a, b)
    says = f"AMS around {base} wipes out fewer regions, whatever their length and the threshold"
    tested = (
        f"wipe-out: {base} minus {with_ams}, regions of every length and threshold; cases in which "
        "neither wipes out anything are left out"
    )
    needs = e.lacks([base, with_ams], "wipeout")
    return Claim("Q1", says, tested, cases, least=least, outside=outside, needs=needs)


def _ablations(e: Evidence) -> Iterator[Claim]:
    """Q5 to Q7: each part of AMS beside AMS without it."""
    plain, credit = of("ams", credit=False), of("ams", credit=True)
    says = "Credit makes segments move less from event to event"
    yield e.compared("Q5", says, plain, credit, "boundary_shift")
    says = "Credit raises the IoU of consecutive kept sets"
    yield e.compared("Q5", says, credit, plain, "retained_iou")
    for weights, other in (("length", "by length"), ("equal", "equal ones")):
        says = f"Quotas by mass are better than {other}"
        yield e.compared("Q6", says, of("ams", weights=weights), of("ams", weights="mass"))
    adaptive = of("ams", segmentation="mass", segment_length=...)
    says = "Segments by mass are better than fixed ones"
    yield e.compared("Q7", says, of("ams", segmentation="fixed"), adaptive)


def _must_keep(e: Evidence, base: PolicySetting, with_ams: PolicySetting) -> Iterator[Claim]:
    """Q8: the gain of AMS over a base that protects the same entries."""
    sink, recent = 4, 32
    for _, result in e.alone(with_ams):
        sink, recent = result.parameters.get("sink", 4), result.parameters.get("recent", 32)
    kept = of(base.policy, protect={"sink": sink, "recent": recent, "prompt": False})
    yield e.compared("Q8", f"AMS is better than {base}", base, with_ams)
    if base.policy != BASE and not any(map(kept.fits, e.results)):
        return
    says = f"Keeping sinks and recent entries alone makes {base} better"
    yield e.compared("Q8", says, of(base.policy, protect=None), kept)
    says = f"AMS is better than {base} with sinks and recent entries kept"
    yield e.compared("Q8", says, kept, with_ams)


def _shares_of_mass(e: Evidence) -> Iterator[Claim]:
    """Q9: whether the mass really steers the quotas."""
    for name, mode in (("ams", "strict"), ("ams@release", "release")):
        says = f"The mass decides about most of the budget ({mode})"
        tested = f"share of the budget that {name} deals by mass, minus 1/2"
        metric, beyond = ("quota_share", "mass"), partial(_filled_in, e)
        yield e.measured(
            *("Q9", says, tested, of(name), *metric), case=lambda share: share - 0.5, outside=beyond
        )
        says = f"Most of that mass is measured, and not filled in for the window's entries ({mode})"
        tested = f"1/2 minus the share of the mass on the window's own entries, {name}"
        yield e.measured("Q9", says, tested, of(name), "suffix_mass", case=lambda x: 0.5 - x)
    observed = of("ams", suffix_fill="observed")
    filled = of("ams", suffix_fill=("head_max", "global_max"))
    says = "Filling in the largest usage for the window's entries is better than what was observed"
    yield e.compared("Q9", says, observed, filled)
    yield e.compared("Q9", "... and wipes out less", observed, filled, "wipeout")


def _filled_in(e: Evidence, budget: str, result: Result) -> str:
    """Why the mass that deals a budget is not what AMS measured; empty where it is."""
    filled = e.value("suffix_mass", of=(result, budget))
    filled = filled[~np.isnan(filled)]
    if len(filled) and filled.mean() > 0.5:
        return f"{filled.mean():.0%} of the mass is filled in for the window at budget {budget}"
    return e.outside(budget, result)


def _small_budgets(e: Evidence, base: PolicySetting, with_ams: PolicySetting) -> Iterator[Claim]:
    """Q10: the smallest budget beside the largest."""
    pairs = e.pairs(base, with_ams)
    for metric in (e.quality(pairs), "wipeout"):
        cases, least = {}, {}
        for label, plain, ours in pairs:
            both = {
                n: (e.value(metric, of=(plain, n)), e.value(metric, of=(ours, n)))
                for n in e.budgets
                if not e.outside(n, plain, ours)
            }
            leads = {n: a - b for n, (a, b) in both.items() if (~np.isnan(a - b)).sum() >= FEWEST}
            if len(leads) > 1:
                (small, lead), *_, (large, last) = leads.items()
                # where nothing leads, a smaller loss is no growing lead
                case = joined(f"budget {small}", label)
                cases[case], least[case] = lead, least_of(*both[small])
                cases[joined(f"budget {small} against {large}", label)] = lead - last
        says = f"The lead of AMS over {base} grows as the budget falls ({metric_text(metric)})"
        tested = (
            f"{base} minus {with_ams} at the smallest budget, and this minus the same at the "
            "largest"
        )
        needs = (
            "needs two budgets in the range of both policies, with at least "
            f"{FEWEST} prompts: kvsim replay --budget N,M"
        )
        needs = needs if pairs else e.lacks([base, with_ams], metric)
        yield Claim("Q10", says, tested, cases, least=least, needs=needs)


def _segments_by_depth(e: Evidence) -> Claim:
    """Q11: layers in the order of the model."""
    cases = {}
    for label, side in e.alone(of("ams")):
        layers = e.layers("segment_count")
        budgets = [budget for budget in e.budgets if not e.outside(budget, side)]
        for first, second in pairwise(layers):
            for budget in budgets:
                a, b = (
                    e.value("segment_count", layer=x, of=(side, budget)) for x in (first, second)
                )
                where = f"layers {first} and {second}, budget {budget}"
                cases[joined(where, label)] = a - b
    tested, needs = "segments of a layer minus those of the next, ams", [of("ams")]
    says = "Earlier layers have more segments"
    return Claim("Q11", says, tested, cases, needs=e.lacks(needs, "segment_count"))


def _cost(e: Evidence) -> Iterator[Claim]:
    """Q13, by seconds of a machine over random caches of several lengths."""
    needs = "needs seconds of events on caches of several lengths: python docs/results.py"
    slope: Cases = {}
    share: Cases = {}
    sizes = "the shortest to the longest cache"
    if e.seconds is not None:
        taken, lengths = e.seconds.of, e.seconds.lengths
        sizes = f"{lengths[0]} to {lengths[-1]} entries"
        added = (taken["ams"] - taken["tova"]).clip(1e-6)
        scoring = (taken["expected_attention"] - taken["random"]).clip(1e-6)
        slope = {"seconds": 1.2 - np.polyfit(np.log(lengths), np.log(added).T, 1)[0]}
        share = {"seconds": 0.1 - added[:, -1] / scoring[:, -1]}
    says = "What AMS adds to an event grows in proportion to the length of the cache"
    tested = f"1.2 minus the exponent with which its seconds grow from {sizes}; n repetitions on a "
    yield Claim("Q13", says, f"{tested}random cache, no prompts", slope, needs=needs)
    tested = "1/10 minus its seconds over those of the scores of Expected Attention, at the longest"
    says = "What AMS adds is negligible beside the scoring"
    yield Claim("Q13", says, f"{tested}; as before", share, needs=needs)
