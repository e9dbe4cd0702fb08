"""What the paper on G-KV says, arXiv 2512.00504."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from results_page.attention import TOP, WINDOW
from results_page.quantities import TITLES, Floats
from results_page.statistics import Results
from results_page.verdicts import Claim, compared


def gkv_claims(r: Results) -> Iterator[Claim]:
    """G-KV, the 14 that need no generation."""

    def each(make: Callable[[int], Floats]) -> dict[str, Floats]:
        return {f"layer {layer}": make(layer) for layer in range(r.layers)}

    def lift(layer: int, share: float) -> Floats:
        chance = r.trace(f"chance {layer} {share:g}")
        return (r.trace(f"overlap {layer} {share:g}") - chance) / (1 - chance)

    yield Claim(
        "G1",
        "What the last window attends to is less like an older window than like a newer one",
        "overlap of its top 10 % with that of the window before it, minus with the oldest of three",
        each(lambda i: r.trace(f"newest {i} 0.1") - r.trace(f"oldest {i} 0.1")),
    )
    yield Claim(
        "G1",
        "Windows attend to different keys, the more so the fewer of the top are taken",
        "overlap of the top 50 % minus that of the top 5 %",
        each(lambda i: r.trace(f"overlap {i} 0.5") - r.trace(f"overlap {i} 0.05")),
    )
    yield Claim(
        "G1",
        "The same beyond what chance gives to larger sets",
        "the same of (overlap - chance) / (1 - chance)",
        each(lambda i: lift(i, 0.5) - lift(i, 0.05)),
    )
    yield Claim(
        "G2",
        "The union of three earlier top 55 % holds 95 % of the last one",
        "overlap with the union, minus 0.95",
        each(lambda i: r.trace(f"union {i} 0.55") - 0.95),
    )
    yield Claim(
        "G2",
        "That is more than chance gives to such a union",
        "overlap with the union, minus its chance (0.91)",
        each(lambda i: r.trace(f"union {i} 0.55") - r.trace(f"union chance {i} 0.55")),
    )
    yield Claim(
        "G2",
        "Earlier scores merged into one top 55 % say more than chance about the last one",
        "overlap with a set of the same size, minus its chance (0.55)",
        each(lambda i: r.trace(f"merged {i} 0.55") - r.trace(f"chance {i} 0.55")),
    )
    yield Claim(
        "G3",
        "Attention is intermittent: what one window does without is wanted again later",
        f"share of a window's top {TOP:.0%} that was top before, but not in the window just "
        "before; minus half of that share with the windows in random order",
        each(lambda i: r.trace(f"back {i}") - r.trace(f"back shuffled {i}") / 2),
    )
    for sinks, said in ((0, "all keys"), (4, "without the first 4")):
        small = {f"layer {i}": r.trace(f"sparsity {i} {sinks}") - 0.9 for i in range(r.layers)}
        yield Claim(
            "G4",
            f"More than 90 % of the keys get less than 1 % of the largest score ({said})",
            f"that share in the last {WINDOW} rows, minus 0.9",
            small,
        )
    yield Claim(
        "G5",
        "Attention over what was kept is as sparse",
        why="kvsim has no metric yet of attention over a kept set alone",
    )
    local, whole = "morphkv@gkv", "global_max"
    says = "The local score keeps later positions than the global one"
    yield compared(r, "G6", says, local, whole, "mean place")
    says = "What the global score keeps is spread more evenly"
    yield compared(r, "G6", says, local, whole, "distance from uniform")
    yield Claim(
        "G7",
        "It is the rotary embedding that draws the local score to late positions",
        why="needs a local score before the rotary embedding, which kvsim does not have yet",
    )
    for other in (local, "random", "streaming_llm"):
        says = f"The global score keeps more of what is attended to later than {other}"
        yield compared(r, "G8", says, whole, other, "mass")
        yield compared(r, "G8", f"... with a lower output error than {other}", other, whole)
    yield Claim(
        "G9",
        "Fusion by maximum and by sum are alike",
        "relative change of the output error from `global_max` to `global_sum`; within 5 %",
        r.change("global_sum", whole),
        margin=0.05,
    )
    yield compared(r, "G9", "Fusion by maximum is better than by mean", "global_mean", whole)
    for decay in (0.0, 0.5):
        says = f"A decay of 0.8 is better than one of {decay:g}"
        yield compared(r, "G9", says, f"global_max, decay {decay}", whole)
    yield Claim(
        "G9",
        "Decays of 0.8 and 0.9 are alike",
        "relative change of the output error of `global_max` from 0.8 to 0.9; within 5 %",
        r.change("global_max, decay 0.9", whole),
        margin=0.05,
    )
    says = "Pooling hurts in decoding"
    yield compared(r, "G10", f"{says}: the global score", "global_max, pooled", whole)
    yield compared(r, "G10", f"{says}: the local score", "snapkv@gkv", local)
    says = "Redundancy makes the kept keys less alike"
    yield compared(r, "G11", says, whole, "gkv", "similarity")
    for label, value in (("gkv, mix_lambda 0.5", 0.5), ("gkv", 0.7), ("gkv, mix_lambda 0.9", 0.9)):
        yield compared(r, "G11", f"... and the output better (mix_lambda {value})", whole, label)
    yield Claim(
        "G12",
        "Attention thins out as the text grows, so that scores have to be normalised",
        "rank correlation of the number of a window with its largest score of a prompt's key, "
        "times -1",
        each(lambda i: -r.trace(f"size {i}")),
    )
    yield Claim(
        "G13",
        "H2O neglects the end of a long text",
        f"1/2 minus the {TITLES['mean place of older']}, `h2o`",
        {str(n): 0.5 - r.of("h2o", n, "mean place of older") for n in r.plan.budgets},
    )
    says = "... more than chance does, for what is old has survived more events"
    yield compared(r, "G13", says, "random", "h2o", "mean place of older")
    yield Claim(
        "G14",
        'Deep layers keep punctuation and words such as "wait" out of proportion',
        "share kept of the punctuation in the last layer over that of all tokens, minus 1, `gkv`; "
        '"wait" is an instruction here and not tested',
        {str(n): r.of("gkv", n, "punctuation") for n in r.plan.budgets},
    )
