"""The layout of AMS, Table 14: what consecutive kept sets share, by stage, domain and task."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.analysis.summaries import STAGES, Interval, stages
from results_page.ranking import markdown
from results_page.statistics import Floats, Results
from results_page.traces import labels

BASE, MADE = "tova", "ams"


def groups(r: Results) -> str:
    """A row for each stage, domain and task, and one for all."""
    budget = r.plan.budget
    head = ("group", f"`{BASE}`", f"`{MADE}`", "difference", "segments", "prompts")
    lines = []
    for name, chosen, layers in _groups(r):
        base, made = (
            _mean(r, label, budget, "retained_iou", layers)[chosen] for label in (BASE, MADE)
        )
        cut = _mean(r, MADE, budget, "segment_count", layers)[chosen]
        cells = [Interval.of(x).text(".3f") for x in (base, made)]
        cells += [Interval.of(made - base).text("+.3f"), Interval.of(cut).text(".1f")]
        lines.append([name, *cells, str(chosen.sum())])
    chance = Interval.of(r.chance(BASE, budget, "retained_iou")).mean
    return (
        "The layout of AMS, Table 14: intersection over union of consecutive kept sets, for "
        f"`{BASE}` alone and under `{MADE}`, at budget {budget}; random sets of these sizes have "
        f"{chance:.3f}. A stage is two sevenths of the layers at either end, and what lies "
        f"between{_three(r)}. The difference is paired by prompt.\n\n" + markdown(head, lines)
    )


def _groups(r: Results) -> Iterator[tuple[str, NDArray[np.bool_], list[int]]]:
    """Name, which prompts, and which layers."""
    every = list(range(r.layers))
    at = stages(pl.DataFrame({"layer": every}), r.layers)["stage"]
    all_of_them = np.ones(r.plan.prompts, dtype=bool)
    for stage in STAGES:
        yield f"{stage} layers", all_of_them, [i for i in every if at[i] == stage]
    kinds = [labels(r.plan, number + 1) for number in range(r.plan.prompts)]
    for what in kinds[0]:
        for name in dict.fromkeys(one[what] for one in kinds):
            yield f"{what} {name}", np.array([one[what] == name for one in kinds]), every
    yield "all", all_of_them, every


def _three(r: Results) -> str:
    return ": of three layers, one each" if r.layers == 3 else ""


def _mean(r: Results, label: str, budget: int, metric: str, layers: list[int]) -> Floats:
    """Mean over some layers for each prompt; [prompt]."""
    found: Floats = np.mean([r.of(label, budget, metric, layer=i) for i in layers], axis=0)
    return found
