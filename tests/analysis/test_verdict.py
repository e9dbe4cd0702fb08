"""Verdicts: the sentences that open every comparison, against plain numpy and `compare`."""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from kvsim.analysis.comparison import compare
from kvsim.analysis.verdict import answer, verdicts
from tests.analysis.test_comparison import table

RNG = np.random.default_rng(0)
HARD = RNG.gamma(4, 0.1, 20)
VALUES = {
    "tova": HARD + 0.2,
    "h2o": HARD,
    "snapkv": HARD + RNG.normal(0.01, 0.05, 20),
    "knorm": HARD + 0.3,
    "keydiff": HARD,
    "full": HARD * 0,
}


def test_a_verdict_names_the_best_and_what_it_is_better_than():
    """Beyond chance, undecided with the prompts that would decide, equal; no reference is named."""
    (verdict,), lines = answer(table(VALUES), ["output_error"])
    rows = compare(table(VALUES)).table
    (needed,) = rows.filter(policy="snapkv")["needed"]

    ranked = np.stack([values for name, values in VALUES.items() if name != "full"])
    assert verdict.mean == np.float64(ranked.mean(1).min())
    assert verdict.leads == (VALUES["h2o"] <= ranked.min(0)).sum()
    assert verdict.beaten == ("tova", "knorm")
    assert verdict.undecided == (("snapkv", needed),)
    assert {verdict.best, *verdict.equal} == {"h2o", "keydiff"}
    assert lines == [verdict.text]
    assert verdict.text == (
        f"Budget 64: {verdict.best} and {verdict.equal[0]} share the lowest output_error, "
        f"{verdict.mean:.3g} [{verdict.low:.3g}, {verdict.high:.3g}], and no policy is better on "
        f"{verdict.leads} of 20 prompts. "
        f"Beyond chance better than tova and knorm; not decided against snapkv (about {needed:,} "
        f"prompts would decide); equal to {verdict.equal[0]}."
    )


def test_a_verdict_says_what_is_lacking():
    """Of one prompt and of few; and that a winner whose rows see more entries wins unfairly."""
    one = {name: values[:1] for name, values in VALUES.items()}
    few = {name: values[:4] for name, values in VALUES.items()}
    best = min(set(one) - {"full"}, key=lambda name: one[name][0])
    seen = table({name: [90.0 if name == best else 60.0] for name in one}, "entries_seen")

    single = answer(pl.concat([table(one), seen]), ["output_error"])[1]

    assert single[0].startswith(f"Budget 64: {best} has the lowest output_error")
    second = sorted(one.keys() - {"full"}, key=lambda name: (one[name][0], [*one].index(name)))[1]
    assert f"on this prompt; the next is {second}. But its rows see more entries (90)" in single[0]
    assert single[0].endswith("than under other policies, so this is no fair comparison.")
    assert single[1].startswith("One prompt decides nothing; at least 9 can. Record more")
    assert "that takes at least 9 prompts" in answer(table(few), ["output_error"])[1][1]


def test_a_verdict_on_many_policies_names_the_next_in_rank():
    """The first three of more than six, and how many the others are."""
    many = {"h2o": HARD} | {f"tova (n={n})": HARD + 0.1 * n for n in range(9, 0, -1)}

    (verdict,), lines = answer(table(many), ["output_error"])

    assert verdict.second == "tova (n=1)"
    assert lines[0].endswith(
        "Beyond chance better than tova (n=1), tova (n=2), tova (n=3) and 6 others."
    )


def test_a_tie_is_no_lead():
    """Of means, of one prompt, or of some prompts; without a tie the best one leads."""
    cases = {
        "tova leads": ({"tova": [1, 2], "h2o": [2, 3]}, "tova has .*, and leads on 2 of 2 prompts"),
        "a prompt": ({"tova": [1, 2], "h2o": [1, 3]}, "tova has .*, and no policy is better on 2 "),
        "means": (
            {"tova": [1, 2], "h2o": [2, 1]},
            "tova and h2o share .*, and no policy is better",
        ),
        "one": ({"tova": [1], "h2o": [1], "ams": [2]}, "and h2o share .* prompt; the next is ams"),
        "all": (
            {"tova": [1], "h2o": [1]},
            r"tova and h2o share the lowest \S+ 1 on this prompt\.$",
        ),
    }
    for values, sentence in cases.values():
        assert re.search(sentence, answer(table(values), ["output_error"])[1][0])


def test_live_runs_are_ranked_by_what_the_model_did():
    """By the divergence, which output errors of layers may contradict, or by no metric at all."""
    error = table({"tova": [0.1], "h2o": [0.2]}, fidelity="closed")
    kl = table({"tova": [2.0], "h2o": [1.0]}, "response_kl", fidelity="closed")
    both = pl.concat([error, kl])

    assert answer(both, ["output_error"])[0][0].best == "h2o"
    assert answer(both, ["output_error", "response_kl"])[0][0].metric == "response_kl"
    assert answer(error, ["output_error"]) == ([], [])
    assert compare(both).metric == "response_kl"
    assert compare(both, "output_error").table["policy"][0] == "tova"
    assert compare(error.with_columns(fidelity=pl.lit("open"))).metric == "output_error"


def test_there_is_no_verdict_on_several_models():
    """A line says why, and what to do."""
    models = table(VALUES).with_columns(model=pl.col("trace").str.slice(0, 2))

    each, (line,) = answer(models, ["output_error"])

    assert each == []
    assert line.startswith("No verdict: traces of several models: t0 (t0), t1 (t1, t10")


def test_there_is_no_verdict_without_two_policies():
    """Nor without a metric that has a better direction, or a prompt that all have values of."""
    alone = {"tova": VALUES["tova"], "full": VALUES["full"]}
    apart = pl.concat([table({"tova": [1.0]}, traces=["a"]), table({"h2o": [1.0]}, traces=["b"])])

    assert answer(table(alone), ["output_error"]) == ([], [])
    assert answer(apart, ["output_error"]) == ([], [])
    assert answer(table(VALUES, "entries_seen"), ["entries_seen"]) == ([], [])


def test_a_verdict_against_a_named_policy_is_about_that_one():
    """The best is compared with the named policy alone, which may be the best itself."""
    (other,) = verdicts(compare(table(VALUES), against="tova"))
    (itself,) = verdicts(compare(table(VALUES), against="h2o"))

    assert (other.beaten, other.undecided) == (("tova",), ())
    if itself.best == "h2o":
        assert itself.beaten == ("tova", "knorm")
    else:  # keydiff has the same values
        assert itself.equal == ("h2o",)
