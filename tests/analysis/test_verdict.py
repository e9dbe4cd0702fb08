"""Verdicts: the sentences that open every comparison, of values whose verdict is known."""

import numpy as np
import polars as pl
import pytest

from kvsim.analysis.comparison import compare
from kvsim.analysis.evidence import ANSWERS, WORTH
from kvsim.analysis.sentences import FEW, answer, tabulated
from kvsim.schema import FIDELITY
from tests.analysis.test_comparison import table

RNG = np.random.default_rng(0)
JUDGE = "kvsim replay --judge ranks by the model's own predictions"
HARD = RNG.gamma(9, 0.1, 24)
NOISE = RNG.normal(0, 0.05, (4, 24))
VALUES = {
    "tova": HARD + 0.2,
    "h2o": HARD,
    "snapkv": HARD + 0.005 + NOISE[0],
    "knorm": HARD + 0.3,
    "full": HARD * 0,
}


def worth(metric):
    """What a verdict adds of its number, where no live run says it."""
    low, high = WORTH[metric]
    return (
        " Among 16 evictions on two models its ranking at one budget correlated with the "
        f"ranking by live KL at {low:.2f} to {high:.2f}."
    )


KL = (
    " KL does not count answers: rankings by KL and by wrong answers correlated at "
    f"{ANSWERS[0]:.2f} to {ANSWERS[1]:.2f} in four cases."
)


def first(values, n=24, **more):
    """The first line of a verdict on the first n prompts."""
    return answer(table({name: x[:n] for name, x in values.items()}, **more), ["output_error"])[1][
        0
    ]


def bound(x, y):
    """The most by which the mean of x exceeds that of y, in percent, by a search over shares."""
    shares = np.linspace(0, 3, 30_001)
    gaps = x[:, None] - (1 + shares) * y[:, None]
    t = gaps.mean(0) / (gaps.std(0, ddof=1) / len(x) ** 0.5)
    return int(np.ceil(100 * shares[np.flatnonzero(t >= -1.7139).max()] - 0.01))


def test_a_verdict_names_the_policies_that_could_be_the_best():
    """One, some, most or all of them, with a bound and the prompts that would tell them apart."""
    only = {name: VALUES[name] for name in ("h2o", "tova", "knorm")}
    by = "by output_error (95 %, 24 prompts)"
    assert first(only) == (
        f"Budget 64: h2o is the best of 3 policies {by}. The next, tova, is at most "
        f"{bound(VALUES['tova'], HARD)} % worse."
    )
    lines = answer(table(VALUES), ["output_error"])[1]
    assert lines[0].startswith(
        f"Budget 64: h2o or snapkv is the best of 4 policies {by}; the other 2 are not. h2o and "
        "snapkv are within 10 % of the best. About "
    )
    assert lines[0].endswith(" would tell them apart.")
    assert lines[1] == f"Ranked by output_error; {JUDGE}.{worth('output_error')}"
    many = {f"tova (n={n})": HARD + RNG.normal(0, 0.1, 24) for n in range(8)}
    text = first(many | {"knorm": HARD + 2})
    assert text.startswith(f"Budget 64: 8 of 9 policies could be the best {by}: tova (n=")
    assert " and 5 others. tova (n=" in text
    assert text.endswith(" are within 10 % of the best.")
    assert first(many, 8).startswith(
        "Budget 64: no policy is excluded by output_error (95 %, 8 prompts); all 8 could be the "
        "best. This does not show that they are equal. "
    )
    assert first(many, 8).endswith(" 8 prompts are coarse; record 12.")


def test_policies_of_equal_values_are_one():
    """They are called equal, all in the set or none; equal means alone are a tie."""
    same = VALUES | {"keydiff": HARD * (1 + 1e-8)}
    del same["snapkv"]
    assert "h2o and keydiff, equal on every prompt, are the best of 4 policies" in first(same)
    tied = {"tova": [1, 2], "h2o": [2, 1]}
    assert (
        "tova and h2o share the lowest mean output_error, 1.5, and no policy is better on 1 of 2"
        in (first(tied))
    )


def test_few_prompts_are_described():
    """What they show, and that it says nothing of others; of one prompt the next policy."""
    lines = answer(table({"tova": [1, 2, 9], "h2o": [2, 3, 1]}), ["output_error"])[1]
    assert (
        lines[0]
        == "Budget 64: h2o has the lowest mean output_error, 2, and leads on 1 of 3 prompts."
    )
    assert lines[1].endswith(f" {FEW}.")
    assert first({"tova": [1.0], "h2o": [2.0]}) == (
        "Budget 64: tova has the lowest mean output_error, 1, on this prompt; the next is h2o."
    )
    assert first({"tova": [1.0], "h2o": [1.0]}) == (
        "Budget 64: tova and h2o share the lowest mean output_error, 1, on this prompt."
    )


def tasks(values, labels):
    """A Table of values of prompts with a task each."""
    of = {f"t{place}": label for place, label in enumerate(labels)}
    task = pl.col("trace").replace_strict(of, return_dtype=pl.String)
    return table(values).with_columns(task=task)


@pytest.mark.parametrize("each", [3, 6, 12])
def test_tasks_come_first_where_the_order_depends_on_them(each):
    """Each with its own set; the average over tasks counts each task the same."""
    labels = [name for name in ("chat", "code", "needle", "text") for _ in range(each)]
    hard = np.exp(RNG.normal(0, 0.5, len(labels)))
    values = {name: hard * np.exp(RNG.normal(0, 0.1, len(labels))) for name in ("tova", "h2o", "x")}
    values["x"] *= 3
    values["h2o"][: 2 * each] *= 2
    values["tova"][2 * each :] *= 2
    values["tova"] *= 0.8
    text = answer(tasks(values, labels), ["output_error"])[1][0]

    assert text.startswith("Budget 64: the order depends on the task (p = 0.00")
    few = ". First on too few prompts to tell: chat tova (3), code tova (3), needle h2o (3), text"
    assert (few in text) == (each < 6)
    assert (". chat: tova" in text) == (each >= 6)
    assert ". On average over tasks: tova" in text
    shown = "No policy is the best in all tasks." in text
    open_ = "That no policy is the best in all tasks takes 12 prompts of each to show."
    assert shown or text.endswith(open_)
    assert shown or each < 12
    labels[-1] = None  # a task of one prompt, or none, is "other"
    assert ". other: " not in answer(tasks(values, labels), ["output_error"])[1][0]


def test_a_prompt_whose_turns_are_of_several_tasks_is_one_prompt():
    """It is of none of them; the others keep theirs."""
    values = {"tova": HARD * 1.3, "h2o": HARD}
    turns = [tasks(values, [name] * 24).with_columns(turn=i) for i, name in enumerate("ab", 1)]
    mixed = pl.concat([turns[0], turns[1].filter(pl.col("trace").is_in(["t0", "t1"]))])

    comparison = compare(mixed)

    rows = comparison.table.filter(policy="h2o").select("task", "n", "mean").rows()
    a, other = HARD[2:].mean(), HARD[:2].mean()
    expected = [(None, 24, (a + other) / 2), ("a", 22, a), ("other", 2, other)]
    assert rows == [(*row[:2], pytest.approx(row[2])) for row in expected]


def test_the_average_comes_first_where_no_order_is_shown():
    """Tasks are not said to agree; a mean over tasks of unequal size counts each the same."""
    labels = ["chat"] * 18 + ["code"] * 6
    values = {"tova": HARD * 1.3, "h2o": HARD}
    comparison, lines = answer(tasks(values, labels), ["output_error"])

    assert lines[0].startswith("Budget 64: h2o is the best of 2 policies")
    assert lines[0].endswith(" That the order depends on the task is not shown (p = 1).")
    assert comparison.overall["mean"][0] == pytest.approx((HARD[:18].mean() + HARD[18:].mean()) / 2)
    rows = comparison.table.filter(task="code")
    assert rows["mean"].to_list() == pytest.approx([HARD[18:].mean(), 1.3 * HARD[18:].mean()])
    assert rows["n"].to_list() == [6, 6]
    full = {"full": HARD * 2}
    both = compare(tasks(values | full, labels), against="h2o").overall
    h2o, tova, reference = both.sort("policy").select(pl.all().sort_by("mean")).to_dicts()
    assert tova["difference"] == pytest.approx(tova["mean"] - h2o["mean"])
    assert reference["mean"] == pytest.approx(2 * h2o["mean"])  # the same mean, of references too


def test_a_larger_budget_that_is_worse_is_said():
    """On the same prompts, with both means; a better one is not."""
    parts = [table({"tova": [x], "h2o": [0.5 - x]}, budget=b) for x, b in ((0.1, 64), (0.2, 128))]

    lines = answer(pl.concat(parts), ["output_error"])[1]

    assert lines[2] == "Worse with more entries on these prompts: tova (0.1 at 64, 0.2 at 128)."


def test_budgets_without_a_value_of_what_ranks_are_named():
    """Of a run that measured less than another one."""
    more = table({"tova": [1.0], "h2o": [2.0]}, "layer_error")
    less = table({"tova": [1.0], "h2o": [2.0]}, budget=128)

    comparison, _ = answer(pl.concat([more, less]), ["output_error"], "layer_error")

    assert "1 budget without a value of layer_error: 128" in comparison.remarks


def judged(values, **more):
    """A Table of judged divergences."""
    judged = pl.lit("judged", pl.Enum(FIDELITY))
    return table(values, "response_kl", **more).with_columns(fidelity=judged)


def test_policies_are_ranked_by_the_best_evidence_of_a_run():
    """Judged divergence, else the error of layers, else that of outputs, in Python and as shown."""
    output, layer = table({"tova": [0.1], "h2o": [0.2]}), table({"tova": [9.0], "h2o": [8.0]})
    both = pl.concat([output, layer.with_columns(metric=pl.lit("layer_error"))])
    kl = judged({"tova": [1.0], "h2o": [2.0]})

    for values, ranked, best in ((output, "output_error", "tova"), (both, "layer_error", "h2o")):
        comparison, lines = answer(values, ["wipeout", "output_error", "layer_error"])
        assert compare(values).metric == comparison.metric == ranked
        assert comparison.verdicts[0].first == [best]
        assert lines[1].startswith(f"Ranked by {ranked}; {JUDGE}.{worth(ranked)}")
    comparison, lines = answer(pl.concat([both, kl]), ["output_error"])
    assert compare(pl.concat([both, kl])).metric == comparison.metric == "response_kl"
    assert lines[1].startswith(
        "Ranked by response_kl of the replay's kept sets, judged by the model."
        f"{worth('response_kl')}{KL}"
    )


def test_a_verdict_is_a_small_table():
    """Of every policy and budget: the mean, whether it could be the best, by how much it is not."""
    comparison, _ = answer(table(VALUES), ["output_error"])

    headers, rows = tabulated(comparison)

    assert headers == ["budget", "policy", "output_error", "could be best", "worse by at most"]
    assert [row[1] for row in rows] == ["h2o", "snapkv", "tova", "knorm", "full"]
    assert [row[3] for row in rows] == ["yes", "yes", "no", "no", "reference"]
    assert rows[2][4] == f"{bound(VALUES['tova'], HARD)} %"
    assert (
        rows[0][2] == f"{HARD.mean():.3g} [{', '.join(rows[0][2][:-1].split('[')[1].split(', '))}]"
    )
