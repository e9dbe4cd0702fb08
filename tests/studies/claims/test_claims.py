"""Claims of the papers on made-up Tables: three answers, and what is missing for one."""

import json
from itertools import product

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import COLUMNS
from kvsim.studies.claims import ALL, CLAIMS, HOLDS, MOST, NOT, OPEN, Claim, Seconds, claims

EVERY = {
    "AMS": {f"Q{i}" for i in range(1, 14)},
    "G-KV": {f"G{i}" for i in range(1, 15)},
    "Expected Attention": {f"E{i}" for i in range(1, 8)},
    "ASL": {f"S{i}" for i in range(1, 7)},
}


#: A multiple of the numbers of values given, and enough to decide about a dozen cases.
PROMPTS = 12


def rows(policy, values, metric="output_error", variant=None, *, params=None, few=False, **more):
    """A row per prompt, `PROMPTS` of them, of one result, at one event in 16 rows by default."""
    values = [*values] if few else [*values] * (PROMPTS // len(values))
    main = METRICS[metric].main if metric in METRICS else ""
    if policy is not None:
        small = {"window": 16} if policy.startswith("ams") else {}  # in its range
        known = kvsim.policy(policy).params | small | (params or {})
        own = {"policy": policy, "params": json.dumps(known), "budget": 64}
        own |= {"interval": 16, "prefill": False}
    else:
        own = {}
    for trace, value in enumerate(values):
        row = dict.fromkeys(COLUMNS) | {"trace": f"t{trace}", "metric": metric, "value": value}
        yield row | {"variant": main if variant is None else variant, "layer": 0} | own | more


def table(*parts):
    """A Table of all these rows."""
    return pl.DataFrame([row for part in parts for row in part], schema=COLUMNS)


def at_prompt(policy, values, **more):
    """Rows at the one event after the prompt."""
    return rows(policy, values, **{"interval": None, "prefill": True} | more)


def answer(found, number, words=""):
    """The one claim of a number whose text has these words, or ends with them."""
    every = [one for of_paper in claims(found).values() for one in of_paper]
    known = [one for one in every if one.number == number and words in one.says]
    (one,) = known if len(known) == 1 else [one for one in known if one.says.endswith(words)]
    return one


RIGHT, WRONG = np.linspace(0.5, 1.5, PROMPTS), -np.linspace(0.5, 1.5, PROMPTS)
EITHER = np.resize([1.0, -0.9], PROMPTS)


@pytest.mark.parametrize(
    ("cells", "where", "verdict"),
    [
        ([RIGHT], MOST, HOLDS),
        ([RIGHT, 2 * RIGHT], ALL, HOLDS),
        ([RIGHT, EITHER], ALL, OPEN),
        ([RIGHT, EITHER, WRONG], ALL, NOT),
        ([RIGHT, RIGHT, WRONG], MOST, HOLDS),
        ([RIGHT, RIGHT, WRONG], ALL, NOT),
        ([RIGHT, WRONG], MOST, NOT),
        ([RIGHT, WRONG, EITHER], MOST, OPEN),
        ([RIGHT] * 19 + [WRONG] * 11, MOST, HOLDS),
        ([RIGHT] * 16 + [WRONG] * 14, MOST, HOLDS),
        ([RIGHT] * 15 + [WRONG] * 15, MOST, NOT),
        ([0 * RIGHT], MOST, OPEN),
        ([RIGHT / 200], MOST, OPEN),
        ([WRONG / 200], MOST, OPEN),
        ([RIGHT / 50], MOST, HOLDS),
        ([WRONG / 50], MOST, NOT),
        ([RIGHT, WRONG[:5]], ALL, HOLDS),
        ([RIGHT[:5]], MOST, OPEN),
        ([WRONG[:6]], MOST, NOT),
        ([WRONG[:6], RIGHT], ALL, NOT),
        ([WRONG[:1]], MOST, OPEN),
        ([[np.inf] * 12], MOST, OPEN),
        ([np.full(9, np.nan)], MOST, OPEN),
        ([], MOST, OPEN),
    ],
)
def test_verdicts(cells, where, verdict):
    """Right in all or in most cells that have prompts, so that the contrary is, or neither."""
    given = {str(i): np.resize(np.nan, PROMPTS) for i in range(len(cells))}
    for values, cell in zip(given.values(), cells, strict=True):
        values[: len(cell)] = cell

    assert Claim("", "", cells=given, where=where).verdict == verdict


@pytest.mark.parametrize(("cells", "where"), [(1, ALL), (2, ALL), (3, MOST), (4, MOST), (5, ALL)])
def test_p_values_are_those_of_a_loop_over_flips(cells, where):
    """Of the weakest cells that are one too many for the contrary, and of the strongest for it."""
    rng = np.random.default_rng(cells)
    numbers = rng.normal(0.6, 1, (7, cells))
    least = 0.01

    def plain(gaps, right):
        sizes = [np.sqrt(sum(x * x for x in gap)) for gap in gaps.T]
        flips = [
            [sum(s * x for s, x in zip(signs, gap, strict=True)) / size
             for gap, size in zip(gaps.T, sizes, strict=True)]
            for signs in product((1, -1), repeat=len(gaps))
        ]  # fmt: skip
        less = [
            [sum(other[cell] < flip[cell] - 1e-9 for other in flips) for cell in range(cells)]
            for flip in flips
        ]  # flips that say less for a cell, which order its p-values
        weakest = sorted(range(cells), key=lambda cell: less[0][cell])[: cells - right + 1]
        largest = [max(flip[cell] for cell in weakest) for flip in less]
        return sum(x >= largest[0] for x in largest) / len(flips)

    right = cells if where == ALL else cells // 2 + 1
    claim = Claim("", "", cells={str(i): gap for i, gap in enumerate(numbers.T)}, where=where)

    assert claim.p == pytest.approx(
        (plain(numbers - least, right), plain(-numbers - least, cells - right + 1))
    )


def test_the_order_of_prompts_does_not_matter():
    """Also where flips are drawn."""
    rng = np.random.default_rng(3)
    numbers = rng.normal(0.3, 1, (20, 3))
    both = [
        Claim("", "", cells={str(i): gap for i, gap in enumerate(rows.T)}).p
        for rows in (numbers, rng.permutation(numbers))
    ]

    assert both[0] == both[1]


def test_a_claim_says_its_test_or_what_it_needs():
    """Over the prompts that have all cells of enough of them; and what they can say."""
    one = Claim("", "", cells={"a": np.append(WRONG, np.nan), "b": np.append(np.nan, 3 * WRONG)})
    assert list(one.means.values()) == pytest.approx([WRONG[1:].mean(), 3 * WRONG[:-1].mean()])
    assert one.result == "contrary p=0.00049, n=11, 0/2 above 0, -2.864 to -1.045"
    few = Claim("", "", cells={"a": RIGHT, "b": np.append(RIGHT[:2], [np.nan] * 10)})
    assert few.omitted == "1 cell left out: too few prompts"
    five = Claim("", "", cells={"": RIGHT[:5]}, needs="needs more")
    assert five.result == "n=5, 1/1 above 0, +0.682"
    assert five.why == "fewer than 6 prompts decide nothing; record 12"
    assert "of 6 prompts p is at least 0.016" in Claim("", "", cells={"": EITHER[:6]}).why
    assert Claim("", "", needs="needs more").why == "needs more"
    out = Claim("", "", left_out={"a": "why", "b": "why"})
    assert out.why == out.omitted == "2 cells left out: why"


def test_every_claim_is_there_and_says_what_it_needs():
    """On a Table that has next to nothing, with a command that gives what is missing."""
    found = claims(table(rows("h2o", [0.1, 0.2])))

    assert list(found) == list(CLAIMS)
    for (paper, of_paper), (name, numbers) in zip(found.items(), EVERY.items(), strict=True):
        assert paper.startswith(name)
        assert {one.number for one in of_paper} == numbers
        assert len({(one.number, one.says) for one in of_paper}) == len(of_paper)
        for one in of_paper:
            assert one.verdict == OPEN
            assert one.why.startswith("needs ")
            assert one.says
    assert claims(table()).keys() == CLAIMS.keys()


def pair(more, less, metric="output_error", variant=None, **own):
    """Rows of two results, `more` with the larger values; each is (policy, parameters)."""

    def make(sign):
        for (policy, params), base in ((more, 2.0 + sign), (less, 2.0 - sign)):
            values = [base, base + 0.2, base + 0.1]
            yield from rows(policy, values, metric, variant, params=params, **own)

    return make


def trace_rows(metric, variant, larger, smaller, **own):
    """Rows of the traces: a value where the claim is right, and one where it is not."""

    def make(sign):
        value = larger if sign > 0 else smaller
        return rows(None, [value, value + 0.001, value + 0.002], metric, variant, **own)

    return make


def both(*makers):
    """All of these rows."""
    return lambda sign: [row for make in makers for row in make(sign)]


def layers(metric, variant, first, second):
    """Rows of the traces in two layers."""

    def make(sign):
        pairs = ((0, first), (1, second)) if sign > 0 else ((0, second), (1, first))
        for layer, value in pairs:
            yield from rows(None, [value, value + 0.01], metric, variant, layer=layer)

    return make


def lead(sign):
    """TOVA above AMS, by more at the smaller budget or at the larger."""
    for budget, more in ((32, 2.0 + sign), (64, 2.0)):
        yield from rows("tova", [1 + more, 1.1 + more], budget=budget)
        yield from rows("ams", [1.0, 1.1], budget=budget)


def by_depth(sign):
    """More segments in the first or in the second layer."""
    for layer, count in ((0, 8.0 + sign), (1, 8.0 - sign)):
        yield from rows("ams", [count, count + 0.1], "segment_count", layer=layer)


def overlaps(**values):
    """Overlap of windows by variant, with chance 0.3."""
    return both(
        *(
            lambda sign, name=name, pair=pair: rows(
                None,
                [pair[sign < 0], pair[sign < 0] + 0.001],
                "window_overlap",
                name,
                chance=0.3,
            )
            for name, pair in values.items()
        )
    )


def changed(policy, params, metric="output_error", **own):
    """Rows of a policy and of the same with another parameter, which is near or far from it."""

    def make(sign):
        yield from rows(policy, [1.0, 1.1], metric, **own)
        value = 1.01 if sign > 0 else 1.5
        yield from rows(policy, [value, value + 0.1], metric, params=params, **own)

    return make


KEPT = {"protect": {"sink": 4, "recent": 32, "prompt": False}}
ONE = {"interval": None, "prefill": True}
GLOBAL, LOCAL = ("global_max", {}), ("morphkv@gkv", {})
#: Number, words of the claim, and rows on which it holds (sign 1) or does not (sign -1).
PLANTED = [
    ("Q1", "", pair(("tova", {}), ("ams", {}), "wipeout", "length=16,threshold=0")),
    ("Q2", "", pair(("ams", {}), ("tova", {}), "retained_iou", "")),
    ("Q3", "", pair(("ams", {}), ("tova", {}), "middle_coverage", "")),
    ("Q4", "", pair(("tova", {}), ("ams", {}), "burst_length", "longest")),
    ("Q5", "move less", pair(("ams", {"credit": False}), ("ams", {}), "boundary_shift")),
    ("Q5", "raises the IoU", pair(("ams", {}), ("ams", {"credit": False}), "retained_iou")),
    ("Q6", "by length", pair(("ams", {"weights": "length"}), ("ams", {}))),
    ("Q6", "equal ones", pair(("ams", {"weights": "equal"}), ("ams", {}))),
    (
        "Q7",
        "fixed ones",
        pair(("ams", {"segmentation": "fixed", "segment_length": 16}), ("ams", {})),
    ),
    ("Q8", "every scorer", pair(("tova", {}), ("ams", {}))),
    ("Q8", "Keeping sinks", pair(("tova", {}), ("tova", KEPT))),
    ("Q8", "entries kept", pair(("tova", KEPT), ("ams", {}))),
    ("Q8", "Sets per head", pair(("tova", {}), ("tova", {"heads": "group"}))),
    ("Q9", "Filling in", pair(("ams", {"suffix_fill": "observed"}), ("ams", {}))),
    ("Q9", "wipes out less", pair(("ams", {"suffix_fill": "observed"}), ("ams", {}), "wipeout")),
    ("Q10", "", lead),
    ("Q11", "Earlier layers", by_depth),
    ("Q12", "window", changed("ams", {"window": 32})),
    (
        "G1",
        "older window",
        overlaps(**{"share=0.1,block=3": (0.9, 0.1), "share=0.1,block=1": (0.1, 0.9)}),
    ),
    (
        "G1",
        "Windows attend to different",
        overlaps(
            **{f"share=0.5,block={i}": (0.9, 0.4) for i in (1, 2, 3)},
            **{f"share=0.05,block={i}": (0.4, 0.9) for i in (1, 2, 3)},
        ),
    ),
    ("G2", "95 %", overlaps(**{"share=0.55,union": (0.97, 0.9)})),
    ("G2", "more than chance gives", overlaps(**{"share=0.55,union": (0.97, 0.2)})),
    ("G2", "merged", overlaps(**{"share=0.55,equal_budget": (0.6, 0.2)})),
    (
        "G3",
        "intermittent",
        trace_rows("attention_return", "share=0.1,returns", 0.4, 0.1, chance=0.6),
    ),
    ("G4", "all keys", trace_rows("sparsity", "p=0.01,max=sequence", 0.95, 0.8)),
    ("G4", "first 4", trace_rows("sparsity", "p=0.01,max=behind_sink", 0.95, 0.8)),
    ("G6", "later positions", pair(LOCAL, GLOBAL, "retained_position")),
    ("G6", "evenly", pair(LOCAL, GLOBAL, "retained_position", "distance")),
    ("G8", "later than morphkv@gkv", pair(GLOBAL, LOCAL, "retained_mass")),
    ("G8", "is better than morphkv@gkv", pair(LOCAL, GLOBAL)),
    ("G9", "by mean", pair(("global_mean", {}), ("global_max", {}))),
    ("G9", "better than 0 and 0.5", pair(("global_max", {"decay": 0.5}), ("global_max", {}))),
    ("G9", "0 and 0.5", pair(("global_max", {"decay": 0.0}), ("global_max", {}))),
    ("G9", "0.8 and 0.9", changed("global_max", {"decay": 0.9})),
    ("G10", "", pair(("global_max", {"pool": "max"}), ("global_max", {}))),
    ("G10", "Pooling", pair(("snapkv@gkv", {}), ("morphkv@gkv", {}))),
    ("G11", "less alike", pair(("global_max", {}), ("gkv", {}), "key_similarity")),
    ("G11", "output better", pair(("global_max", {}), ("gkv", {"mix_lambda": 0.9}))),
    ("G12", "thins out", trace_rows("score_decline", "", -0.4, 0.4)),
    ("G13", "than chance", pair(("random", {}), ("h2o", {}), "retained_position", "older")),
    ("E1", "goes with", trace_rows("expectation", "", 0.4, -0.4)),
    ("E2", "looked ahead", changed("expected_attention", {"n_future": 128}, **ONE)),
    (
        "E3",
        "makes it better",
        pair(("expected_attention", {"covariance": False}), ("expected_attention", {}), **ONE),
    ),
    (
        "E4",
        "without epsilon",
        pair(
            ("expected_attention", {}),
            ("expected_attention", {"epsilon": 0.0}),
            "value_norm_overlap",
            **ONE,
        ),
    ),
    (
        "E4",
        "norm of the value makes",
        pair(
            ("expected_attention", {"value_norm": "none"}),
            ("expected_attention", {"epsilon": 0.0}),
            **ONE,
        ),
    ),
    (
        "E4",
        "Epsilon 0.01",
        pair(("expected_attention", {"epsilon": 0.0}), ("expected_attention", {}), **ONE),
    ),
    ("E5", "", pair(("expected_attention", {}), ("adakv+expected_attention", {}), **ONE)),
    ("E6", "", pair(("tova", {}), ("expected_attention", {}), **ONE)),
    ("E7", "nearly normal", trace_rows("projection_gap", "skip=4", 0.1, 2.0)),
    (
        "E7",
        "sinks",
        both(
            trace_rows("projection_gap", "skip=4", 0.1, 2.0),
            trace_rows("projection_gap", "skip=0", 1.0, 1.0),
        ),
    ),
    ("S1", "variance of ranks", layers("rank_variance", "k=25%", 9.0, 3.0)),
    ("S2", "flatly", layers("layer_entropy", "", 4.0, 2.0)),
    (
        "S3",
        "threshold is passed later",
        both(
            trace_rows("rank_relative", "k=10%", 0.3, 0.6),
            trace_rows("rank_relative", "k=50%", 0.5, 0.5),
        ),
    ),
    (
        "S3",
        "later layer is selected",
        both(
            trace_rows("selection_layer", "k=10%,tau=0.3", 5.0, 9.0),
            trace_rows("selection_layer", "k=50%,tau=0.3", 7.0, 7.0),
        ),
    ),
    (
        "S3",
        "smaller threshold",
        both(
            trace_rows("selection_layer", "k=10%,tau=0.2", 9.0, 5.0),
            trace_rows("selection_layer", "k=10%,tau=0.6", 7.0, 7.0),
        ),
    ),
    (
        "S4",
        "reacts faster",
        both(
            trace_rows("selection_layer", "k=10%,tau=0.3", 9.0, 5.0),
            trace_rows("selection_layer", "k=10%,tau=0.3,look_back=2", 7.0, 7.0),
        ),
    ),
    ("S5", "more than go on", trace_rows("rank_union", "k=25%", 1.5, 0.9)),
]  # fmt: skip


@pytest.mark.parametrize(("number", "words", "make"), PLANTED)
def test_a_claim_holds_or_not_by_what_is_planted(number, words, make):
    """On rows of which it is so, and on the same the other way round."""
    right, wrong = (answer(table(make(sign)), number, words) for sign in (1, -1))

    assert right.verdict == HOLDS, right.result
    assert wrong.verdict == NOT, wrong.result
    assert not right.why
    assert right.n == PROMPTS


@pytest.mark.parametrize(
    ("number", "words", "policy", "metric", "variant", "right", "wrong"),
    [
        ("Q9", "most of the budget", "ams", "quota_share", "mass", 0.8, 0.2),
        ("Q9", "measured, and not filled in", "ams",
         "suffix_mass", "", 0.2, 0.8),
        ("G5", "90%", "gkv", "sparsity_compressed", "p=0.01,max=sequence", 0.95, 0.5),
        ("G5", "80%", "gkv", "sparsity_compressed", "p=0.05,max=sequence", 0.85, 0.5),
        ("G13", "neglects", "h2o", "retained_position", "older", 0.2, 0.8),
        ("G14", "punctuation", "gkv", "punctuation_lift", "", 1.5, 0.5),
        ("E4", "decides about most", "expected_attention", "value_norm_overlap", "", 0.8, 0.2),
    ],
)  # fmt: skip
def test_claims_about_one_policy(number, words, policy, metric, variant, right, wrong):
    """Its value beside a fixed one."""
    for value, verdict in ((right, HOLDS), (wrong, NOT)):
        values = (rows(policy, [value, value + 0.01], metric, variant, layer=i) for i in (0, 1))
        of_policy = table(*values)
        assert answer(of_policy, number, words).verdict == verdict


def test_a_late_first_layer():
    """Selection layers scatter."""
    usual = rows(None, [5.0, 5.0, 5.1], "selection_layer", "k=10%,tau=0.3")
    late = rows(None, [3.0, 9.0, 16.0], "selection_layer", "k=10%,tau=0.3,first_layer=9")
    both_rules = table(usual, late)

    assert answer(both_rules, "S4", "noisier").verdict == HOLDS


def test_cost_is_decided_by_seconds_that_are_handed_in():
    """Seconds in proportion to the length, and a hundredth of the scores; and the contrary."""
    lengths = np.array([1000, 2000, 4000])
    noise = 1 + 0.001 * np.arange(9)[:, None]
    base = {"tova": 0 * lengths * noise, "random": 0 * lengths * noise}
    linear, square = lengths * noise, lengths**2 * noise
    for added, scoring, verdict in ((linear, 100 * linear, HOLDS), (square, linear, NOT)):
        taken = Seconds(lengths.tolist(), base | {"ams": added, "expected_attention": scoring})
        found = claims(table(rows("tova", [1.0])), taken)["AMS, arXiv 2605.23200"]

        assert [one.verdict for one in found if one.number == "Q13"] == [verdict] * 2


def test_a_claim_about_two_policies_is_about_their_paired_difference():
    """At each budget, on the prompts that both have."""
    base = np.arange(1.0, 10.0)
    found = table(
        rows("tova", base + np.resize([0.2, 0.3], 9), few=True),
        rows("ams", base[:2], few=True),
        rows("tova", base, budget=32, few=True),
        rows("ams", base + 0.1, budget=32, few=True),
    )
    one = answer(found, "Q8", "every scorer")

    assert list(one.means) == ["budget 32"]
    assert one.omitted == "1 cell left out: too few prompts"
    assert one.verdict == NOT
    assert one.means["budget 32"] == pytest.approx(-0.1 / (base.mean() + 0.05))
    assert one.tested == "output_error: tova minus ams"


def test_schedules_are_not_mixed():
    """Another schedule is another case, and none in common is no evidence."""
    more, less = [2.0, 2.1], [1.0, 1.1]
    apart = table(rows("tova", more), rows("ams", less, interval=32))
    one = answer(apart, "Q8", "every scorer")
    assert one.verdict == OPEN
    assert one.why.startswith("needs tova and ams with one schedule")
    two = table(
        *(
            rows(name, x, interval=n)
            for n in (16, 32)
            for name, x in (("tova", more), ("ams", less))
        )
    )
    assert list(answer(two, "Q8", "every scorer").means) == [
        "budget 64, after: every 16 rows",
        "budget 64, after: every 32 rows",
    ]


def test_expected_attention_is_tested_at_the_one_event_after_the_prompt():
    """Where there are results of it; otherwise the case says what they are of."""
    more, less = [2.0, 2.1], [1.0, 1.1]
    decode = (*rows("snapkv", less), *rows("expected_attention", more))
    both_kinds = table(decode, at_prompt("snapkv", more), at_prompt("expected_attention", less))

    assert list(answer(both_kinds, "E6", "snapkv").means) == ["budget 64, snapkv"]
    assert answer(both_kinds, "E6", "snapkv").verdict == HOLDS
    decoding = answer(table(decode), "E6", "snapkv").means
    assert list(decoding) == ["budget 64, snapkv, after: every 16 rows"]
    assert answer(table(decode), "E6", "snapkv").verdict == NOT


def test_an_interval_beyond_any_text_is_the_one_event():
    """As the command that a claim names asks for it, beside a policy whose own schedule it is."""
    found = table(
        at_prompt("tova", [2.0, 2.1], interval=1_000_000),
        at_prompt("expected_attention", [1.0, 1.1]),
        at_prompt("ams", [1.0, 1.1], interval=1_000_000),
    )

    assert list(answer(found, "E6", "tova").means) == ["budget 64, tova"]
    assert answer(found, "Q8", "every scorer").why.startswith("needs tova and ams")


def test_claims_about_decoding_leave_the_one_event_out():
    """Fusion of windows does nothing there."""
    there = [at_prompt(name, [1.0, 1.0]) for name in ("global_max", "global_mean")]
    one = answer(table(*there), "G9", "by mean")

    assert one.verdict == OPEN
    assert "--interval N --no-prefill" in one.why


def test_ablations_are_pairs_that_differ_in_one_parameter():
    """Whatever else the pair shares; a pair that differs in more is none."""
    small = {"window": 32, "credit_decay": 0.5}
    found = table(
        rows("ams", [1.0, 1.1]),
        rows("ams", [1.5, 1.6], params={"credit": False, "window": 32}),
        rows("ams", [2.0, 2.1], params={"weights": "length"} | small),
        rows("ams", [1.0, 1.1], params=small),
    )
    by_length = answer(found, "Q6", "by length")

    assert by_length.verdict == HOLDS
    assert list(by_length.means) == ["budget 64, ams (weights=length)"]
    credit = answer(found, "Q5", "raises the IoU")
    assert credit.verdict == OPEN
    assert "with one schedule and all else equal" in credit.why


def test_pairs_of_one_kind_are_told_apart():
    """By the parameters in which they differ from each other."""
    found = table(
        *(
            rows("ams", values, "boundary_shift", params={"credit": credit, "window": window})
            for window in (16, 32)
            for credit, values in ((False, [2.0, 2.1]), (True, [1.0, 1.1]))
        ),
    )

    assert list(answer(found, "Q5", "move less").means) == [
        "budget 64, window=16",
        "budget 64, window=32",
    ]


def test_sinks_and_recent_entries_are_those_of_ams():
    """Another number of protected entries would not say what the rest of AMS adds."""
    wrong = {"protect": {"sink": 4, "recent": 8, "prompt": False}}
    found = table(rows("tova", [2.0, 2.1]), rows("tova", [1.0, 1.1], params=wrong))
    missing = answer(found, "Q8", "Keeping sinks")
    ours = table(
        rows("tova", [2.0, 2.1]),
        rows("tova", [1.0, 1.1], params=wrong),
        rows("ams", [1.0, 1.1], params={"recent": 8}),
    )

    assert "--sink 4 --recent 32" in missing.why
    assert answer(ours, "Q8", "Keeping sinks").verdict == HOLDS


def test_more_policies_and_budgets_make_no_more_claims():
    """What a table has beside decides how many cells a sentence has."""
    few = table(rows("tova", [1.0]), rows("ams", [2.0]))
    pairs = [(name, f"ams+{name}") for name in ("knorm", "snapkv", "h2o")]
    names = ("tova", "ams", *(name for pair in pairs for name in pair))
    many = table(*(rows(name, [1.0], budget=budget) for name in names for budget in (32, 64)))

    assert [(paper, [(x.number, x.says) for x in of]) for paper, of in claims(few).items()] == [
        (paper, [(x.number, x.says) for x in of]) for paper, of in claims(many).items()
    ]


def test_scorers_and_named_policies_are_cells_of_one_sentence():
    """AMS around each policy that was replayed with and without it, budgets as shares too."""
    found = table(
        *(
            rows(name, [value, value + 0.1], budget=budget, share=share)
            for name, value in (("tova", 2.0), ("ams", 1.0), ("knorm", 3.0), ("ams+knorm", 1.0))
            for share, budget in (("50%", 900), (None, 1000), ("5%", 90))
        )
    )
    one = answer(found, "Q8", "every scorer")

    assert (one.where, one.verdict) == (ALL, HOLDS)
    assert list(one.means) == [
        f"budget {budget}, {name}" for name in ("tova", "knorm") for budget in ("5%", "50%", "1000")
    ]
    assert one.tested == "output_error: tova minus ams, and likewise knorm"
    assert list(answer(found, "Q10").means) == ["budget 5%", "budget 5% against 1000"]
    some = answer(table(at_prompt("tova", [2.0]), at_prompt("expected_attention", [1.0])), "E6")
    assert (some.verdict, some.omitted) == (HOLDS, "4 cells left out: not replayed")


def test_the_wipe_out_claim_is_over_the_whole_grid():
    """Every length and threshold is a cell, one against it is enough, and the last event counts."""
    grid = [
        row
        for variant, less in (("length=16,threshold=0", 0.1), ("length=32,threshold=0", 0.9))
        for name, value in (("tova", 0.5), ("ams", less))
        for event, share in ((100, 1.0 - value), (200, value))
        for row in rows(name, [share, share + 0.01], "wipeout", variant, event=event)
    ]
    nothing = [
        row
        for name in ("tova", "ams")
        for row in rows(name, [0.0, 0.0], "wipeout", "length=64,threshold=0", event=200)
    ]
    one = answer(table(grid, nothing), "Q1")

    assert one.means == {
        "budget 64, length=16,threshold=0": pytest.approx(0.4 / 0.305),
        "budget 64, length=32,threshold=0": pytest.approx(-0.4 / 0.705),
    }
    assert one.verdict == NOT


def test_a_difference_of_two_settings_matters_as_a_share_of_their_mean():
    """Half of few regions is much, whatever the unit."""
    few = {"tova": 0.004, "ams": 0.002}
    found = table(*(rows(name, [x, 1.1 * x], "wipeout") for name, x in few.items()))
    assert answer(found, "Q1").verdict == HOLDS
    near = {"tova": 1.0, "ams": 0.995}
    found = table(*(rows(name, [x, 1.1 * x], "wipeout") for name, x in near.items()))
    assert answer(found, "Q1").verdict == OPEN

    base = [*[1.0] * 6, *[100.0] * 6]  # the last six prompts have no value of the other window
    alike = table(rows("ams", base), rows("ams", [1.2] * 6, params={"window": 32}, few=True))
    one = answer(alike, "Q12")
    change = 0.2 / 1.1
    assert list(one.means.values()) == pytest.approx([0.05 - change, 0.05 + change])
    assert (one.n, one.verdict) == (6, NOT)


def test_a_smaller_loss_is_no_growing_lead():
    """AMS behind TOVA at every budget, least at the smallest."""
    found = table(
        *(
            rows(name, [value, value + 0.1], budget=budget)
            for budget, gap in ((32, 1.0), (64, 2.0))
            for name, value in (("tova", 3.0), ("ams", 3.0 + gap))
        )
    )

    assert answer(found, "Q10").verdict == NOT


@given(
    gaps=st.lists(st.floats(-3, 3), min_size=1, max_size=9),
    base=st.floats(-5, 5),
)
def test_only_paired_differences_count(gaps, base):
    """A verdict does not change when prompts get harder alike, and the opposite has its own."""
    tova = [base + 7.0 * i + gap for i, gap in enumerate(gaps)]
    ams = [base + 7.0 * i for i in range(len(gaps))]
    both_ways = (
        table(rows("tova", x, few=True), rows("ams", y, few=True))
        for x, y in ((tova, ams), (ams, tova))
    )
    there, back = (answer(one, "Q8", "every scorer") for one in both_ways)
    tova, ams = np.float64(tova), np.float64(ams)
    size = np.abs([tova, ams]).mean()

    assert list(there.means.values()) == pytest.approx([np.mean(gaps) / size] if size else [])
    assert {HOLDS: NOT, NOT: HOLDS, OPEN: OPEN}[there.verdict] == back.verdict
    if len(gaps) < 6:
        assert there.verdict == OPEN
    elif max(gaps) < 0:
        assert there.verdict != HOLDS


def test_a_policy_is_not_tested_at_a_budget_that_is_mostly_its_window():
    """The case is named with the reason, whatever its numbers, and the others decide."""
    parts = [
        [*rows(name, [value, value + 0.1], budget=budget, **params)]
        for name, params in (("tova", {}), ("ams", {"params": {"window": 128}}))
        for budget, value in ((128, 1.0 + (name == "ams")), (256, 2.0 - (name == "ams")))
    ]
    one = answer(table(*parts), "Q8", "every scorer")

    assert list(one.means) == ["budget 256"]
    assert one.verdict == HOLDS
    assert one.left_out == {"budget 128": "a window of more than half of the budget"}
    alone = answer(table(*parts[::2]), "Q8", "every scorer")
    assert alone.verdict == OPEN
    assert alone.why == "1 cell left out: a window of more than half of the budget"


@pytest.mark.parametrize(("filled", "verdict"), [(0.3, HOLDS), (0.8, OPEN)])
def test_mass_that_is_filled_in_decides_nothing(filled, verdict):
    """The share of the budget by mass is tested where most of that mass was measured."""
    share = rows("ams", [0.8, 0.81], "quota_share", "mass")
    one = answer(table(share, rows("ams", [filled], "suffix_mass")), "Q9", "of the budget")

    assert one.verdict == verdict
    assert ("mass that is mostly filled in" in one.why) == (verdict == OPEN)


def test_ams_around_tova_is_ams():
    """The long name says the same policy."""
    plain = rows("tova", [0.3, 0.4], "middle_coverage")
    made = rows("ams+tova", [0.5, 0.7], "middle_coverage")

    found = answer(table(plain, made), "Q3")

    assert list(found.cells) == ["budget 64"]
    assert found.verdict == HOLDS


@pytest.mark.parametrize(
    ("judged", "tested", "verdict"),
    [
        (("tova", "ams"), "response_kl: tova minus ams", NOT),
        (("tova",), "layer_error: tova minus ams", HOLDS),
        ((), "layer_error: tova minus ams", HOLDS),
    ],
)
def test_what_is_better_is_said_by_the_best_evidence_of_both(judged, tested, verdict):
    """By KL where the model judged both settings, else by their errors, which may differ."""
    errors = pair(("tova", {}), ("ams", {}), "layer_error")(+1)
    by_kl = pair(("tova", {}), ("ams", {}), "response_kl", fidelity="judged", layer=None)(-1)
    known = [row for row in by_kl if row["policy"] in judged]

    one = answer(table(errors, known), "Q8", "every scorer")

    assert (one.tested, one.verdict) == (tested, verdict)
