"""Claims of the paper on G-KV, arXiv 2512.00504: the 14 that need no generation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.studies.claims.claim import ALL, MOST, Claim
from kvsim.studies.claims.evidence import Evidence, of

#: The score over all windows, and the one over only the last window.
GLOBAL, LOCAL = of("global_max"), of("morphkv@gkv")


def gkv(e: Evidence) -> Iterator[Claim]:
    """G-KV: properties of attention, and of G-KV's scores."""
    yield from _windows(e)
    yield from _sparsity(e)
    yield from _places(e)
    yield from _later_attention(e)
    yield from _fusion(e)
    pooled = of("global_max", pool=("max", "avg")), of("global_max", pool=None)
    yield e.claim("G10", "Pooling hurts in decoding", pooled, (of("snapkv@gkv"), LOCAL))
    yield from _redundancy(e)
    says = "Attention thins out as the text grows, so that scores have to be normalised"
    tested = "rank correlation, times -1, of the number of a window with its largest score of a key"
    decline = "score_decline"
    yield e.traced("G12", says, tested, decline, cell=lambda i: -e.value(decline, layer=i))
    h2o, older = of("h2o"), ["older"]
    yield e.claim(
        "G13",
        "H2O neglects the end of a long text",
        (h2o,),
        metric="retained_position",
        variants=older,
        cell=lambda mean: 0.5 - mean,
        tested="1/2 minus the mean place of what is kept behind the recent half, 0 to 1, h2o",
    )
    says = "H2O neglects the end more than chance does, as old entries have survived more events"
    yield e.claim("G13", says, (of("random"), h2o), metric="retained_position", variants=older)
    yield e.claim(
        "G14",
        'Deep layers keep punctuation and words such as "wait" out of proportion',
        (of("gkv"),),
        metric="punctuation_lift",
        cell=lambda lift: lift - 1,
        layers=e.layers("punctuation_lift")[-1:] or (None,),
        tested="share kept of the punctuation in the last layer over that of all tokens, minus 1, "
        "gkv; words are not tested",
    )


def _windows(e: Evidence) -> Iterator[Claim]:
    """G1 to G3: keys that windows of rows attend to."""
    overlap = "window_overlap"
    value = partial(e.value, overlap)

    def before(layer: int, share: str) -> Floats:
        each = [value(f"share={share},block={block}", layer) for block in (1, 2, 3)]
        mean: Floats = np.mean(each, axis=0)
        return mean

    def lift(layer: int, share: str) -> Floats:
        random = value(f"share={share},block=1", layer, chance=True)
        return (before(layer, share) - random) / (1 - random)

    def beyond(variant: str, layer: int) -> Floats:
        return value(variant, layer) - value(variant, layer, chance=True)

    newest, oldest = "share=0.1,block=3", "share=0.1,block=1"
    says = "The last window attends to keys less like those of an older window than of a newer one"
    tested = "overlap of its top 10 % with the window before it, minus with the oldest of three"
    yield e.traced(
        "G1", says, tested, overlap, newest, lambda i: value(newest, i) - value(oldest, i)
    )
    says = "Windows attend to different keys, the more so the fewer of the top are taken"
    tested, half = ("overlap of the top 50 % minus that of the top 5 %", "share=0.5,block=1")
    yield e.traced(
        "G1", says, tested, overlap, half, lambda i: before(i, "0.5") - before(i, "0.05")
    )
    says = "Windows differ in this way beyond what chance gives to larger sets"
    tested = "the same of (overlap - chance) / (1 - chance)"
    yield e.traced("G1", says, tested, overlap, half, lambda i: lift(i, "0.5") - lift(i, "0.05"))
    union, merged = "share=0.55,union", "share=0.55,equal_budget"
    says = "The union of three earlier top 55 % holds 95 % of the last one"
    tested = "overlap with the union, minus 0.95"
    yield e.traced("G2", says, tested, overlap, union, level=0.95)
    says = "The union holds more than chance gives to such a union"
    tested = "overlap with the union, minus its chance (0.91)"
    yield e.traced("G2", says, tested, overlap, union, partial(beyond, union))
    says = "Earlier scores merged into one top 55 % say more than chance about the last one"
    tested = "overlap with a set of the same size, minus its chance (0.55)"
    yield e.traced("G2", says, tested, overlap, merged, partial(beyond, merged))
    # windows in random order have the most returns
    metric = "attention_return", "share=0.1,returns"
    says = "Attention is intermittent: keys that one window ignores are attended to again later"
    tested = (
        "share of a window's top 10 % that was top before, but not in the window just before; "
        "minus half of that share with the windows in random order"
    )
    yield e.traced(
        "G3",
        says,
        tested,
        *metric,
        lambda i: e.value(*metric, i) - e.value(*metric, i, chance=True) / 2,
    )


def _sparsity(e: Evidence) -> Iterator[Claim]:
    """G4 and G5: sparsity of the whole cache, and of the compressed one."""
    for peak, keys in (("sequence", "all keys"), ("behind_sink", "without the first 4")):
        metric = "sparsity", f"p=0.01,max={peak}"
        says = "In the majority of layers more than 90 % of the keys get less than 1 % of the "
        says += f"largest score ({keys})"
        tested = "that share in the last 16 rows, minus 0.9"
        yield e.traced("G4", says, tested, *metric, level=0.9)
    kept = "more than {:.0%} of the kept keys get less than {:.0%} of the largest score"
    for share, most, says, first, where in (
        (0.01, 0.9, f"In all layers but the first {kept}", 1, ALL),
        (0.05, 0.8, f"In many layers {kept}", 0, MOST),
    ):
        variant = f"p={share:g},max=sequence"
        yield e.claim(
            "G5",
            says.format(most, share),
            (of("gkv"),),
            metric="sparsity_compressed",
            variants=[variant],
            cell=partial(np.add, -most),
            layers=e.layers("sparsity_compressed", variant)[first:] or (None,),
            where=where,
            tested=f"that share of what gkv keeps, in the last 16 rows, minus {most:g}",
        )


def _places(e: Evidence) -> Iterator[Claim]:
    """G6 and G7: positions of the entries that the scores keep."""
    both, metric = (LOCAL, GLOBAL), "retained_position"
    says = "The local score keeps later positions than the global one"
    yield e.claim("G6", says, both, metric=metric)
    says = "The global score keeps entries that are spread more evenly"
    yield e.claim("G6", says, both, metric=metric, variants=["distance"])
    says = "It is the rotary embedding that draws the local score to late positions"
    needs = "needs a local score before the rotary embedding, which kvsim does not have yet"
    yield Claim("G7", says, needs=needs)


def _later_attention(e: Evidence) -> Iterator[Claim]:
    """G8: the global score keeps the entries that later rows attend to."""
    others = [LOCAL, of("random"), of("streaming_llm")]
    for ours, theirs, where in ((GLOBAL, others, ALL), (of("gkv"), [of("rkv")], MOST)):
        names = ", ".join(map(str, theirs))
        says = f"{ours} keeps more entries that are attended to later than {names}"
        couples = [(ours, other) for other in theirs]
        yield e.claim("G8", says, *couples, metric="retained_mass", where=where)
        couples = [(other, ours) for other in theirs]
        yield e.claim("G8", f"{ours} is better than {names}", *couples, where=where)


def _fusion(e: Evidence) -> Iterator[Claim]:
    """G9: fusion of the scores of windows, and their decay."""
    total = of("global_sum")
    says, tested = "Fusion by maximum and by sum are alike", f"from {GLOBAL} to {total}"
    yield e.alike("G9", says, tested, e.found(total, GLOBAL), [total, GLOBAL])
    yield e.claim("G9", "Fusion by maximum is better than by mean", (of("global_mean"), GLOBAL))
    usual, longer = of("global_max", decay=0.8), of("global_max", decay=0.9)
    couples = [(of("global_max", decay=decay), usual) for decay in (0.0, 0.5)]
    yield e.claim("G9", "A decay of 0.8 is better than 0 and 0.5", *couples, where=ALL)
    says, tested = "Decays of 0.8 and 0.9 are alike", f"of {GLOBAL} from 0.8 to 0.9"
    yield e.alike("G9", says, tested, e.found(longer, usual), [longer, usual])


def _redundancy(e: Evidence) -> Iterator[Claim]:
    """G11: weights of the attention score, compared with only the score."""
    says = "Redundancy makes the kept keys less alike"
    yield e.claim("G11", says, (GLOBAL, of("gkv")), metric="key_similarity")
    couples = [(GLOBAL, of("gkv", mix_lambda=weight)) for weight in (0.5, 0.7, 0.9)]
    yield e.claim("G11", "Redundancy makes the output better", *couples)
