"""Page *Compare*: policies against each other, over budgets and prompts."""

from __future__ import annotations

import polars as pl
import streamlit as st

import frames
import lines
import runs
import shown
from kvsim.analysis.registry import METRICS
from kvsim.errors import PolicyError
from kvsim.plots.summary import front
from kvsim.schema import LABELS

#: Policies that are shown at first, where a run has many.
FEW = 8

shown.title(
    "Compare",
    "What policies lose at the same budget. Each point is a mean over prompts, each bar its 95 % "
    "bootstrap interval: where bars of two policies overlap, look at the paired differences below, "
    "which compare prompt by prompt. Dotted is what random sets of the same sizes would reach.",
)
run = runs.run()
known = run.best.filter(pl.col("policy").is_not_null(), pl.col("value").is_not_null())
measured = set(known["metric"].unique())
listed = [*(name for name in METRICS if name in measured), *sorted(measured - set(METRICS))]
if not listed:
    st.info("This run has no values of policies, so there is nothing to compare.")
    runs.provenance(run)
    st.stop()

metrics, variants, splits, bases, scales = st.columns([3, 3, 3, 3, 2], vertical_alignment="bottom")
metric = metrics.selectbox(
    "Metric",
    listed,
    listed.index("output_error") if "output_error" in listed else 0,
    key="metric",
    bind="query-params",
)
variant = runs.variant(known.filter(metric=metric), metric, variants)
of_metric = known.filter(metric=metric, variant=variant)
layered = of_metric["layer"].drop_nulls().n_unique() > 1
split = splits.selectbox(
    "Split by",
    [
        "nothing",
        *(["stage"] if layered else []),
        *(name for name in LABELS if of_metric[name].drop_nulls().n_unique() > 1),
    ],
    key="by",
    bind="query-params",
    help="stage: early, middle and late layers of the model; domain, task and level of the prompts",
)
by = None if split == "nothing" else split
logarithmic = scales.toggle(
    "Log", key="log", bind="query-params", help="a logarithmic scale, on which 0 has no place"
)
policies = run.policies
if isinstance(run.origin, runs.Folder):
    policies = st.multiselect(
        "Policies", policies, policies[:FEW], key="policies", bind="query-params"
    )
if not policies:
    st.info("Choose at least one policy.")
    st.stop()
base = bases.selectbox(
    "Beside", policies, key="base", bind="query-params", help="what others are compared with"
)

styles = lines.styles(run.policies)


def labelled(name: str) -> str:
    """A metric with its unit and what is better."""
    if name not in METRICS:
        return shown.shortened(name, 40)
    what = METRICS[name]
    better = f", {what.better} is better" if what.better else ""
    return f"{name.replace('_', ' ')} ({what.unit}{better})"


found = runs.means(run.origin, policies, {metric: variant}, by)
if metric in METRICS:
    st.caption(f"{metric.replace('_', ' ')}: {METRICS[metric].summary}.")
if not found.height:
    st.info("None of these policies has a value of this metric.")
    st.stop()
if by is not None and found[by].n_unique() > lines.PANELS:
    st.caption(f"The first {lines.PANELS} of {found[by].n_unique()} are drawn; the table has all.")
lines.over_budgets(
    found, styles, key="budgets-chart", label=labelled(metric), by=by, logarithmic=logarithmic
)
fewest, most = (int(found["n"].sort()[end]) for end in (0, -1))
if most == 1:
    st.caption(
        "One prompt: nothing is known of others, so there is no interval and no bar is drawn."
    )
elif fewest == most:
    st.caption(f"{most} prompts.")
else:
    st.caption(f"{fewest} to {most} prompts; a point of one prompt alone has no bar.")
shown.fidelity(found["fidelity"].cast(pl.String).to_list())
if run.best.height < run.table.height:
    st.caption(
        "Some values of this run are there at several levels of fidelity; here the strongest "
        "counts, and the page *Fidelity* compares them."
    )
frames.below(found, f"{run.name}-{metric}", key="budgets-chart")

st.subheader("Paired differences", anchor=False)
if len(policies) < 2:
    st.info("Choose a second policy to compare with.")
else:
    st.markdown(
        "Each policy minus the one beside it, prompt by prompt at the same budget. An interval "
        "without 0 is a difference that other prompts would likely show too."
    )
    try:
        gaps = runs.means(run.origin, policies, {metric: variant}, by, base)
    except PolicyError as error:
        st.text(str(error))
    else:
        if gaps.height:
            lines.over_budgets(
                gaps,
                styles,
                key="gaps",
                label="difference",
                by=by,
                zero=True,
            )
            frames.below(gaps, f"{run.name}-{metric}-beside-{base}", key="gaps")
        else:
            st.info("No prompt has this metric of both at the same budget.")

st.subheader("What it costs", anchor=False)
st.markdown(
    "Budgets bind policies differently, so here each is drawn against the entries that rows really "
    "saw. Filled: no other one is better with as few entries; those are the ones to choose from."
)
shared = {name: METRICS[name].main for name in ("entries_seen", "output_error", "wipeout")}
costs = runs.means(run.origin, policies, shared)
key = ["policy", "params", "asked", "interval", "prefill"]
seen = costs.filter(metric="entries_seen").select(*key, seen="mean")
panels = {}
for name in ("output_error", "wipeout"):
    part = costs.filter(metric=name).join(seen, on=key, nulls_equal=True, maintain_order="left")
    if part.height:
        panels[labelled(name)] = part.with_columns(
            best=front(part, higher=METRICS[name].better == "higher")
        )
if panels:
    # wipe-out of the best ones is 0, which has no place on a logarithmic scale
    scaled = [labelled("output_error")] if logarithmic else []
    lines.against_entries(panels, styles, key="pareto", logarithmic=scaled)
    both = pl.concat(list(panels.values()))
    shown.fidelity(both["fidelity"].cast(pl.String).to_list())
    frames.below(both, f"{run.name}-pareto", key="pareto")
else:
    st.info("This takes `entries_seen`, and `output_error` or `wipeout`, which were not measured.")

st.subheader("Regret", anchor=False)
if "regret" in measured:
    st.markdown(
        "How much more attention a mass oracle retains on the same terms: it knows the future and "
        "keeps what later rows attend to most. What is left of it a better policy could gain."
    )
    regret = runs.means(run.origin, policies, {"regret": METRICS["regret"].main}, by)
    if regret.height:
        lines.over_budgets(regret, styles, key="regret-chart", label=labelled("regret"), by=by)
        shown.fidelity(regret["fidelity"].cast(pl.String).to_list())
        frames.below(regret, f"{run.name}-regret", key="regret-chart")
    else:
        st.info("None of these policies has a regret: no budget binds them.")
else:
    st.info(
        "This run has no regret. `kvsim replay ... --regret` replays a mass oracle beside each "
        "policy; for the chosen trace there is a switch above."
    )
runs.provenance(run)
