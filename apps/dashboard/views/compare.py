"""Page *Compare*: policies against each other, over budgets and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl
import streamlit as st

from kvsim.analysis.evidence import EVIDENCE
from kvsim.analysis.registry import METRICS
from kvsim.analysis.summaries import COSTS, against_entries
from kvsim.schema import LABELS, visible

from .. import controls, downloads, elements, line_charts, runs

#: Policies that are shown at first, where a run has many.
FEW = 8


@dataclass(frozen=True)
class Comparison:
    """Settings of the page's controls: policies of a run, a variant of a metric, a split."""

    run: runs.Run
    policies: Sequence[str]
    metric: str
    variant: str
    by: str | None
    logarithmic: bool

    @property
    def styles(self) -> Mapping[str, line_charts.Style]:
        """The style of each policy of the run."""
        return line_charts.styles(self.run.policies)

    def means(self, metrics: Mapping[str, str], by: str | None = None) -> pl.DataFrame:
        """Averages of the policies over prompts."""
        return runs.means(self.run.origin, self.policies, metrics, by)


def page() -> None:
    """Show the verdict, a metric over budgets, the Pareto front and regret."""
    elements.title(
        "Compare",
        "What policies lose at the same budget. The sentences say which could be the best, by "
        "differences within prompts, which bars of means do not show. Dotted lines are chance: "
        "random sets of the same sizes.",
    )
    run = runs.run()
    if not run.measured:
        st.info("This run has no values of policies, so there is nothing to compare.")
        runs.provenance(run)
        st.stop()
    verdict = st.container()
    comparison = _comparison(run)
    if comparison.metric in METRICS:
        _, lines = runs.verdict(run.origin, run.policies, comparison.metric)
        verdict.text("\n".join(map(visible, lines)))
    _over_budgets(comparison)
    _front(comparison)
    _regret(comparison)
    runs.provenance(run)


def _comparison(run: runs.Run) -> Comparison:
    start = run.measured.index(run.ranking[0]) if run.ranking else 0
    metric = controls.choose("Metric", "metric", run.measured, start)
    values = run.parts[metric].select("variant", "policy", "value").drop_nulls()
    variant = runs.variant(values, metric)
    of_metric = runs.values_of(run.origin, metric, variant).drop_nulls(["policy", "value"])
    parts = {"stage": "layer", **{name: name for name in LABELS if name in of_metric}}
    splits = [name for name, of in parts.items() if of_metric[of].drop_nulls().n_unique() > 1]
    about = "stage: early, middle and late layers of the model; or labels of the prompts"
    split = controls.choose("Split by", "by", ["nothing", *splits], help=about)
    policies = run.policies
    if not isinstance(run.origin, runs.Replay):
        policies = controls.several("Policies", "policies", policies, policies[:FEW])
    if not policies:
        st.info("Choose at least one policy.")
        st.stop()
    by = None if split == "nothing" else split
    wide = line_charts.is_wide(runs.means(run.origin, policies, {metric: variant}, by))
    about = "a scale on which 0 has no place; by default where some values are far above others"
    logarithmic = controls.switch("Logarithmic", "log", about, on=wide)
    return Comparison(run, policies, metric, variant, by, logarithmic)


def _over_budgets(comparison: Comparison) -> None:
    """Show the metric over budgets. Where no policy has a value the page ends."""
    run, metric, by = comparison.run, comparison.metric, comparison.by
    means = comparison.means({metric: comparison.variant}, by)
    if metric in METRICS:
        st.caption(f"{metric.replace('_', ' ')}: {METRICS[metric].summary}.")
    if not means.height:
        st.info("None of these policies has a value of this metric.")
        st.stop()
    if by is not None and means[by].n_unique() > line_charts.PANELS:
        st.caption(
            f"The first {line_charts.PANELS} of {means[by].n_unique()} are drawn; the table has "
            "all."
        )
    line_charts.over_budgets(
        means,
        comparison.styles,
        key="budgets-chart",
        label=line_charts.label(metric),
        by=by,
        logarithmic=comparison.logarithmic,
    )
    elements.prompts(means)
    elements.fidelity(means["fidelity"])
    downloads.table(means, f"{run.name}-{metric}", key="budgets-chart")


def _front(comparison: Comparison) -> None:
    st.subheader("Cost", anchor=False)
    st.markdown(
        "Budgets bind policies differently, so this picture shows the entries that rows really "
        "saw, or the bytes that the cache took or rows read. Filled points are on the front: no "
        "other policy is better at as low a cost."
    )
    first = next(iter(comparison.run.ranking), EVIDENCE[-1])
    names = dict.fromkeys((first, "wipeout"))
    means = comparison.means({name: METRICS[name].main for name in (*COSTS, *names)})
    offered = [name for name in COSTS if name in means["metric"]]
    cost = offered[0] if offered else "entries_seen"
    if len(offered) > 1:
        cost = controls.choose("Against", "cost", offered, where=st.container())
    points = {name: against_entries(means, name, cost) for name in names}
    panels = {line_charts.label(name): part for name, part in points.items() if part.height}
    if not panels:
        st.info(f"This needs `entries_seen`, and `{first}` or `wipeout`, which were not measured.")
        return
    figure = line_charts.against_entries(panels, comparison.styles, COSTS[cost])
    line_charts.draw(figure, "pareto", 100 + 270 * len(panels))
    both = pl.concat(list(panels.values()))
    elements.fidelity(both["fidelity"])
    downloads.table(both, f"{comparison.run.name}-pareto", key="pareto")


def _regret(comparison: Comparison) -> None:
    st.subheader("Regret", anchor=False)
    if "regret" not in comparison.run.measured:
        st.info(
            "This run has no regret. `kvsim replay ... --metric regret` computes the best possible "
            "kept sets for each policy; for the chosen trace there is a switch on the left."
        )
        return
    st.markdown(
        "How much more attention the best possible kept sets retain at the same budget and events. "
        "Nothing retains more, so the regret is the most that a better policy could gain."
    )
    regret = comparison.means({"regret": METRICS["regret"].main}, comparison.by)
    if not regret.height:
        st.info("None of these policies has a regret: no budget binds them.")
        return
    line_charts.over_budgets(
        regret,
        comparison.styles,
        key="regret-chart",
        label=line_charts.label("regret"),
        by=comparison.by,
    )
    elements.fidelity(regret["fidelity"])
    downloads.table(regret, f"{comparison.run.name}-regret", key="regret-chart")
