"""The stored errors and sensitivity of layers, and the table that the page shows of them."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import sensitivity
import validity


@pytest.mark.parametrize("model", validity.STUDIES)
def test_stored_values_are_sums_over_the_stored_layers(model):
    """`layer_error` and `weighted_error` of each prompt, policy and budget, by a loop."""
    of_layers = pl.read_parquet(sensitivity.RESULTS).filter(model=model).to_dicts()
    own = {row["prompt"]: row["layers"] for row in of_layers if row["policy"] is None}
    stored = validity.values().filter(model=model, fidelity="open")
    found = {
        (*row[:3], row[3]): row[4]
        for row in stored.select("metric", "prompt", "policy", "budget", "value").iter_rows()
    }
    for row in of_layers:
        if row["policy"] is None:
            continue
        cell = row["prompt"], row["policy"], row["budget"]
        weighted = sum(s * x**2 for s, x in zip(own[row["prompt"]], row["layers"], strict=True))
        assert found["layer_error", *cell] == pytest.approx(sum(row["layers"]), rel=1e-5)
        assert found["weighted_error", *cell] == pytest.approx(weighted, rel=1e-5)


def test_the_two_halves_share_no_prompt_and_no_policy():
    """Of each model 15 prompts and 8 policies of each."""
    rows = pl.read_parquet(sensitivity.RESULTS)
    for model in validity.STUDIES:
        for column, size in (("prompt", 15), ("policy", 8)):
            halves = [{*rows.filter(model=model, part=part)[column]} for part in ("choice", "test")]
            assert [*map(len, halves)] == [size, size]
            assert not halves[0] & halves[1]


def test_the_page_has_the_table():
    """As the script prints it from the stored values."""
    page = (Path(sensitivity.__file__).parent / "fidelity.md").read_text("utf-8")

    lines = [*sensitivity.part()]

    assert "\n".join(lines) in page
    weighted, plain = (
        [float(cell.split()[0].strip(",")) for cell in line.split(" | ")[1:-1]]
        for line in (lines[5], lines[2])
    )
    assert np.greater(weighted, plain).all()
