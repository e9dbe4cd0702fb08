"""Page *Layers*: how layers rank a prompt, where ASL selects, whether attention comes back."""

from __future__ import annotations

import polars as pl
import streamlit as st

import chosen
import frames
import lines
import ranked
import shown
from kvsim.analysis.attention.overlap import default_window
from kvsim.analysis.prompt.ranking import Curve
from kvsim.analysis.prompt.tables import Diagnosis, layer_table
from kvsim.errors import KvsimError
from kvsim.plots.style import COLOURS

BLUE, RED, GREEN, PINK, ORANGE = COLOURS[:5]

trace = chosen.trace()
source = chosen.source()

shown.title(
    "Layers",
    "ASL drops tokens of the prompt behind the first layer where their ranking has settled: where "
    "the variance of ranks over neighbouring layers, relative to that of the first layer tested, "
    "falls below tau. All of this is a property of full attention, as if no layer had selected.",
)
if trace.prompt_len < 2:
    st.info("The prompt of this trace has one token, so there is nothing to rank.")
    st.stop()
knobs = st.columns(5)
window = int(
    knobs[4].number_input(
        "Window",
        1,
        trace.prompt_len - 1,
        min(32, trace.prompt_len - 1),
        key="window",
        bind="query-params",
        help="last rows of the prompt, whose attention ranks the tokens before them",
    )
)
try:
    ranking = ranked.ranking(source, window)
except KvsimError as error:
    st.error("The layers of this trace cannot be ranked.", icon=":material/error:")
    st.text(str(error))
    st.stop()
tau = knobs[0].slider("tau", 0.0, 1.5, 0.3, 0.05, key="tau", bind="query-params")
k = knobs[1].slider(
    "k",
    0,
    ranking.ranked,
    max(1, ranking.ranked // 4),
    key="k",
    bind="query-params",
    help="tokens that go on beside the window; the budget is both together",
)
places = list(range(trace.n_layers))
first = knobs[2].selectbox(
    "First layer",
    places,
    trace.n_layers // 3,
    key="first_layer",
    bind="query-params",
    help="the first layer that is tested",
)
backs = list(range(1, trace.n_layers + 1))
back = knobs[3].selectbox(
    "Look-back",
    backs,
    min(8, trace.n_layers) - 1,
    key="look_back",
    bind="query-params",
    help="layers whose ranks are compared",
)
one = ranked.diagnosis(source, window, k, tau, first, back)
curve = one.curve


def few(curve: Curve) -> str:
    """What a reader of a trace with few layers should know; empty where it has enough."""
    total, tested = curve.n_layers, curve.tested
    if len(tested) > 1:
        return ""
    where = (
        f"can select behind layer {tested[0]} alone, and there the relative variance is 1, or 0 "
        "where no rank moved, by definition"
        if tested
        else "cannot select at all, because behind its first tested layer there is nothing to drop"
    )
    layers = f"{total} layer{'s' * (total > 1)}"
    return (
        f"This trace has {layers}. With layer {curve.first_layer} as the first that is tested ASL "
        f"{where}. A deeper model shows whether ranks settle."
    )


st.info(f"ASL {curve.verdict()}." if not curve.fits else f"{curve.verdict().capitalize()}.")
for remark in filter(None, (few(curve), one.remark and f"Note: {one.remark}.")):
    st.caption(remark)
selected = None if one.layer is None else (float(one.layer), "selects")


def variance(one: Diagnosis) -> None:
    """Relative variance, tau, and the selection layer."""
    total = one.curve.n_layers
    lines.over_layers(
        {
            "relative variance": (one.curve.relative.tolist(), lines.style(BLUE)),
            f"tau {one.curve.rule.tau:g}": ([one.curve.rule.tau] * total, lines.style(RED, "dash")),
        },
        key="variance",
        label="rank variance / first tested",
        mark=selected,
    )


left, right = st.columns(2)
with left:
    st.subheader("Do ranks settle?", anchor=False)
    variance(one)
with right:
    st.subheader("Do layers agree?", anchor=False)
    chance = [one.jaccard_chance if place else float("nan") for place in places]
    lines.over_layers(
        {
            "Jaccard with the layer before": (one.jaccard.tolist(), lines.style(GREEN)),
            "chance": (chance, lines.style(lines.GREY, "dot")),
        },
        key="jaccard",
        label="overlap of first k tokens",
        top=1.05,
        mark=selected,
    )
left, right = st.columns([1, 1])
with left:
    st.subheader("How even are scores?", anchor=False)
    table = layer_table([one])
    lines.over_layers(
        {
            "entropy of the scores": (table["entropy"].to_list(), lines.style(BLUE)),
            f"equal scores: log {ranking.ranked}": (
                table["entropy_uniform"].to_list(),
                lines.style(lines.GREY, "dot"),
            ),
        },
        key="entropy",
        label="entropy, nats",
        mark=selected,
    )
with right:
    st.subheader("How sparse is attention?", anchor=False)
    sparsity = ranked.sparsity(source)
    lines.over_layers(
        {
            f"p = {p:g}, maximum {said}": (
                sparsity.filter(p=p)[name].to_list(),
                lines.style(colour, dash),
            )
            for p, dash in zip(sparsity["p"].unique().sort(), ("solid", "dash"), strict=True)
            for name, said, colour in (
                ("sequence", "over all keys", BLUE),
                ("behind_sink", "behind the sink", RED),
            )
        },
        key="sparsity",
        label="share of keys below p x maximum",
        top=1.05,
    )
frames.below(table, f"{trace.name}-layers", key="layers", what="Table of ranks and scores")
frames.below(sparsity, f"{trace.name}-sparsity", key="sparsity", what="Table of sparsity")
shown.fidelity(["exact"])

st.subheader("Rank pattern", anchor=False)
st.markdown(
    f"Ranks, of {ranking.ranked}, of the tokens that are among the first k in one of the last "
    f"{curve.look_back} layers. A column that keeps its colour downwards is a token whose rank has "
    "settled."
)
order = st.segmented_control(
    "Order of tokens",
    ["rank", "position"],
    default="rank",
    key="order",
    bind="query-params",
    required=True,
    help="rank: that in the last layer",
)
pattern = ranked.pattern(source, window, curve.look_back, k, str(order or "rank"))
if len(pattern.tokens):
    ranked.draw(pattern, ranking.ranked, trace.token_text, one.layer)
    shown.fidelity(["exact"])
else:
    st.info("The window alone goes on, so no token has a rank to show; give a larger k.")

st.subheader("Does attention come back?", anchor=False)
st.markdown(
    "Of the top keys of the last rows, the share that earlier windows of rows had among theirs "
    "(G-KV, Fig. 1), against the share of keys that count as top. Above chance, a key that "
    "mattered before matters again."
)
chosen_layer = chosen.layer()
st.caption(f"Layer {chosen_layer}; another one is chosen on the left.")
where, _ = st.columns([1, 3])
longest = (trace.n_pos - 1) // 4
if longest < 1:
    st.info("This trace is too short for four windows of rows.")
    st.stop()
rows = int(
    where.number_input(
        "Rows of a window",
        1,
        longest,
        max(1, default_window(trace.n_pos)),
        key="rows_of_window",
        bind="query-params",
    )
)
overlap = ranked.overlap(source, chosen_layer, rows)
names = {
    "oldest window": ("oldest", lines.style(BLUE)),
    "second": ("second", lines.style(RED)),
    "third": ("third", lines.style(GREEN)),
    "union of the three": ("union", lines.style(PINK)),
    "equal budget": ("equal_budget", lines.style(ORANGE)),
    "chance, one set": ("chance", lines.style(lines.GREY, "dot")),
    "chance, union": ("chance_union", lines.style(PINK, "dot", marker=False)),
}
lines.over_layers(
    {name: (overlap[column].to_list(), style) for name, (column, style) in names.items()},
    key="overlap",
    label="share of the last top keys",
    x=overlap["share"].to_list(),
    x_label="share of keys that count as top",
    top=1.05,
    height=420,
)
shown.fidelity(["exact"])
frames.below(
    overlap.with_columns(layer=pl.lit(chosen_layer)), f"{trace.name}-overlap", key="overlap"
)
