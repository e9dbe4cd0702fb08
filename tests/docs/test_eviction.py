"""docs/eviction.py: what it counts, what it calls separate, and what it writes."""

from dataclasses import replace
from pathlib import Path

import pytest

import eviction
from apps.tiny.model import build
from apps.tiny.results import Results, digest
from apps.tiny.tokenizer import save_tokenizer
from kvsim.policies import names
from kvsim.studies.language.tasks import prompts
from kvsim.tiny import PATH

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def model():
    """Untrained: its answers are wrong, and that is enough here."""
    return build(0).eval()


@pytest.fixture(scope="module")
def sample():
    """A short one."""
    return prompts(1, 4, task="walk", facts=6, lines=8, kinds=3, filler=0.0)[0]


def counts(*hits, n=40):
    """A policy for each number of exact chains."""
    return [eviction.Count(f"p{k}", 0.2, n, k, n, 0.5, 0.9) for k in hits]


def test_the_policies_are_names_of_the_catalogue_with_styles_of_their_own():
    """Nothing in the plan is unknown, and no two lines of the figure look alike."""
    plan = eviction.Plan()
    tried = eviction.policies(plan)

    assert set(tried) == {"full", "oracle", *plan.policies}
    assert set(tried) <= set(names())
    styles = eviction._styles()
    assert set(styles) == set(tried) - {"full"}
    assert len({(one["color"], one["marker"]) for one in styles.values()}) == len(styles)


def test_it_writes_card_and_figure_from_what_it_measured(model, tmp_path, capsys):
    """Measured once and read again; other weights, sizes or policies are measured anew."""
    folder, card = tmp_path / "model", tmp_path / "card.md"
    model.save_pretrained(folder)
    save_tokenizer(folder)
    card.write_text("before\n<!-- begin eviction -->\nold\n<!-- end eviction -->\nbehind\n")
    results = tmp_path / "results.jsonl"
    asked = [f"--results={results}", f"--model={folder}", "--n=2", "--cells", "needle:1", "walk:1"]
    asked += ["--budgets", "0.3", "0.15", "--policies", "random", "snapkv"]
    more = [f"--card={card}", f"--figure={tmp_path / 'f.png'}"]

    with pytest.raises(SystemExit, match="lacks"):
        eviction.main([*asked, *more])
    eviction.main(asked)
    eviction.main(asked)
    eviction.main([*asked, *more])

    assert len(results.read_text().splitlines()) == 2  # nothing was measured twice
    text = card.read_text()
    assert text.startswith(
        f"before\n<!-- begin eviction -->\n{eviction.METHOD}\n\nCounts are of 2 samples; "
    )
    assert "open loop" in eviction.METHOD
    assert text.endswith("\n<!-- end eviction -->\nbehind\n")
    lines = text.splitlines()
    assert lines.count("| policy | 15% | 30% |") == 2
    for policies in ("`full`", "`oracle`"):
        assert sum(line.startswith(f"| {policies} | 0 |") for line in lines) == 2
    assert text.count("left out between them: nowhere.") == 1
    assert (tmp_path / "f.png").stat().st_size > 10_000
    read = eviction.read(
        eviction.Results(results, eviction.digest(folder)),
        replace(
            eviction.Plan(),
            cells=(("walk", 1),),
            n=2,
            budgets=(0.15, 0.3),
            policies=("random", "snapkv"),
        ),
    )
    (found,) = read.values()
    assert {(one.policy, one.budget) for one in found} == {
        ("full", 0.15),
        *((name, budget) for name in ("oracle", "random", "snapkv") for budget in (0.15, 0.3)),
    }
    assert all(0 <= one.reached <= one.right <= 1 for one in found)


def test_policies_spread_on_the_shipped_model():
    """On three tasks policies form three groups, intervals apart; the oracle is near 100 %."""
    rows = Results(DOCS / "tiny-results.jsonl", digest(PATH)).rows()
    spread, oracle = set(), []
    for row in (row for row in rows if row["part"] == "eviction"):
        counts = [eviction.Count(**one) for one in row["counts"]]
        tried = [one for one in counts if one.policy not in (eviction.FULL, eviction.ORACLE)]
        oracle += [one for one in counts if one.policy == eviction.ORACLE]
        for share in {one.budget for one in tried}:
            assert 0.05 <= share <= 0.5
            if eviction.parted([one for one in tried if one.budget == share]):
                spread.add(row["task"])

    assert len(spread) >= 3
    assert min(one.chain / one.n for one in oracle) >= 0.95
