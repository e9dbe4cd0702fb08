"""The metric that ranks policies wherever results are shown: the best evidence of a Table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import polars as pl

from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import is_live

#: Metrics that rank, the best evidence first: of the model, live or judged, then of single layers.
EVIDENCE = ("response_kl", "weighted_error", "layer_error", "output_error")
#: Outcomes of a live run.
OUTCOMES = ("response_kl", "nll_increase", "top_agreement", "answer_right")

#: Lowest and highest rank correlation of each metric with live KL: 16 policies at one budget, three
#: budgets on two models (docs/fidelity.md).
WORTH = {
    "response_kl": (0.99, 1.0),
    "weighted_error": (0.87, 0.99),
    "layer_error": (0.68, 0.89),
    "output_error": (0.19, 0.65),
}


#: Correlation of rankings by judged KL and by share of wrong answers: 8 policies, two kinds of
#: answers, two models, two budgets (docs/fidelity.md).
ANSWERS = (0.26, 0.93)


def ranking(table: pl.DataFrame, metrics: Iterable[str] = METRICS) -> Iterator[str]:
    """Yield the measured metrics that rank the policies of a Table, the best evidence first.

    metrics: candidates for replays. Metrics of the running model rank wherever they are measured,
    and are the only ones for live runs, because errors of single layers may contradict them.
    """
    measured = set(table.drop_nulls(["policy", "value"])["metric"]) & {*METRICS}
    metrics = [*metrics]
    errors = [name for name in (*EVIDENCE[1:], "retained_mass", "wipeout") if name in metrics]
    for name in dict.fromkeys(OUTCOMES if is_live(table) else (*OUTCOMES, *errors, *metrics)):
        if name in measured and METRICS[name].better:
            yield name


def shared(runs: Sequence[pl.DataFrame]) -> tuple[str | None, list[str]]:
    """Return the best evidence that all runs have, and a remark where some have better."""
    each = [names for run in runs if (names := [*ranking(run)])]
    common = next((x for x in each[0] if all(x in names for names in each)), None) if each else None
    order = [*EVIDENCE, *METRICS]
    best = min((names[0] for names in each), key=order.index, default=None)
    if common is None or best is None or common == best:
        return common, []
    having = sum(best in names for names in each)
    better = f"{having} of {len(each)} have {best} (--metric {best})"
    return common, [f"ranked by {common}, the best evidence that all runs have; {better}"]
