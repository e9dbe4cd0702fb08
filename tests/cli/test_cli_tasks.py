"""`kvsim prompts`: tasks, domains, levels and sizes."""

import json
from collections import Counter
from itertools import product

from command_line import one_line
from hypothesis import given
from hypothesis import strategies as st

from kvsim.studies.language import command as prompting
from kvsim.studies.language import ledger
from kvsim.studies.language.tasks import TASKS
from kvsim.tiny.vocabulary import DOMAINS


def rows_of(text):
    """The objects of JSON lines."""
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_of_every_task_and_domain(printed):
    """Without options all tasks and domains take turns; each row has its right response."""
    out = printed("prompts", "--n", "28")
    rows = rows_of(out)

    assert [row["task"] for row in rows[:7]] == list(TASKS)
    assert {(row["task"], row["domain"]) for row in rows} == {
        (task, domain) for task in TASKS for domain in DOMAINS
    }
    assert len({row["id"] for row in rows}) == 28
    for row in rows:
        assert row["reference"] == ledger.solve(row["prompt"]).response
        assert row["answer"] == ledger.check(row["prompt"], row["reference"]).answer


def test_prompts_of_given_sizes(run):
    """Every size reaches the page; without a level the id has none."""
    _, out, _ = run("prompts", "--task", "walk", "--n", "1", "--facts", "9", "--lines", "7")
    (row,) = rows_of(out)
    facts, _, rest = row["prompt"].partition(" key : ")
    question = rest.partition(" question : ")[2]

    assert row["id"] == "walk-paint-s0-000"
    assert row["level"] is None
    assert facts.split().count(".") >= 9
    assert question.split()[1] == "#6"


def test_prompts_of_several_tasks_levels_and_domains(run, printed):
    """Spread evenly over their combinations, with ids of their own; the same command, the same."""
    command = ["prompts", "--task", "walk,get", "--task", "needle", "--level", "1,2",
               "--domain", "paint,ore", "--n", "26", "--seed", "3"]  # fmt: skip

    out = printed(*command)
    again = run(*command)[1]
    other = run(*command[:-1], "4")[1]

    assert again == out
    rows = rows_of(out)
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == 26
    assert {row["prompt"] for row in rows_of(other)}.isdisjoint(row["prompt"] for row in rows)
    labels = [(row["task"], row["level"], row["domain"]) for row in rows]
    counts = Counter(labels)
    assert sorted(counts) == sorted(product(("get", "needle", "walk"), (1, 2), ("ore", "paint")))
    assert sorted(counts.values()) == [2] * 10 + [3] * 2
    assert set(labels[:12]) == set(counts)
    for place in range(3):  # early on too, each value has its share
        assert max(Counter(label[place] for label in labels[:6]).values()) <= 3
    for row in rows:
        assert row["id"].startswith(f"{row['task']}-{row['level']}-{row['domain']}-s3-")
        assert row["reference"] == ledger.solve(row["prompt"]).response


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_every_combination_has_one_turn(sizes):
    """All of them once, and in as many turns as there are values of the first each has one."""
    turns = prompting._turns(*map(range, sizes))

    assert sorted(turns) == sorted(product(*map(range, sizes)))
    assert sorted(turn[0] for turn in turns[: sizes[0]]) == list(range(sizes[0]))


def test_prompts_in_a_file(printed, tmp_path):
    """`--out` writes what would be printed; `--overwrite` replaces what is there."""
    out = tmp_path / "new" / "prompts.jsonl"
    command = ["prompts", "--task", "get", "--level", "1", "--n", "3"]
    rows = printed(*command)

    text = printed(*command, "--out", out)
    assert one_line(text).startswith(f"{out}: 3 prompts, with responses ")
    assert out.read_text() == rows

    printed("prompts", "--n", "1", "--out", out, "--overwrite")
    assert len(rows_of(out.read_text())) == 1
