"""Page *Answer*, the first: the newest run's verdict, or what two policies lose of a text."""

from __future__ import annotations

import polars as pl
import streamlit as st

from kvsim.analysis.registry import METRICS
from kvsim.analysis.sentences import tabulated
from kvsim.schema import visible

from .. import controls, elements, line_charts, replays, runs

#: Policies that differ in what they miss of the sample.
FIRST, SECOND = "snapkv", "streaming_llm"


def page() -> None:
    """Show the verdict and the chart of a run; without a run, two texts side by side."""
    if controls.runs():
        _run(runs.run())
    else:
        _texts()


def _run(run: runs.Run) -> None:
    elements.title(
        "Answer",
        "Which policies could be the best at each budget of this run. The page *Compare* "
        "has all metrics, *Retention* and *Segments* what a policy keeps of a trace.",
    )
    policies = run.policies
    metric = next(iter(run.ranking), None)
    if metric is None:
        st.info(
            "This run has no metric that ranks policies, so there is no verdict. *Compare* shows "
            "the metrics that it has; another run can be chosen on the left."
        )
        runs.provenance(run)
        return
    comparison, said = runs.verdict(run.origin, policies, metric)
    st.text("\n".join(map(visible, said)))
    if comparison is not None:
        headers, rows = tabulated(comparison)
        shown = [[visible(cell) for cell in row] for row in rows]
        st.dataframe(pl.DataFrame(shown, headers, orient="row"), hide_index=True, key="verdict")
    means = runs.means(run.origin, policies, {metric: METRICS[metric].main})
    if not means.height:
        st.info(f"The page Compare has the variants of {metric} that were measured.")
        runs.provenance(run)
        return
    line_charts.over_budgets(
        means, line_charts.styles(policies), key="answer", label=line_charts.label(metric)
    )
    elements.prompts(means)
    elements.fidelity(means["fidelity"])
    runs.provenance(run)


def _texts() -> None:
    trace = controls.trace()
    st.sidebar.divider()
    policies = {"Policy": ("first", FIRST), "Second policy": ("second", SECOND)}
    names = [controls.policy(label, *choice) for label, choice in policies.items()]
    settings = replays.Settings(
        *(trace, controls.source(), controls.layer(), controls.head()),
        *(controls.budget(trace), controls.interval(trace)),
    )
    elements.title(
        "Answer",
        f"What two policies leave of this text in one KV head of layer {settings.layer}. The "
        "folder has no run yet; with one, this page says which policies could be the best. "
        "*Compare* replays several policies on this trace.",
    )
    results = [replays.replay(settings, name) for name in names]
    shown = [each for each in results if isinstance(each, replays.Replayed)]
    last = trace.n_pos - 1
    if trace.token_text is None:
        st.info("This trace has no text of its tokens; *Retention* has a map of positions.")
        return
    replays.legend({each.name: each.states(last) for each in shown}, settings)
    for name, result, column in zip(names, results, st.columns(len(names)), strict=True):
        with column:
            if isinstance(result, str):
                st.subheader(name, anchor=False)
                replays.unable(result)
            else:
                st.subheader(result.name, anchor=False)
                replays.text(result, last)
    elements.fidelity([each.fidelity for each in shown])
