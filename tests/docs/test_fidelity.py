"""docs/fidelity.py makes the page on fidelity, and the page in the repository is of this study."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import fidelity
from drawing import LARGEST
from fidelity_page.drawing import figure
from fidelity_page.loops import Loops, coverage, judged
from fidelity_page.plan import NAMES, STUDIES
from fidelity_page.text import page
from kvsim.analysis.prediction import FLOOR, fit, read_calibrations
from kvsim.analysis.registry import METRICS

ROOT = Path(__file__).resolve().parents[2]


def measured(model, prompts=8):
    """Rows as `measure_prompt` stores them: KL follows the layer error, wipe-out nothing."""
    study, rng, rows = STUDIES[model], np.random.default_rng(1), []
    for prompt, policy, budget in itertools.product(range(prompts), NAMES, study.budgets):
        error = (2 + NAMES.index(policy)) * 100 / budget * rng.uniform(0.9, 1.1)
        other = error**0.2 * rng.uniform(0.5, 1)
        kl = 0.01 * error**2 * rng.uniform(0.8, 1.2)
        replayed = {"layer_error": error / 3, "output_error": other, "wipeout": rng.uniform()}
        replayed |= {"layer_error_relative": other / 9, "retained_mass": 1 - other / 1000}
        live = {"response_kl": kl, "nll_increase": kl / 2, "answer_right": float(kl < 1)}
        live |= {
            "answer_kept": float(kl < 1),
            "layer_error": error / 2,
            "output_error": 1.25 * other,
        }
        live |= {"kept_agreement": 0.9}
        whole = {"response_kl", "nll_increase", "answer_right", "answer_kept"}
        for loop, values in (("open", replayed), ("closed", live)):
            for metric, value in values.items():
                layers = [None] if metric in whole else range(3)
                rows += [(policy, budget, at, metric, value, loop, prompt) for at in layers]
    names = ("policy", "budget", "layer", "metric", "value", "loop", "prompt")
    frame = pl.DataFrame(rows, schema=names, orient="row", infer_schema_length=None)
    labels = {"task": "get", "tokens": 400, "prompt_tokens": 250, "full_right": True}
    return Loops(study, frame.with_columns(pl.lit(x).alias(name) for name, x in labels.items()))


@pytest.fixture(scope="module")
def loops():
    """Both models, measured."""
    return [measured(model) for model in STUDIES]


def rows_below(text, heading):
    """Cells of the first table below a heading."""
    table = text.partition(f"{heading}\n")[2].partition("| ---")
    body = table[2].partition("\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]


def test_the_page_has_the_planted_numbers(loops, tmp_path):
    """Correlations, coverage, answers, ratios and agreement are those of the rows."""
    curves = [fidelity.calibration(each) for each in loops]
    text = page(loops, curves, "figures/x.png")
    figure(loops, tmp_path / "x.png")
    assert 10_000 < (tmp_path / "x.png").stat().st_size <= LARGEST
    answers = {row[0]: row for row in rows_below(text, "Sorted by live KL, mean over budgets.\n")}
    assert answers["`random`"][4].startswith("100% (")
    assert re.search(r"on `tiny` up to 1\.2 times", text)
    assert "| `tiny` | 0 | " in text
    assert "1.50 [1.50, 1.50]" in text  # 3 / 2
    assert {row[1] for row in rows_below(text, "with them.\n")} == {"90%"}


def test_coverage_is_that_of_groups_left_out(loops):
    """Each group is tested by a fit without it; values outside the fit are not counted."""
    points = loops[0].points()
    found = coverage(points, "policy")
    inside, outside = [], 0
    for name in NAMES:
        curve = fit(points.filter(pl.col("policy") != name))
        for row in points.filter(policy=name).to_dicts():
            if curve.lowest <= row["error"] <= curve.highest:
                estimate, kl = curve.estimate(row["error"]), max(row["kl"], FLOOR)
                inside.append(estimate.low <= kl <= estimate.high)
            else:
                outside += 1

    assert found.covered == pytest.approx(np.mean(inside))
    assert (found.n, found.of) == (len(inside), len(inside) + outside)
    assert outside > 0
    judgements = judged(fit(points), points)
    assert judgements["factor"].min() >= 1
    assert judgements["inside"].null_count() == 0


def test_only_measured_prompts_are_read(loops, tmp_path):
    """--write-only takes the prompts that are there; without any the error says what to do."""
    study = STUDIES["tiny"]
    stored = fidelity.stored_prompt(3, study, tmp_path)
    stored.parent.mkdir()
    loops[0].rows.filter(prompt=3).write_parquet(stored)
    read = fidelity.loops(study, tmp_path, 1, None, measure=False)

    assert read.rows["prompt"].unique().to_list() == [3]
    with pytest.raises(SystemExit, match="nothing is measured"):
        fidelity.loops(study, tmp_path / "none", 1, None, measure=False)


def test_the_committed_page_is_of_this_study():
    """Run docs/fidelity.py again if not: policies, prompts and metrics, and the calibrations."""
    text = (ROOT / "docs" / "fidelity.md").read_text("utf-8")
    calibrations = {each.model: each for each in read_calibrations(fidelity.CALIBRATIONS)}

    assert list(calibrations) == list(STUDIES)
    for model, study in STUDIES.items():
        name = {"tiny": "`tiny`", "smollm2": "SmolLM2"}[model]
        of = calibrations[model]
        assert f"* {name}: {of.prompts} prompts (" in text
        assert f"of {of.tokens[0]} to {of.tokens[1]} tokens" in text
        assert list(of.policies) == [policy.name for policy in study.policies]
        assert of.budgets == tuple(map(str, study.budgets))
        assert (of.interval, of.prefill) == (study.prompts.interval, study.prompts.prefill)
        assert f"{of.curve.below:.2f} to {of.curve.above:.2f}" in text
        for cells in rows_below(text, f"### {name}"):
            assert cells[0].strip("`") in METRICS
    assert "\npython docs/fidelity.py\n" in text
