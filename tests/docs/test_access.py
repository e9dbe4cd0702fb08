"""docs/access.py and access_loop.py: tables of planted numbers, and the page of the results."""

import numpy as np
import polars as pl
import pytest

import access
import access_loop
import kvsim
from apps.tiny.card import fill
from traces import random_trace

FIVE = [("a", 128), ("int8", 256), ("b + int8", 64), ("c", 64), ("d", 256)]


def planted(swapped=False):
    """Four prompts of ten cells whose divergence is the square of the error.

    The response of the last one is too long for an answer.
    """
    rows = []
    for at, (name, budget) in enumerate(FIVE):
        for step, (label, equals) in enumerate(((name, None), ("h2o", name))):
            place = 2 * at + step
            for prompt in range(4):
                error = (place + 1) / 10 + prompt / 1000
                kl = error**2 if not (swapped and place == 9) else 1e-4
                tokens = [9, 9 + (321 if prompt == 3 else 320)]
                cell = ("tiny", str(prompt), tokens, prompt < 2, label, budget + prompt, equals)
                rows.append((*cell, error, 0.5, 0.25 * step, kl, 0.9, float(prompt < step)))
    names = ("model", "prompt", "tokens", "full_right", "name", "budget", "equals", "output_error")
    names += ("bytes_held", "bytes_read", "response_kl", "top_agreement", "answer_right")
    return pl.DataFrame(rows, names, orient="row", infer_schema_length=None)


def test_the_tables_of_the_loop_have_the_planted_numbers(monkeypatch):
    """Each policy stands above the eviction of as many bytes; answers are counted."""
    monkeypatch.setitem(access_loop.BEST, "tiny", FIVE)

    head, _, _, _, first, equal, *rest = access_loop.table(planted(), "tiny").splitlines()

    assert head == (
        "**tiny**, 4 prompts; answers are counted on the 3 whose response has at most 320 tokens, "
        "2 of them right with the full cache."
    )
    expected = np.mean([(0.1 + p / 1000) ** 2 for p in range(4)])
    assert first.startswith(f"| **a** | 130 | 0.50 | 0.00 | 0.102 | {expected:.2g} |")
    assert first.endswith("| 90 % | 0/3 (0-56 %) |")
    assert equal.startswith("| h2o, as many bytes | 130 | 0.50 | 0.25 | 0.202 | ")
    assert equal.endswith("| 90 % | 1/3 (6-79 %) |")
    assert rest[0].startswith("| **int8** | - |"), "no budget binds it"
    assert len(rest) == 8


@pytest.mark.parametrize(("prompt", "budget"), [(60, 24), (60, 100), (90, 40)])
def test_the_eviction_holds_as_many_entries(prompt, budget):
    """Entries by the formula are those of a replay, and a budget is found again from its share."""
    trace = random_trace(layers=1, group=1, n=150, prompt_len=prompt)
    record = kvsim.replay(trace, "tova", budget, interval=access.INTERVAL, prefill=True)
    seen = np.mean([record.kept(row).sum((0, 2)) for row in range(prompt, 150)])

    assert access_loop.entries_seen(prompt, 150, budget) == pytest.approx(seen)
    share = seen / access_loop.entries_seen(prompt, 150, 150)
    assert access_loop.as_many(prompt, 150, share) == budget
    assert access_loop.entries_seen(prompt, 150, access_loop.as_many(prompt, 150, 2.0)) == (
        access_loop.entries_seen(prompt, 150, 150)
    )


def test_the_page_has_what_is_measured():
    """All is measured, and the tables are of the committed results."""
    text = access.PAGE.read_text("utf-8")

    assert fill(text, access.parts() | {"loop": access_loop.page()}) == text
    for model in access.MODELS:
        measured = {row["name"] for row in access.lines() if row["model"] == model}
        assert measured == set(access.KIND)
        live = pl.DataFrame(access_loop.lines(), infer_schema_length=None).filter(model=model)
        names = live.filter(pl.col("equals").is_null())["name"].unique(maintain_order=True)
        assert names.to_list() == [name for name, _ in access_loop.BEST[model]]


def test_fronts_leave_out_what_is_beaten_and_bounds(monkeypatch):
    """Of planted costs and divergences; divergences below the floor are equal."""
    costs = {"full": 9, "h2o": 4, "tova": 5, "int8": 6, "fp8": 7, access.BOUND: 1}
    kl = {"full": 0, "h2o": 0.5, "tova": 0.6, "int8": 1e-6, "fp8": 1e-7, access.BOUND: 0}
    rows = [
        {"model": "tiny", "name": name, "budget": 64, "response_kl": [kl[name]] * 2}
        | {"output_error": [0.1] * 2, "bytes_held": [cost] * 2, "bytes_read": [10 - cost] * 2}
        for name, cost in costs.items()
    ]
    monkeypatch.setattr(access, "lines", lambda: rows)
    points = access.points("tiny")

    assert points.filter("front_bytes_held")["name"].to_list() == ["h2o", "int8"]
    assert points.filter("front_bytes_read")["name"].to_list() == ["fp8"]
    assert "| fp8 | - | 0.78 | **3.00** | < 1e-05 | 0.100 |" in access.table("tiny")
