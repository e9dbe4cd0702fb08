"""Page *Fidelity*: how far each number of a run can be trusted, and what differs between levels."""

from __future__ import annotations

import polars as pl
import streamlit as st

import chosen
import frames
import lines
import runs
import shown
from kvsim.analysis.registry import METRICS
from kvsim.errors import PolicyError

#: What the levels mean, the strongest first.
LEVELS = {
    "exact": "A live run that is fed the recorded tokens would show this very number. So it is for "
    "what the trace alone says, for the first layer, for a layer that was replayed alone, and for "
    "sets that are decided once, at the end of the prompt: no eviction had touched what they are "
    "decided from.",
    "closed": "Measured in a live run in which the policy evicts: errors add up over layers, "
    "queries and keys drift, and the model may write other tokens.",
    "semi": "Policies that drop rows of the prompt on the way down: the layers behind the "
    "selection were computed again from the recorded residual stream with the model's weights, "
    "which is what a live prefill computes. Decoding is not part of it.",
    "open": "Open loop: computed from recorded queries, keys and values, as if the layers below "
    "had not evicted. What a live run adds is left out: errors that compound over layers, and "
    "other tokens.",
}
#: How a run of semi values is made, beside one of `kvsim replay`.
AGAIN = """\
# kvsim capture --model tiny --residual --prompts prompts.jsonl --out traces
# kvsim replay traces/walk.zarr --policy fastkv --set layer=0 --set rows=100 \\
#     --budget 64 --out runs/open
import kvsim
from kvsim.recorder import load_model
from kvsim.sweeps import Run

trace = kvsim.open_trace("traces/walk.zarr")
model, _ = load_model("tiny")
policy = kvsim.policy("fastkv", layer=0, rows=100)
found = kvsim.recompute(trace, policy, 64, model)
Run((found.record,), kvsim.measure(trace, found.record), (), {}).save("runs/semi")
"""
#: In the list of runs beside this one: none.
NOTHING = "no other run"

shown.title(
    "Fidelity",
    "Replay says what a policy would have kept and lost. How far that is what a live run would "
    "show differs from number to number: each bar says which share of the values behind it has "
    "which level.",
)
run = runs.run()
counted = runs.shares(run.origin, ("metric", "layer"))
if not counted.height:
    st.info("This run has no values.")
    runs.provenance(run)
    st.stop()

present = set(counted["fidelity"].cast(pl.String))
for level, said in LEVELS.items():
    share = "" if level in present else " None in this run."
    st.markdown(f"**{level}**: {said}{share}")

st.subheader("By metric", anchor=False)
by_metric = runs.shares(run.origin, ("metric",))
measured = by_metric["metric"].unique(maintain_order=True).to_list()
lines.shares(by_metric, "metric", measured, key="by-metric")
frames.below(by_metric, f"{run.name}-fidelity-by-metric", key="by-metric")

st.subheader("By layer", anchor=False)
left, _ = st.columns([1, 2])
metric = left.selectbox(
    "Metric",
    measured,
    measured.index("output_error") if "output_error" in measured else 0,
    key="metric",
    bind="query-params",
)
by_layer = counted.filter(metric=metric).with_columns(
    place=pl.when(pl.col("layer").is_null())
    .then(pl.lit("no layer"))
    .otherwise(pl.format("layer {}", "layer"))
)
order = by_layer.sort("layer", nulls_last=True)["place"].unique(maintain_order=True).to_list()
lines.shares(by_layer, "place", order, key="by-layer")
if metric in METRICS:
    st.caption(f"{metric.replace('_', ' ')}: {METRICS[metric].summary}.")
frames.below(
    counted.filter(metric=metric), f"{run.name}-fidelity-of-{metric}-by-layer", key="by-layer"
)

st.subheader("The same values at two levels", anchor=False)
others = {name: path for name, path in chosen.runs().items() if runs.Folder.of(path) != run.origin}
left, _ = st.columns([1, 2])
beside = left.selectbox(
    "Beside",
    [NOTHING, *others],
    key="beside",
    bind="query-params",
    help="a run of the same traces, policies and budgets at another level of fidelity",
)
origins = [run.origin]
if beside != NOTHING:
    origins.append(runs.read(others[beside]).origin)
try:
    found = runs.levels(tuple(origins), ())
except PolicyError as error:
    st.warning("These runs cannot be compared.")
    st.text(str(error))
else:
    if found.height:
        st.markdown(
            "The stronger level minus the weaker one, value by value: same trace, policy, budget, "
            "schedule, metric, layer and head. It is what the weaker level left out."
        )
        metrics, variants, _ = st.columns(3)
        which = metrics.selectbox(
            "Metric compared",
            found["metric"].unique(maintain_order=True).to_list(),
            key="compared",
            bind="query-params",
        )
        variant = runs.variant(found.filter(metric=which), which, variants, key="compared_variant")
        chosen_ones = {"metric": which, "variant": variant}
        st.dataframe(
            found.filter(**chosen_ones).drop("params", "prefill", "metric", "variant"),
            hide_index=True,
        )
        by_place = runs.levels(tuple(origins), ("layer",)).filter(**chosen_ones)
        lines.between(by_place, key="between")
        shown.fidelity(found["stronger"].cast(pl.String).to_list())
        frames.below(found, f"{run.name}-levels", key="levels")
        frames.below(by_place, f"{run.name}-levels-of-{which}-by-layer", key="levels-by-layer")
    else:
        st.info(
            "No value is there at two levels. Two kinds of runs would fill this: a prefill that "
            "was computed again (semi) beside its replay (open), as below, and live runs (closed), "
            "which kvsim does not make yet."
        )
        st.code(AGAIN, language="python")
runs.provenance(run)
