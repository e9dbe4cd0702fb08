"""docs/needle.py makes the page on needles, and the page in the repository is of these grids."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from scipy.stats import mannwhitneyu

import needle
from drawing import LARGEST

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = replace(needle.TINY, lengths=(300,), depths=(0.1, 0.5), rounds=1, budgets=("75%",))


def planted():
    """Rows as they are stored: `ams` fails in the middle alone, `snapkv` with little recall."""
    grid, rows = needle.SMOLLM2, []
    cells = itertools.product(grid.lengths, grid.depths, range(5), needle.NAMES, grid.budgets)
    for length, depth, turn, policy, share in cells:
        full_right = (turn, depth) != (4, 0.1)
        recall = (turn + 1) / 10 + depth / 25
        right = {"ams": not 0.3 <= depth <= 0.7, "snapkv": turn >= 2}.get(policy, True)
        labels = (f"{length}-{depth}-{turn}", length, depth, length, full_right)
        for metric, layer, value in (
            ("answer_right", None, float(right)),
            ("needle_recall", 0, recall - 0.05),
            ("needle_recall", 1, recall + 0.05),
        ):
            rows.append((*labels, policy, share, metric, layer, value))
    names = ("trace", "length", "depth", "tokens", "full_right")
    names += ("policy", "share", "metric", "layer", "value")
    return pl.DataFrame(rows, schema=names, orient="row", infer_schema_length=None)


def test_the_page_has_the_planted_numbers():
    """Counts by place, recall, and the middle, of prompts that the full cache answers right."""
    text = "\n".join(needle.parts({"smollm2": planted()}).values())
    rows: dict[tuple[str, ...], str] = {}
    for line in text.splitlines():
        rows.setdefault(tuple(line.split(" | ")[:2]), line)

    assert "With the full cache 72/75 (89-99 %) are answered right" in text
    assert " 12/12 (76-100 %) | 0/45 (0-8 %) | 15/15 (80-100 %) | 27/72 " in rows["| `ams`", "25%"]
    assert " | 6/12 (25-75 %) | 27/45 (45-73 %) | 9/15 " in rows["| `snapkv`", "50%"]
    assert rows["| `ams`", "50%"].endswith("| 25 % | 32 % | 34 % |")
    assert "`ams` at 25% (45 of 45 against 0 of 27, p = " in text
    assert "no difference found in 6 of 8 cells" in text
    assert ", 126 of 270 fail in the middle, and 24 of 162 at the ends" in text


def test_pairs_are_those_of_the_rank_sum():
    """Within a policy and a budget; 1 where recall tells right from wrong."""
    rows = needle.answers(planted()).filter("full_right")
    one = rows.filter(policy="ams", share="25%")
    right, wrong = (one.filter(right=x)["recall"].to_list() for x in (True, False))
    expected = mannwhitneyu(right, wrong).statistic / (len(right) * len(wrong))

    assert needle.pairs(one) == (pytest.approx(expected), 27 * 45)
    assert needle.pairs(rows.filter(policy="snapkv"))[0] == 1.0
    assert needle.pairs(rows.filter(policy="streaming_llm"))[1] == 0


def test_a_small_grid_is_measured_once(tmp_path, monkeypatch):
    """Needles stand where they are asked for; what is measured is read again; the figure fits."""
    rows = needle.measured(SMALLEST, tmp_path)
    monkeypatch.setattr(needle, "_measure", None)
    again = needle.measured(replace(SMALLEST, rounds=2), tmp_path, measure=False)
    needle.draw(rows, tmp_path / "x.png")
    found = needle.answers(rows)

    assert rows.equals(again)
    assert found["full_right"].all()
    assert found.height == 2 * len(needle.NAMES)
    assert set(found["place"]) == {"beginning", "middle"}
    assert found.filter(policy="streaming_llm")["recall"].to_list() == [0.0, 1.0]
    assert 2_000 < (tmp_path / "x.png").stat().st_size <= LARGEST
    with pytest.raises(SystemExit, match="no round of tiny is measured"):
        needle.measured(replace(SMALLEST, budgets=("50%",)), tmp_path, measure=False)


def test_needles_of_tiny_are_the_facts_of_the_answer():
    """Both stand near the depth, and the response names their nodes."""
    for number in range(20):
        prompt = needle.TINY.prompt(number)
        page = prompt.content.partition(" key : ")[0].split()
        asked = re.findall(r"(\w+) ,", prompt.content.partition(" get ")[2])
        starts = [" ".join(page).index(text) for text in prompt.needle]

        assert [text.split()[0] for text in prompt.needle] == asked
        for start in starts:
            depth = len(" ".join(page)[:start].split()) / len(page)
            assert abs(depth - prompt.labels["depth"]) <= 0.12
        assert abs(len(prompt.content.split()) / prompt.labels["length"] - 1) <= 0.06


def test_the_committed_page_is_of_these_grids():
    """Run docs/needle.py again if not: models, policies and budgets."""
    text = (ROOT / "docs" / "needle.md").read_text("utf-8")

    for model, grid in needle.GRIDS.items():
        assert f"\n## {needle.NAMED[model]}\n" in text
        assert f"; budgets {' and '.join(grid.budgets)} of prompt and response;" in text
        assert f"(figures/needle-{model}.png)" in text
        for policy, share in itertools.product(needle.NAMES, grid.budgets):
            assert f"\n| `{policy}` | {share} | " in text
    assert "\npython docs/needle.py\n" in text
