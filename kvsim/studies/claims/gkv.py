"""Claims of the paper on G-KV, arXiv 2512.00504: the 14 that need no generation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.studies.claims.claim import Claim
from kvsim.studies.claims.evidence import Evidence, of

#: The score over all windows, and the one over the last window alone.
GLOBAL, LOCAL = of("global_max"), of("morphkv@gkv")


def gkv(e: Evidence) -> Iterator[Claim]:
    """G-KV: properties of attention, and of G-KV's scores."""
    yield from _windows(e)
    yield from _intermittence(e)
    yield from _sparsity(e)
    yield from _places(e)
    yield from _later_attention(e)
    yield from _fusion(e)
    says = "Pooling hurts in decoding"
    pooled = of("global_max", pool=("max", "avg"))
    yield e.compared("G10", f"{says}: the global score", pooled, of("global_max", pool=None))
    yield e.compared("G10", f"{says}: the local score", of("snapkv@gkv"), LOCAL)
    yield from _redundancy(e)
    says = "Attention thins out as the text grows, so that scores have to be normalised"
    tested = "rank correlation of the number of a window with its largest score of a prompt's key"
    cases = {case: -values for case, values in e.by_layer("score_decline").items()}
    yield Claim("G12", says, f"{tested}, times -1", cases, needs=e.untraced("score_decline"))
    h2o, place = of("h2o"), ("retained_position", "older")
    tested = "1/2 minus the mean place of what is kept behind the recent half, 0 to 1, h2o"
    says = "H2O neglects the end of a long text"
    yield e.measured("G13", says, tested, h2o, *place, case=lambda mean: 0.5 - mean)
    says = "... more than chance does, for what is old has survived more events"
    yield e.compared("G13", says, of("random"), h2o, *place)
    lift = "punctuation_lift"
    says = 'Deep layers keep punctuation and words such as "wait" out of proportion'
    tested = (
        "share kept of the punctuation in the last layer over that of all tokens, minus 1, gkv; "
        "words are not tested"
    )
    last = e.layers(lift)[-1:]
    yield e.measured("G14", says, tested, of("gkv"), lift, case=lambda x: x - 1, layers=last)


def _windows(e: Evidence) -> Iterator[Claim]:
    """G1 and G2: keys that windows of rows attend to."""

    def value(layer: int, variant: str, *, chance: bool = False) -> Floats:
        return e.value("window_overlap", variant, layer, chance=chance)

    def before(layer: int, share: str) -> Floats:
        """Mean over the three windows before the last."""
        each = [value(layer, f"share={share},block={block}") for block in (1, 2, 3)]
        mean: Floats = np.mean(each, axis=0)
        return mean

    def lift(layer: int, share: str) -> Floats:
        random = value(layer, f"share={share},block=1", chance=True)
        return (before(layer, share) - random) / (1 - random)

    newest, oldest = "share=0.1,block=3", "share=0.1,block=1"
    half, union, merged = "share=0.5,block=1", "share=0.55,union", "share=0.55,equal_budget"
    for number, variant, make, says, tested in (
        (
            *("G1", newest, lambda i: value(i, newest) - value(i, oldest)),
            "What the last window attends to is less like an older window than like a newer one",
            (
                "overlap of its top 10 % with that of the window before it, minus with the oldest "
                "of three"
            ),
        ),
        (
            *("G1", half, lambda i: before(i, "0.5") - before(i, "0.05")),
            "Windows attend to different keys, the more so the fewer of the top are taken",
            "overlap of the top 50 % minus that of the top 5 %",
        ),
        (
            *("G1", half, lambda i: lift(i, "0.5") - lift(i, "0.05")),
            "The same beyond what chance gives to larger sets",
            "the same of (overlap - chance) / (1 - chance)",
        ),
        (
            *("G2", union, lambda i: value(i, union) - 0.95),
            "The union of three earlier top 55 % holds 95 % of the last one",
            "overlap with the union, minus 0.95",
        ),
        (
            *("G2", union, lambda i: value(i, union) - value(i, union, chance=True)),
            "That is more than chance gives to such a union",
            "overlap with the union, minus its chance (0.91)",
        ),
        (
            *("G2", merged, lambda i: value(i, merged) - value(i, merged, chance=True)),
            "Earlier scores merged into one top 55 % say more than chance about the last one",
            "overlap with a set of the same size, minus its chance (0.55)",
        ),
    ):
        cases = e.by_layer("window_overlap", variant, make)
        needs = e.unmeasured("window_overlap", variant)
        yield Claim(number, says, tested, cases, needs=needs)


def _intermittence(e: Evidence) -> Iterator[Claim]:
    """G3: against windows in random order, which come back as often as anything can."""
    metric = "attention_return", "share=0.1,returns"
    says = "Attention is intermittent: what one window does without is wanted again later"
    tested = (
        "share of a window's top 10 % that was top before, but not in the window just before; "
        "minus half of that share with the windows in random order"
    )
    cases = e.by_layer(
        *metric, lambda i: e.value(*metric, i) - e.value(*metric, i, chance=True) / 2
    )
    yield Claim("G3", says, tested, cases, needs=e.unmeasured(*metric))


def _sparsity(e: Evidence) -> Iterator[Claim]:
    """G4 and G5: sparsity of the whole cache, and of the compressed one."""
    for peak, keys in (("sequence", "all keys"), ("behind_sink", "without the first 4")):
        metric = "sparsity", f"p=0.01,max={peak}"
        says = f"More than 90 % of the keys get less than 1 % of the largest score ({keys})"
        tested = "that share in the last 16 rows, minus 0.9"
        cases = {case: values - 0.9 for case, values in e.by_layer(*metric).items()}
        yield Claim("G4", says, tested, cases, needs=e.unmeasured(*metric))
    for share, most in ((0.01, 0.9), (0.05, 0.8)):
        metric = "sparsity_compressed", f"p={share:g},max=sequence"
        says = f"... and so it is with what is kept: more than {most * 100:.0f} % get less than "
        says += f"{share * 100:.0f} %"
        tested = f"that share of what gkv keeps, in the last 16 rows, minus {most:g}"
        beyond, layers = partial(np.add, -most), e.layers(*metric)
        yield e.measured("G5", says, tested, of("gkv"), *metric, case=beyond, layers=layers)


def _places(e: Evidence) -> Iterator[Claim]:
    """G6 and G7: where in the text the scores keep."""
    says = "The local score keeps later positions than the global one"
    yield e.compared("G6", says, LOCAL, GLOBAL, "retained_position")
    says = "What the global score keeps is spread more evenly"
    yield e.compared("G6", says, LOCAL, GLOBAL, "retained_position", "distance")
    says = "It is the rotary embedding that draws the local score to late positions"
    needs = "needs a local score before the rotary embedding, which kvsim does not have yet"
    yield Claim("G7", says, needs=needs)


def _later_attention(e: Evidence) -> Iterator[Claim]:
    """G8: the global score keeps the entries that later rows attend to."""
    beside = ((GLOBAL, LOCAL), (GLOBAL, of("random")), (GLOBAL, of("streaming_llm")))
    for whole, other in (*beside, (of("gkv"), of("rkv"))):
        says = f"{whole} keeps more of what is attended to later than {other}"
        yield e.compared("G8", says, whole, other, "retained_mass")
        yield e.compared("G8", f"... and is better than {other}", other, whole)


def _fusion(e: Evidence) -> Iterator[Claim]:
    """G9: how scores of windows become one, and how fast they are forgotten."""
    total = of("global_sum")
    says, tested = "Fusion by maximum and by sum are alike", f"from {GLOBAL} to {total}"
    yield e.alike("G9", says, tested, e.pairs(total, GLOBAL), [total, GLOBAL])
    says = "Fusion by maximum is better than by mean"
    yield e.compared("G9", says, of("global_mean"), GLOBAL)
    usual = of("global_max", decay=0.8)
    for decay in (0.0, 0.5):
        says = f"A decay of 0.8 is better than one of {decay:g}"
        yield e.compared("G9", says, of("global_max", decay=decay), usual)
    longer = of("global_max", decay=0.9)
    says, tested = "Decays of 0.8 and 0.9 are alike", f"of {GLOBAL} from 0.8 to 0.9"
    yield e.alike("G9", says, tested, e.pairs(longer, usual), [longer, usual])


def _redundancy(e: Evidence) -> Iterator[Claim]:
    """G11: each weight of the attention score beside the score alone."""
    says = "Redundancy makes the kept keys less alike"
    yield e.compared("G11", says, GLOBAL, of("gkv"), "key_similarity")
    for weight in (0.5, 0.7, 0.9):
        says = f"... and the output better (mix_lambda {weight})"
        yield e.compared("G11", says, GLOBAL, of("gkv", mix_lambda=weight))
