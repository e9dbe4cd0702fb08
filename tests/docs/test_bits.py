"""docs/bits.py: the values of the page on bits of keys and values, and how they are measured."""

import re

import bits
import polars as pl
import pytest


def test_the_page_is_of_the_stored_values():
    """Every prompt has all pairs of bits, and the answer has intervals of the table."""
    stored = pl.read_parquet(bits.RESULTS)
    assert {*stored.group_by("model", "number").len()["len"]} == {len(bits.CELLS)}
    assert {*stored["model"]} == {"smollm2", "0.5b"}
    assert stored["kl"].min() > 0
    text = (bits.RESULTS.parent / "bits.md").read_text("utf-8")
    question = text.split("\n\n")[1]
    prompts = {*stored.group_by("model").agg(pl.col("number").n_unique())["number"]}
    assert all(f"{n} prompts" in question for n in prompts)
    assert len(found := re.findall(r"[\d.]+ \[[^]]+\]", question)) == 2
    assert all(f" {ratio} |" in bits.part() for ratio in found)
    of = {
        (k, v): stored.filter(k_bits=k, v_bits=v).group_by("model", "quantizer").agg(pl.mean("kl"))
        for k, v in ((16, 4), (8, 4), (4, 4))
    }
    both = of[16, 4].join(of[8, 4], on=["model", "quantizer"])
    over = both["kl"] / both["kl_right"]
    assert f"{over.min():.2f} to {over.max():.2f} times" in text
    means = of[4, 4].filter(model="0.5b").sort("quantizer")["kl"].to_list()
    assert f"{means[1]:.2g} with `kivi`, of {means[2]:.2g} with `q4_0`" in text


@pytest.mark.deep
def test_a_prompt_is_measured_once(tmp_path, monkeypatch):
    """As many bytes for K8V4 as for K4V8; a second run draws the figure of the pieces."""
    monkeypatch.setattr(bits, "CELLS", [("q8_0", 8, 4), ("q8_0", 4, 8)])
    command = ["--smallest", "--pieces", str(tmp_path / "pieces"), "--out", str(tmp_path)]
    bits.main(command)
    monkeypatch.setattr(bits, "measure", None)
    (tmp_path / "figures" / "bits.png").unlink()
    bits.main(command)
    table = pl.read_parquet(tmp_path / bits.RESULTS.name)
    assert table["held"].to_list() == pytest.approx([0.4086] * 2, abs=1e-3)
    assert (table["kl"] > 0).all()
    assert (tmp_path / "figures" / "bits.png").exists()
