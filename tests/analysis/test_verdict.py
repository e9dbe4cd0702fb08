"""Verdicts: the sentences that open every comparison, against plain numpy and `compare`."""

import re

import numpy as np
import polars as pl
import pytest

from kvsim.analysis.comparison import compare
from kvsim.analysis.evidence import WORTH
from kvsim.analysis.verdict import answer, tabulated, verdicts
from kvsim.errors import PolicyError
from kvsim.schema import FIDELITY
from tests.analysis.test_comparison import table

RNG = np.random.default_rng(0)
JUDGE = "kvsim replay --judge ranks by the model's own predictions"
HARD = RNG.gamma(4, 0.1, 20)
VALUES = {
    "tova": HARD + 0.2,
    "h2o": HARD,
    "snapkv": HARD + RNG.normal(0.01, 0.05, 20),
    "knorm": HARD + 0.3,
    "keydiff": HARD,
    "full": HARD * 0,
}


def worth(metric):
    """What a verdict adds of its number, where no live run says it."""
    low, high = WORTH[metric]
    there = f"was {low:.2f} to {high:.2f} among 16 policies that only evict, on two models"
    return f" Its rank correlation with live KL at one budget {there}."


def test_a_verdict_names_the_best_and_what_it_is_better_than():
    """Beyond chance, undecided with the prompts that would decide, equal; no reference is named."""
    comparison, lines = answer(table(VALUES), ["output_error"])
    (verdict,), rows = verdicts(comparison), comparison.table
    (needed,) = rows.filter(policy="snapkv")["needed"]

    ranked = np.stack([values for name, values in VALUES.items() if name != "full"])
    assert verdict.mean == np.float64(ranked.mean(1).min())
    assert verdict.leads == (VALUES["h2o"] <= ranked.min(0)).sum()
    assert verdict.beaten == ("tova", "knorm")
    assert verdict.undecided == (("snapkv", needed),)
    assert {verdict.best, *verdict.equal} == {"h2o", "keydiff"}
    assert lines == [verdict.text, f"Ranked by output_error; {JUDGE}.{worth('output_error')}"]
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
    assert single[2].startswith("One prompt decides nothing; at least 9 can. Record more")
    assert "that takes at least 9 prompts" in answer(table(few), ["output_error"])[1][2]


def test_a_verdict_on_many_policies_names_the_next_in_rank():
    """The first three of more than six, and how many the others are."""
    many = {"h2o": HARD} | {f"tova (n={n})": HARD + 0.1 * n for n in range(9, 0, -1)}

    comparison, lines = answer(table(many), ["output_error"])
    (verdict,) = verdicts(comparison)

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
        "rounding": (
            {"tova": [1, 2], "h2o": [2, 1 + 1e-7]},
            "tova and h2o share .*, and no policy is better",
        ),
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

    lines = answer(both, ["output_error"])[1]
    assert lines[0].startswith("Budget 64: h2o has the lowest response_kl, 1 on this prompt")
    assert lines[0].endswith("; by output_error it is tova.")
    assert lines[1] == "Ranked by response_kl, measured in live runs."
    assert answer(both, ["output_error", "response_kl"])[0].metric == "response_kl"
    assert answer(error, ["output_error"]) == (None, [])
    assert compare(both).metric == "response_kl"
    with pytest.raises(PolicyError, match="no value of response_kl"):
        compare(error)
    assert compare(both, "output_error").table["policy"][0] == "tova"
    assert compare(error.with_columns(fidelity=pl.lit("open"))).metric == "output_error"


def judged(values):
    """A Table of judged divergences."""
    return table(values, "response_kl").with_columns(fidelity=pl.lit("judged", pl.Enum(FIDELITY)))


def test_policies_are_ranked_by_the_best_evidence_of_a_run():
    """Judged divergence, else the error of layers, else that of outputs, in Python and as shown."""
    output, layer = table({"tova": [0.1], "h2o": [0.2]}), table({"tova": [9.0], "h2o": [8.0]})
    both = pl.concat([output, layer.with_columns(metric=pl.lit("layer_error"))])
    kl = judged({"tova": [1.0], "h2o": [2.0]})

    for values, ranked, best in ((output, "output_error", "tova"), (both, "layer_error", "h2o")):
        comparison, lines = answer(values, ["wipeout", "output_error", "layer_error"])
        assert compare(values).metric == comparison.metric == ranked
        assert verdicts(comparison)[0].best == best
        assert lines[1] == f"Ranked by {ranked}; {JUDGE}.{worth(ranked)}"
    comparison, lines = answer(pl.concat([both, kl]), ["output_error"])
    assert compare(pl.concat([both, kl])).metric == comparison.metric == "response_kl"
    assert lines[1] == (
        "Ranked by response_kl of the model's predictions under the kept sets of the replay "
        f"(judged).{worth('response_kl')}"
    )
    said = answer(pl.concat([both, kl]), [], "layer_error")[1][1]
    assert said == f"Ranked by layer_error.{worth('layer_error')}"


def test_a_verdict_says_where_other_evidence_disagrees():
    """In a clause, by whom and for whom; a tie that has the winner agrees, other metrics do not."""
    kl = judged({"tova": [1.0, 3.0], "h2o": [2.0, 4.0], "ams": [5.0, 5.0]})
    layer = table({"tova": [3.0, 3.0], "h2o": [1.0, 1.0], "ams": [2.0, 2.0]}, "layer_error")
    output = table({"tova": [3.0, 3.0], "h2o": [1.0, 1.0], "ams": [1.0, 1.0]})
    mass = table({"tova": [0.1, 0.1], "h2o": [0.9, 0.9], "ams": [0.9, 0.9]}, "retained_mass")
    tied = table({"tova": [1.0, 1.0], "h2o": [1.0, 1.0], "ams": [2.0, 2.0]})

    def clause(*tables, metric=None):
        (verdict,) = verdicts(answer(pl.concat(tables), ["output_error"], metric)[0])
        return verdict.dissent

    assert clause(kl, layer, mass) == "by layer_error it is h2o"
    assert (
        clause(kl, layer, output) == "by layer_error it is h2o; by output_error it is h2o and ams"
    )
    assert clause(kl, tied, mass) == ""
    assert clause(kl, layer, mass, metric="retained_mass") == ""
    assert clause(kl, layer.filter(pl.col("policy") != "ams")) == ""  # not of all that are ranked
    text = answer(pl.concat([kl, layer]), [])[1][0]
    assert "and leads on 2 of 2 prompts; by layer_error it is h2o. Not decided" in text


def test_a_policy_without_the_evidence_is_named():
    """It has no rank, and the sentence on the number says so; a reference need not have one."""
    kl = judged({"tova": [1.0], "h2o": [2.0]})
    output = table({"tova": [1.0], "h2o": [2.0], "ams": [0.5], "full": [0.0]})

    comparison, lines = answer(pl.concat([kl, output]), ["output_error"])

    assert comparison.unranked == ("ams",)
    assert "(judged); ams without a value of it." in lines[1]


def test_a_verdict_is_a_small_table():
    """Of the first six of each budget, with what is decided and how many prompts would decide."""
    comparison, (text, *_) = answer(table(VALUES), ["output_error"])
    (verdict,) = verdicts(comparison)

    note, rows = tabulated(comparison)

    assert note == f"Ranked by output_error; {JUDGE}.{worth('output_error')}"
    assert [row[:3] for row in rows[:2]] == [["64", "1", name] for name in ("h2o", "keydiff")]
    assert [row[5] for row in rows] == ["tied", "tied", "not decided", *["beyond chance"] * 2]
    assert [row[6] for row in rows] == ["", "", f"{verdict.undecided[0][1]:,}", "", ""]
    assert f"{rows[0][3]} [{rows[0][4].replace(' to ', ', ')}]" in text
    many = {"h2o": HARD} | {f"tova (n={n})": HARD + 0.1 * n for n in range(9, 0, -1)}
    note, rows = tabulated(answer(table(many), ["output_error"])[0])
    assert [row[2] for row in rows] == ["h2o", *(f"tova (n={n})" for n in range(1, 6))]
    assert note.endswith("The first 6 of each budget.")


def test_budgets_are_in_the_order_of_the_table():
    """As they were requested, whatever the number of entries; in sentences and in the table."""
    values = {"tova": [0.1], "h2o": [0.2]}
    parts = [table(values), table(values, budget=48, share="25%"), table(values, budget=96)]

    comparison, lines = answer(pl.concat(parts), ["output_error"])

    budgets = ["64", "25%", "96"]
    assert [line.split()[1].rstrip(":") for line in lines[:3]] == budgets
    assert [x.requested for x in verdicts(comparison)] == budgets
    assert [row[0] for row in tabulated(comparison)[1]] == [x for x in budgets for _ in values]


def test_there_is_no_verdict_on_several_models():
    """A line says why, and what to do."""
    models = table(VALUES).with_columns(model=pl.col("trace").str.slice(0, 2))

    comparison, (line,) = answer(models, ["output_error"])

    assert comparison is None
    assert line.startswith("No verdict: traces of several models: t0 (t0), t1 (t1, t10")


def test_there_is_no_verdict_without_two_policies():
    """Nor without a metric that has a better direction, or a prompt that all have values of."""
    alone = {"tova": VALUES["tova"], "full": VALUES["full"]}
    apart = pl.concat([table({"tova": [1.0]}, traces=["a"]), table({"h2o": [1.0]}, traces=["b"])])

    assert answer(table(alone), ["output_error"]) == (None, [])
    assert answer(apart, ["output_error"]) == (None, [])
    assert answer(table(VALUES, "entries_seen"), ["entries_seen"]) == (None, [])


def test_a_verdict_against_a_named_policy_is_about_that_one():
    """The best is compared with the named policy alone, which may be the best itself."""
    (other,) = verdicts(compare(table(VALUES), against="tova"))
    (itself,) = verdicts(compare(table(VALUES), against="h2o"))

    assert (other.beaten, other.undecided) == (("tova",), ())
    if itself.best == "h2o":
        assert itself.beaten == ("tova", "knorm")
    else:  # keydiff has the same values
        assert itself.equal == ("h2o",)
