"""Sections of a report on expected and observed attention, and on the distribution of queries."""

from __future__ import annotations

import polars as pl
from markupsafe import Markup

from kvsim import plots
from kvsim.report.html import image, lines, section
from kvsim.report.study import Section, Study
from kvsim.report.traces import Column, by_layer, places
from kvsim.studies.expectation.expectation import STEPS, prompt_expectation

#: Most layers in a figure with a row each.
_ROWS = 4


def _expectation(study: Study) -> str:
    if "expectation_steps" not in set(study.table["metric"]):
        return ""
    note = (
        "Attention that the response pays to the prompt's keys behind the first four, compared "
        "with what Expected Attention expects of it: Spearman correlation over the keys, mean over "
        "query heads. From left to right one assumption more: the mean of ratios becomes a ratio "
        "of means, queries are normal, they are rotated by the mean rotation ahead, and they are "
        "those of the prompt. Fidelity: exact."
    )
    head = [(step.replace("_", " "), "expectation_steps", step, False) for step in STEPS]
    pictures = []
    if (first := study.first.of(prompt_expectation)) is not None:
        shown = places(study.first.trace.n_layers, _ROWS)
        alt = f"Expected against observed attention, {first.trace}"
        pictures.append(image(alt, lambda: plots.expected_observed(first, layers=shown), "png"))
    title = "Expected and observed attention"
    return section(title, note, lines([by_layer(study, head), *pictures]))


def _queries(study: Study) -> str:
    names = ("normal_distance", "projection_gap")
    if study.table.filter(pl.col("metric").is_in(names)).is_empty():
        return ""
    note = Markup(
        "Expected Attention takes queries before RoPE to be normal. "
        "<i>Distance</i> is the Kolmogorov-Smirnov distance of a dimension from the normal that "
        "fits it, next to that of as many independent normal samples; the <i>gap</i> is what the "
        "method needs: by how many nats log mean exp(logit) of a key is off, less what normal "
        "samples lack, without the queries of the first four tokens and with them. Fidelity: exact."
    )
    head: list[Column] = [
        ("distance", "normal_distance", "", True),
        ("gap", "projection_gap", "skip=4", False),
        ("gap, all queries", "projection_gap", "skip=0", False),
    ]
    return section("How queries are distributed", note, by_layer(study, head))


SECTIONS = {
    "expectation": Section(_expectation, after="traces"),
    "queries": Section(_queries, after="layers"),
}
