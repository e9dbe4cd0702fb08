"""The figures of `kvsim plot` by name, and what each is drawn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import polars as pl

    from kvsim.core.record import Record
    from kvsim.core.trace import Trace


@dataclass(frozen=True)
class Case:
    """What a figure is drawn from: traces, records of them, their Table, and what was asked for."""

    traces: Sequence[Trace]
    records: Sequence[Record]
    table: pl.DataFrame
    layer: int | None = None
    head: int | None = None
    by: str | None = None
    metric: Sequence[str] | None = None
    zoom: tuple[int, int] | None = None

    @property
    def where(self) -> dict[str, Any]:
        """The layer and the head that were asked for, as keywords."""
        asked = {"layer": self.layer, "head": self.head}
        return {name: place for name, place in asked.items() if place is not None}

    @property
    def layers(self) -> list[int] | None:
        """The layer that was asked for, None for all of them."""
        return None if self.layer is None else [self.layer]


@dataclass(frozen=True)
class Drawing:
    """A figure by name.

    takes: which of --layer, --head, --by, --metric and --zoom it knows. single: it shows one trace,
    or one record of it. replay: how policies are replayed for it, to a Table of `metrics` and
    records ("sweep"), to a record with its Plans ("plans"), or to the error of one eviction at each
    --ratio ("once"); None where it shows no policies. runs: it is drawn from a Table alone, so that
    a run folder will do.
    """

    draw: Callable[[Case], Any]
    takes: tuple[str, ...] = ()
    single: Literal["trace", "record"] | None = None
    replay: Literal["sweep", "plans", "once"] | None = "sweep"
    metrics: tuple[str, ...] = ()
    runs: bool = False


def _over_budgets(case: Case) -> Any:
    from kvsim.plots import over_budgets

    return over_budgets(case.table, case.metric or _OVER_BUDGETS)


def _pareto(case: Case) -> Any:
    from kvsim.plots import pareto

    return pareto(case.table, case.metric or _PARETO)


def _retention_map(case: Case) -> Any:
    from kvsim.plots import retention_map

    return retention_map(case.traces[0], case.records, **case.where)


def _bursts(case: Case) -> Any:
    from kvsim.plots import bursts

    return bursts(case.traces[0], case.records, **case.where, zoom=case.zoom)


def _error_over_rows(case: Case) -> Any:
    from kvsim.plots import error_over_rows

    return error_over_rows(case.traces[0], case.records)


def _middle_coverage(case: Case) -> Any:
    from kvsim.plots import middle_coverage

    return middle_coverage(case.traces, case.records, **case.where)


def _position_density(case: Case) -> Any:
    from kvsim.plots import position_density

    return position_density(case.traces, case.records, **case.where)


def _iou_by(case: Case) -> Any:
    import polars as pl

    from kvsim.analysis.summaries import stages
    from kvsim.plots import iou_by

    # every layer of a trace has rows, also one that nothing left
    of_trace = case.table.partition_by("trace", maintain_order=True)
    staged = [stages(one, 1 + max(one["layer"].drop_nulls(), default=0)) for one in of_trace]
    return iou_by(pl.concat(staged) if staged else case.table, case.by or "stage")


def _overlap_curves(case: Case) -> Any:
    from kvsim.plots import overlap_curves

    return overlap_curves(case.traces, layers=case.layers)


def _sparsity_by_layer(case: Case) -> Any:
    from kvsim.plots import sparsity_by_layer

    return sparsity_by_layer(case.table)


def _mass_curve(case: Case) -> Any:
    from kvsim.plots import mass_curve

    return mass_curve(case.traces[0], case.records[0], **case.where)


def _token_text(case: Case) -> Any:
    from kvsim.plots import token_text

    return token_text(case.traces[0], case.records[0], **case.where)


def _lift_bars(case: Case) -> Any:
    from kvsim.plots import lift_bars

    return lift_bars(case.traces[0], case.records[0], **case.where)


def _reconstruction_error(case: Case) -> Any:
    from kvsim.plots import reconstruction_error

    return reconstruction_error(case.table)


def _expected_observed(case: Case) -> Any:
    from kvsim.analysis.attention.expectation import expected_and_observed
    from kvsim.plots import expected_observed

    return expected_observed(expected_and_observed(case.traces[0]), layers=case.layers)


def _of_expectation(case: Case, metric: str) -> pl.DataFrame:
    """A metric of expected attention on the first fifth of each trace, as in the paper."""
    import polars as pl

    from kvsim.analysis import Analysis, measure
    from kvsim.errors import PolicyError

    analyses = [Analysis(trace, cut=trace.n_pos // 5) for trace in case.traces]
    for analysis in analyses:
        if "expectation" in analysis.left_out:
            raise PolicyError(
                f"{analysis.trace.name}: attention cannot be compared with what is expected, "
                f"because of {analysis.left_out['expectation']}; give another trace"
            )
    return pl.concat(measure(analysis, metrics=[metric]) for analysis in analyses)


def _agreement_steps(case: Case) -> Any:
    from kvsim.plots import agreement_steps

    return agreement_steps(_of_expectation(case, "expectation_steps"), layers=case.layers)


def _attention_loss(case: Case) -> Any:
    from kvsim.plots import attention_loss

    return attention_loss(_of_expectation(case, "attention_loss"), layers=case.layers)


def _state_ridges(case: Case) -> Any:
    from kvsim.plots import state_ridges

    return state_ridges(case.traces[0], case.layer or 0)


def _state_quantiles(case: Case) -> Any:
    from kvsim.plots import state_quantiles

    return state_quantiles(case.traces[0], case.layer or 0)


def _normal_distance(case: Case) -> Any:
    from kvsim.analysis.attention.normality import state_normality
    from kvsim.plots import normal_distance

    return normal_distance(state_normality(case.traces[0]))


def _projection_gap(case: Case) -> Any:
    from kvsim.analysis.attention.projections import key_projections
    from kvsim.plots import projection_gap

    return projection_gap(key_projections(case.traces[0]))


_PLACE = ("layer", "head")
_OVER_BUDGETS = ("output_error", "retained_mass", "wipeout")
_PARETO = ("output_error", "wipeout")

FIGURES: Mapping[str, Drawing] = {
    "over_budgets": Drawing(_over_budgets, ("metric",), metrics=_OVER_BUDGETS, runs=True),
    "pareto": Drawing(_pareto, ("metric",), metrics=(*_PARETO, "entries_seen"), runs=True),
    "retention_map": Drawing(_retention_map, _PLACE, "trace"),
    "bursts": Drawing(_bursts, (*_PLACE, "zoom"), "trace"),
    "error_over_rows": Drawing(_error_over_rows, single="trace"),
    "middle_coverage": Drawing(_middle_coverage, _PLACE),
    "position_density": Drawing(_position_density, _PLACE),
    "iou_by": Drawing(_iou_by, ("by",), metrics=("retained_iou",), runs=True),
    "overlap_curves": Drawing(_overlap_curves, ("layer",), replay=None),
    "sparsity_by_layer": Drawing(
        _sparsity_by_layer, metrics=("sparsity", "sparsity_compressed"), runs=True
    ),
    "mass_curve": Drawing(_mass_curve, _PLACE, "record", "plans"),
    "token_text": Drawing(_token_text, _PLACE, "record"),
    "lift_bars": Drawing(_lift_bars, ("layer",), "record"),
    "reconstruction_error": Drawing(_reconstruction_error, ("ratio",), replay="once"),
    "expected_observed": Drawing(_expected_observed, ("layer",), "trace", None),
    "agreement_steps": Drawing(_agreement_steps, ("layer",), replay=None),
    "attention_loss": Drawing(_attention_loss, ("layer",), replay=None),
    "state_ridges": Drawing(_state_ridges, ("layer",), "trace", None),
    "state_quantiles": Drawing(_state_quantiles, ("layer",), "trace", None),
    "normal_distance": Drawing(_normal_distance, (), "trace", None),
    "projection_gap": Drawing(_projection_gap, (), "trace", None),
}
