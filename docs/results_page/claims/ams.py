"""What the paper on AMS says, arXiv 2605.23200."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from results_page.kept import LENGTHS, THRESHOLDS
from results_page.policies import SEGMENT
from results_page.quantities import TITLES
from results_page.statistics import Results
from results_page.verdicts import Claim, compared


def ams_claims(r: Results) -> Iterator[Claim]:
    """AMS, Q1 to Q13."""
    layers, budgets = range(r.layers), r.plan.budgets
    bases = (("tova", "ams"), ("expected_attention", "ams+expected_attention"))
    for base, made in bases:
        grid = {
            f"length {length}, threshold {least:g}, budget {n}": [
                r.of(label, n, f"wipeout {length} {least:g}") for label in (base, made)
            ]
            for length in LENGTHS
            for least in THRESHOLDS
            for n in budgets
        }
        yield Claim(
            "Q1",
            f"AMS around {base} wipes out fewer regions, whatever their length and the threshold",
            f"wipe-out: `{base}` minus `{made}`, regions of 8 to 64, of which nothing or a tenth "
            "may be left; cases in which neither wipes out anything are left out",
            {case: plain - ours for case, (plain, ours) in grid.items() if np.nansum(plain + ours)},
        )
    for base, made in bases:
        yield Claim(
            "Q2",
            f"AMS raises the IoU of consecutive kept sets over {base}, at every depth",
            f"{TITLES['retained_iou']}: `{made}` minus `{base}`, each layer and budget",
            {
                f"layer {layer}, budget {n}": values
                for layer in layers
                for n, values in r.above(made, base, f"retained_iou {layer}").items()
            },
        )
    for base, made in bases:
        says = f"AMS keeps more of the middle of the text than {base}"
        yield compared(r, "Q3", says, made, base, "middle coverage")
    for base, made in bases:
        says = f"The longest run of tokens that AMS drops is shorter than that of {base}"
        yield compared(r, "Q4", says, base, made, "longest run")
    without = "ams, no credit"
    says = "Credit makes segments move less from event to event"
    yield compared(r, "Q5", says, without, "ams", "boundary shift")
    says = "Credit raises the IoU of consecutive kept sets"
    yield compared(r, "Q5", says, "ams", without, "retained_iou")
    yield Claim(
        "Q5",
        "Credit changes nothing at the first event",
        "number of entries that only one of `ams` and `ams, no credit` keeps there; has to be 0",
        {str(n): r.of("ams", n, "changed by credit") for n in budgets},
        margin=0.0,
    )
    for says, worse in (
        ("Quotas by mass are better than by length", "ams, weights by length"),
        ("Quotas by mass are better than equal ones", "ams, equal weights"),
    ):
        yield compared(r, "Q6", says, worse, "ams")
    says = f"Segments by mass are better than fixed ones, here of {SEGMENT} entries"
    yield compared(r, "Q7", says, "ams, fixed segments", "ams")
    for base, made in (("tova", "ams"), ("keydiff", "ams+keydiff")):
        kept = f"{base}, must-keep"
        for says, worse, better in (
            (f"AMS is better than {base}", base, made),
            (f"Keeping sinks and recent entries alone makes {base} better", base, kept),
            (f"AMS is better than {base} with sinks and recent entries kept", kept, made),
        ):
            yield compared(r, "Q8", says, worse, better)
    says = "Sets per head alone, which AMS brings too, make tova better"
    yield compared(r, "Q8", says, "tova", "tova, per head")
    for label, mode in (("ams", "strict"), ("ams@release", "release")):
        yield Claim(
            "Q9",
            f"The mass decides about most of the budget ({mode})",
            f"share of the budget that `{label}` deals by mass, minus 1/2",
            {str(n): r.of(label, n, "quota_by_mass") - 0.5 for n in budgets},
        )
        yield Claim(
            "Q9",
            f"Most of that mass is measured, and not filled in for the window's entries ({mode})",
            f"1/2 minus the share of the mass on the window's own entries, `{label}`",
            {str(n): 0.5 - r.of(label, n, "suffix_mass") for n in budgets},
        )
    says = "Filling in the largest usage for the window's entries is better than what was observed"
    yield compared(r, "Q9", says, "ams, observed", "ams")
    yield compared(r, "Q9", "... and wipes out less", "ams, observed", "ams", "wipeout 8 0")
    for quantity in ("error", "wipeout 8 0"):
        lead = r.above("tova", "ams", quantity)
        small, large = str(budgets[0]), str(budgets[-1])
        yield Claim(
            "Q10",
            f"The lead of AMS over tova grows as the budget falls ({TITLES[quantity]})",
            "`tova` minus `ams` at the smaller budget, minus the same at the larger",
            {f"{small} against {large}": lead[small] - lead[large]},
        )
    yield Claim(
        "Q11",
        "Earlier layers have more segments",
        "segments of a layer minus those of the next, `ams`",
        {
            f"layers {layer} and {layer + 1}, budget {n}": r.of("ams", n, f"segments {layer}")
            - r.of("ams", n, f"segments {layer + 1}")
            for layer in layers[:-1]
            for n in budgets
        },
    )
    yield Claim(
        "Q12",
        "The length of the window hardly matters",
        "relative change of the output error of `ams` with a window of 4, 8 or 32 instead of 16 "
        "rows; within 5 %",
        {
            f"window {w}, budget {n}": values
            for w in (4, 8, 32)
            for n, values in r.change(f"ams, window {w}", "ams").items()
        },
        margin=0.05,
    )
    yield from _cost_claims(r)


def _cost_claims(r: Results) -> Iterator[Claim]:
    """Q13, by seconds of this machine over random caches of many lengths."""
    low, high = r.plan.cost[0], r.plan.cost[-1]
    added = (r.seconds["ams"] - r.seconds["tova"]).clip(1e-6)
    slopes = np.polyfit(np.log(r.plan.cost), np.log(added).T, 1)[0]
    scoring = (r.seconds["expected_attention"] - r.seconds["random"]).clip(1e-6)
    yield Claim(
        "Q13",
        "What AMS adds to an event grows in proportion to the length of the cache",
        f"1.2 minus the exponent with which its seconds grow from {low} to {high} entries; n "
        "repetitions on a random cache, no prompts",
        {"seconds": 1.2 - slopes},
    )
    yield Claim(
        "Q13",
        "What AMS adds is negligible beside the scoring",
        f"1/10 minus its seconds over those of the scores of Expected Attention, at {high} "
        "entries; as before",
        {"seconds": 0.1 - added[:, -1] / scoring[:, -1]},
    )
