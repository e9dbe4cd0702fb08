"""docs/results.py makes the results page, and the page in the repository is of this catalogue."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

import kvsim
import results
import results_page.claims
from kvsim import policy
from kvsim.analysis.summaries import per_prompt
from kvsim.core.policy import Schedule
from kvsim.policies import CATALOGUE, names
from kvsim.recorder import load_model
from kvsim.studies.claims import CLAIMS
from kvsim.studies.claims.claim import OPEN, Claim
from results_page import tables as measuring
from results_page.answers import pairs
from results_page.best import sentence
from results_page.claims import claims_page, differing
from results_page.plan import FULL, PLANS, SMALLEST
from results_page.policies import CROSSES, PAPER, RELEASE
from results_page.statistics import read_values, stored_rows
from results_page.tables import measure_prompt
from results_page.traces import ANSWER, ANSWERS, SHEET, record, samples

pytestmark = pytest.mark.deep


def smallest(model, folder):
    """Write the smallest page of a model into a folder."""
    places = f"--out={folder / 'page.md'}", f"--traces={folder / 'traces'}"
    results.main([f"--model={model}", "--smallest", "--jobs=1", *places])
    return folder / "page.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What `--smallest` writes."""
    return smallest("tiny", tmp_path_factory.mktemp("results"))


def tables(text):
    """The rows of each table of a page, as lists of cells without marks, by the heading above."""
    found, heading = {}, ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            cells = [re.sub("[†‡]", "", cell.strip()) for cell in line.strip("|").split("|")]
            found.setdefault(heading, []).append(cells)
    return {heading: [rows[0], *rows[2:]] for heading, rows in found.items()}


def number(cell):
    """The mean in front of an interval."""
    return float(cell.partition(" ")[0])


def test_the_page_has_its_parts(page):
    """Its tables, claims per paper on a page of their own, and figures of modest size."""
    text = page.read_text("utf-8")
    found = tables(text)

    assert list(found) == [
        "Which policy is best",
        "What policies keep and lose",
        "Parameters made smaller",
        "By stage, domain and task",
        "Layer-wise token pruning",
    ]
    claims = tables(page.with_name("claims.md").read_text("utf-8"))
    assert list(claims) == ["Claims of the papers", *CLAIMS]
    each = (*found.values(), *claims.values())
    assert all(len(row) == len(rows[0]) for rows in each for row in rows)
    assert 5_000 < (page.parent / "figures" / "page.png").stat().st_size < 100_000
    for name in ("page.png", "page-ranking.png"):
        assert f"](figures/{name})" in text
        assert (page.parent / "figures" / name).read_bytes().startswith(b"\x89PNG")
    assert "python docs/results.py --smallest\n" in text


@pytest.mark.parametrize("name", results.WHOLE)
def test_a_page_opens_with_the_ranking_of_its_tables(name):
    """Defaults that no budget frees and that know nothing more, by the KL of the table."""
    text = results.PAGES[name].read_text("utf-8")
    found = tables(text)
    first, *ranked = zip(*found["Which policy is best"], strict=True)
    head, *every = found["What policies keep and lose"]
    columns = [number for number, title in enumerate(head) if title.startswith("KL ")]
    opening = text.partition("| rank |")[0]

    assert next(iter(found)) == "Which policy is best"
    assert "| `triattention`† |" in text
    assert "| `kvzip`‡ |" in text
    assert re.search(r"`(\w+\+)?(triattention|qfilter|kvzip)`(?![†‡]) [|\d]", text) is None
    assert [f"* Budget {n}: " in opening for n in PLANS[name].budgets] == [True] * len(columns)
    assert first[1:] == tuple(map(str, range(1, 6)))
    for (title, *places), column in zip(ranked, columns, strict=True):
        assert head[column] == title.replace("budget", "KL")
        kl = {row[0]: number(row[column]) for row in every if row[column]}
        out = r"`(full|oracle|rpc|kvzip|kvcompose|[^`]*@)|.*(,|qfilter|triattention)"
        candidates = sorted(kl[each] for each in kl if not re.match(out, each))
        assert [number(place.split("` ")[1]) for place in places] == candidates[:5]


def test_the_set_of_the_best_is_that_of_each_task_where_tasks_matter():
    """One winner of a task is not the best of another; few prompts decide nothing."""
    noise = np.random.default_rng(0).uniform(0.9, 1.1, (24, 3))
    kinds = np.repeat(["a", "b"], 12)
    swapped = noise * np.where(kinds[:, None] == "a", [1, 3, 9], [3, 1, 9])

    same = sentence(64, ["x", "y", "z"], noise * [1, 2, 9], kinds)
    assert same.startswith(
        "Budget 64: x is the best of 3 policies by response_kl (95 %, 24 prompts)"
    )
    assert ". The next, y, is at most 1" in same
    assert "That the order depends on the task is not shown" in same
    text = sentence(64, ["x", "y", "z"], swapped, kinds)
    assert (
        ". a: x. b: y. On average over tasks: x or y. No policy is the best in all tasks." in text
    )
    few = sentence(64, ["x", "y", "z"], swapped[:5], kinds[:5])
    assert few.startswith("Budget 64: x has the lowest mean response_kl, ")
    assert few.endswith("and leads on 5 of 5 prompts.")


def test_every_policy_has_a_row_that_makes_sense(page):
    """All scorers, AMS and crosses have one; `full` loses nothing, no regret is below 0."""
    found = tables(page.read_text("utf-8"))
    crossed = ("global", "criticalkv", "adakv", "chunkkv", "union", "paged", "dms")
    across = [name for name, entry in CATALOGUE.items() if entry.kind == "propagation"]
    alone = [name for name in names() if name.partition("@")[0] not in (*crossed, *across)]
    assert set(across) <= {row[0].replace("`", "") for row in found["Layer-wise token pruning"][1:]}
    head, *rows = found["What policies keep and lose"]
    labels = [row[0].partition(" (")[0].replace("`", "") for row in rows]
    by_label = {
        label: dict(zip(head, row, strict=True)) for label, row in zip(labels, rows, strict=True)
    }
    missing = {*alone, *CROSSES} - set(by_label)
    ranking = head.index(f"KL {SMALLEST['tiny'].budget}")
    kl = [number(row[ranking]) for row in rows if row[ranking]]  # keys at slots are not judged
    free = {label for label, row in zip(labels, rows, strict=True) if "(no budget binds" in row[0]}

    assert missing == set()
    assert kl == sorted(kl)
    assert number(by_label["full"][head[ranking]]) == number(by_label["full"]["output error"]) == 0
    assert number(by_label["full"]["retained mass"]) == 1
    assert all(0 <= number(row["retained mass"]) <= 1 for row in by_label.values())
    evicting = [row for label, row in by_label.items() if label != "full"]
    assert all(0 <= number(row["wipe-out 32"]) <= 1 for row in evicting)
    assert not by_label["full"]["wipe-out 32"]  # there is no event to look at
    regrets = {label: row["regret"] for label, row in by_label.items()}
    assert {label for label, cell in regrets.items() if not cell} == {"full", "rpc"}
    assert min(number(cell) for cell in regrets.values() if cell) >= 0
    assert number(regrets["oracle"]) < number(regrets["tova"]) < number(regrets["random"])
    assert {"full", "rpc"} <= free
    assert {PAPER, RELEASE} <= set(labels)
    other = {label for label, row in zip(labels, rows, strict=True) if " entries)" in row[0]}
    assert "full" in other
    assert not {"tova", "knorm", "gkv", "h2o"} & other


def test_claims_of_two_prompts_are_not_decided(page):
    """A claim without a test lacks prompts, or what else it needs."""
    found = tables(page.with_name("claims.md").read_text("utf-8"))
    for paper in CLAIMS:
        for number, says, _, test, result in found[paper][1:]:
            if number == "Q13":  # of repetitions, which are more
                continue
            if result == "not tested":
                lacking = ("yet", "three layers", "norms", "two budgets", "two numbers", "prompts")
                assert any(x in test for x in lacking), says
                continue
            assert re.match(rf"\*\*{OPEN}\*\*; n=[12],|not tested; .* left out", result), says
    for paper, letter, count in (
        ("AMS, arXiv 2605.23200", "Q", 13),
        ("G-KV, arXiv 2512.00504", "G", 14),
    ):
        numbers = {row[0] for row in found[paper][1:]} - {""}
        assert numbers == {f"{letter}{i}" for i in range(1, count + 1)}


def test_only_what_is_missing_is_measured(page, tmp_path, monkeypatch):
    """A policy that is new or has other parameters; the rows of all others are those of before."""
    plan, folder, replayed = SMALLEST["tiny"], page.parent / "traces", []
    (calibration,) = record(plan, folder, [0])
    policies, replay_all = measuring.table_policies, measuring.replay_all
    changes = {"new": replace(policy("tova"), name="new"), "h2o": policy("h2o", recent=3)}

    def noted(traces, policies, *budgets, **options):
        replayed.append([each.name for each in policies])
        return replay_all(traces, policies, *budgets, **options)

    monkeypatch.setattr(measuring, "replay_all", noted)
    values = page.with_suffix(".parquet")
    before = measure_prompt(1, plan, folder, calibration, tmp_path / "none.parquet")
    kept = measure_prompt(1, plan, tmp_path / "nothing", calibration, values)
    assert set(kept["piece"]) == set(before["piece"])
    assert replayed == []
    monkeypatch.setattr(measuring, "table_policies", lambda *given: policies(*given) | changes)
    after = measure_prompt(1, plan, folder, calibration, tmp_path / "none.parquet")
    assert replayed == [["h2o", "new"]]
    unchanged = [each.filter(~pl.col("policy").is_in([*changes])) for each in (before, after)]
    assert unchanged[0].equals(unchanged[1])
    assert set(after.filter(policy="new")["metric"]) > {"response_kl", "output_error", "regret"}
    errors = [each.filter(policy="h2o", metric="output_error") for each in (before, after)]
    assert not errors[0]["value"].equals(errors[1]["value"])


def test_the_file_of_values_has_those_of_every_prompt(page):
    """Means over layers, or their sum, as of what was measured layer by layer."""
    plan, folder = SMALLEST["tiny"], page.parent / "traces"
    (calibration,) = record(plan, folder, [0])
    values = read_values(page.with_suffix(".parquet"), plan)
    for number in (1, 2):
        rows = measure_prompt(number, plan, folder, calibration, folder / "none.parquet")
        measured = per_prompt(rows.filter(policy="tova", budget=32, prefill=False))
        for metric, variant in (("layer_error", ""), ("wipeout", "length=32,threshold=0")):
            (expected,) = measured.filter(
                metric=metric, variant=variant, params=measured["params"][0]
            )["value"]
            found = values.of("tova", 32, metric, variant)[number - 1]
            assert found == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """What `--model 8k --smallest` writes, of tiny."""
    return smallest("8k", tmp_path_factory.mktemp("long"))


@pytest.mark.deep
def test_a_page_of_long_prompts_has_its_parts(long):
    """Its policies by KL, the correlation with shorter prompts, time and memory, and one figure."""
    text, plan = long.read_text("utf-8"), SMALLEST["8k"]
    found = tables(text)
    head, *rows = found["Which policy is best"]
    kl = [number(row[head.index(f"KL {plan.budget}")]) for row in rows]
    stages = {row[0]: [float(x) for x in row[1:]] for row in found["Time and memory"][1:]}

    assert {row[0].strip("`") for row in rows} == set(plan.only)
    assert rows[0][0] == "`full`"
    assert kl == sorted(kl)
    assert kl[0] == 0 < kl[1]
    correlations = found["Do shorter prompts predict the ranking?"]
    assert [row[0] for row in correlations[1:]] == [f"budget {n}" for n in FULL.budgets]
    assert all(-1 <= number(cell) <= 1 for row in correlations[1:] for cell in row[1:])
    assert [*stages] == ["capture", "replay", "judge"]
    assert all(peak >= before > 0 for *_, before, peak in stages.values())
    assert text.count(f"\n{plan.prompts} prompts of ") == 1
    assert [file.name for file in (long.parent / "figures").iterdir()] == ["page.png"]
    assert not long.with_name("claims.md").exists()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What `--model qwen-1.5b --smallest` writes, of tiny."""
    return smallest("qwen-1.5b", tmp_path_factory.mktemp("answers"))


@pytest.mark.deep
def test_a_page_of_answers_has_its_parts(answers):
    """Events go on during the answer; other results predict the ranking; claims are tested."""
    text, plan = answers.read_text("utf-8"), SMALLEST["qwen-1.5b"]
    head, *rows = tables(text)["Which policy is best"]
    kl = [number(row[head.index(f"KL {plan.budget}")]) for row in rows]
    assert {row[0].strip("`") for row in rows} == set(plan.only)
    assert kl == sorted(kl)
    assert kl[0] == 0 < kl[1]
    assert f"after each {plan.interval} rows of the answer" in text
    assert f"python docs/results.py{plan.option}\n" in text
    for other in results.WHOLE:
        assert f"]({PLANS[other].page}):" in text
    values = stored_rows(answers.with_suffix(".parquet"))
    assert values.filter(policy="snapkv")["interval"].unique().to_list() == [plan.interval]
    claims = answers.with_name("claims.md").read_text("utf-8")
    assert f"{plan.prompts} prompts of [{plan.name}]({plan.page})" in claims
    assert {"window_overlap", "rank_variance"} <= set(values["metric"])


@pytest.mark.deep
def test_values_of_another_model_are_on_the_page_of_its_answers(answers, tmp_path, monkeypatch):
    """They make no page of their own; that of the answers has their correlations."""
    plans = {name: SMALLEST[name] for name in ("qwen-1.5b", "qwen-0.5b")}
    monkeypatch.setattr(results, "PLANS", PLANS | plans)
    with pytest.raises(SystemExit):
        smallest("qwen-0.5b", tmp_path)
    folder = shutil.copytree(answers.parent, tmp_path / "copy")
    alone = answers.read_text("utf-8")

    text = smallest("qwen-0.5b", folder).read_text("utf-8")

    (files,) = {tuple(sorted(path.name for path in folder.glob("*.*")))}
    assert files == ("claims.md", "page.md", "page.parquet", "results-qwen-0.5b.parquet")
    assert f"On the first {SMALLEST['qwen-0.5b'].prompts} of these answers" not in alone
    assert text.replace(_same_answers(text), "") == alone


def test_pairs_of_a_wrong_and_a_right_answer():
    """Each pair is of one policy; a tie counts half."""
    kl = np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 4.0]])
    wrong = np.array([[0, 1], [1, 0], [0, 0]], bool)

    assert pairs(kl, wrong).tolist() == [1, 0, 0.5, 1]


def _same_answers(text):
    """The part of a page about another model's values, up to the next other results."""
    start = text.index(f"On the first {SMALLEST['qwen-0.5b'].prompts} of these answers")
    return text[start : text.index("On [", start)]


def test_a_page_lists_the_claims_that_turn_out_otherwise(monkeypatch):
    """Those that are decided here, and were not so, or not the same, on the other results."""
    signs = {"same": (1, 1), "turned": (1, -1), "decided": (0, 1), "undecided": (1, 0)}

    def claims(side):
        for says, of_sides in signs.items():
            values = np.full(8, of_sides[side]) + np.linspace(-0.1, 0.1, 8)
            yield Claim("X1", says, cells={"budget 64": values})

    monkeypatch.setattr(results_page.claims, "CLAIMS", {"Paper": claims})
    shorter, here = (SimpleNamespace(evidence=side, plan=FULL) for side in (0, 1))

    text = differing(here, shorter)

    assert "2 hold on these answers, 1 do not, and 1 are not decided" in text
    assert [row.split(" | ")[1] for row in text.splitlines()[4:]] == ["turned", "decided"]


@pytest.mark.parametrize("name", ["qwen-1.5b", "qwen-1.5b-sheets"])
def test_recorded_answers_are_right_and_of_their_model(name):
    """Of the card's answers those count that are right, ended and long; each has a task."""
    plan = PLANS[name]
    rows = [json.loads(line) for line in ANSWERS.read_text("utf-8").splitlines()]

    answers = samples(plan)[1:]

    assert len({prompt.id for prompt in answers}) == plan.prompts
    for prompt in answers:
        (row,) = (
            row
            for row in rows
            if row["model"] == plan.solved
            and row["response"] == prompt.response
            and prompt.content[0]["content"] == row.get("prompt")
        )
        assert row["right"]
        assert row["ended"]
        assert row["response_tokens"] >= plan.least
        assert (row["task"] == SHEET) == plan.sheets


@pytest.mark.parametrize(
    "model", [name for name, of in PLANS.items() if not of.beside and results.PAGES[name].exists()]
)
def test_the_committed_page_follows_from_its_values(model, tmp_path):
    """Every number of a page is made of the files beside it, by one command."""
    page = results.PAGES[model]
    copy = tmp_path / page.name
    for plan in PLANS.values():
        file = results.values(plan, page)
        if model in (plan.name, plan.beside) and file.exists():
            shutil.copy(file, tmp_path)

    results.write(PLANS[model], copy)

    assert copy.read_text("utf-8") == page.read_text("utf-8")


def test_values_of_another_plan_make_no_page(page):
    """The file says of which prompts and policies its values are."""
    with pytest.raises(SystemExit, match="has values of Plan"):
        read_values(page.with_suffix(".parquet"), FULL)


def test_the_committed_claims_follow_from_the_values_of_both_models():
    """Each claim has its verdict on either model."""
    text = results.CLAIMS_PAGE.read_text("utf-8")

    assert claims_page(results.committed(results.CLAIMED)) == text
    there = [name for name in results.CLAIMED if results.PAGES[name].exists()]
    assert tables(text)["AMS, arXiv 2605.23200"][0][4:] == there


def test_a_claim_about_most_layers_follows_from_its_values():
    """By loops over the file: 19 of 30 layers of SmolLM2 are for G4, and 11 against it."""
    rows = stored_rows(results.PAGES["smollm2"].with_suffix(".parquet"))
    rows = rows.filter(metric="sparsity", variant="p=0.01,max=sequence")
    wide = rows.group_by("prompt", "layer").agg(pl.col("value").mean()).sort("prompt", "layer")
    shares = wide["value"].to_numpy().reshape(46, 30) - 0.9
    least = 0.01

    def p_value(gaps, cells):
        signs = np.vstack([np.ones(46), np.random.default_rng(7).choice([-1, 1], (4000, 46))])
        sums = signs @ gaps
        less = np.array([[np.sum(of < x) for x in of] for of in sums.T])  # [cell, flip]
        weakest = less[np.argsort(less[:, 0])[: 30 - cells + 1]].max(0)
        return np.mean(weakest >= weakest[0])

    assert sum(shares.mean(0) > least) == 19
    assert p_value(shares - least, 16) < 0.005  # at least 16 of 30
    assert p_value(-shares - least, 15) > 0.9
    text = results.CLAIMS_PAGE.read_text("utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| G4 ") and "all keys" in line)
    assert row.split(" | ")[5] == (
        "**holds**; p=0.0022, n=46, 19/30 above 0, "
        f"{shares.mean(0).min():+.3f} to {shares.mean(0).max():+.3f}"
    )


@pytest.mark.parametrize("model", results.WHOLE)
def test_no_regret_is_below_zero(model):
    """Nothing retains more than the optimum."""
    rows = stored_rows(results.PAGES[model].with_suffix(".parquet")).filter(metric="regret")

    assert rows["prompt"].n_unique() == (PLANS[model].regret or PLANS[model].prompts)
    assert rows["value"].min() > -1e-6


@pytest.mark.real
def test_kept_answers_of_judged_rows_are_those_of_a_live_run(tmp_path):
    """With one event, after the prompt, greedy decoding writes what the judged rows predict."""
    only = ("snapkv", "tova", "expected_attention", "knorm")
    plan = replace(SMALLEST["smollm2"], budgets=(48, 128), only=only, once=True)
    (path,) = record(plan, tmp_path, [2])
    model, tokenizer = load_model("smollm2")
    schedule = Schedule(None, prefill=True)
    policies = [replace(policy(name), name=name, schedule=schedule) for name in only]
    run = kvsim.live(
        model,
        path,
        policies,
        plan.budgets,
        tokenizer=tokenizer,
        interval="paper",
        max_new_tokens=ANSWER,
        metrics="answer_kept",
    )
    judged = measure_prompt(2, plan, tmp_path, tmp_path, tmp_path / "none.parquet")

    columns = ("policy", "budget", "value")
    kept, expected = (
        sorted(table.filter(metric="answer_kept").select(columns).rows())
        for table in (judged, run.table)
    )
    assert kept == expected
    assert {value for *_, value in kept} == {0, 1}
