"""Page *Layers*: how layers rank a prompt, where ASL selects, whether attention comes back."""

from __future__ import annotations

import polars as pl
import streamlit as st

from kvsim import Trace
from kvsim.analysis.attention.overlap import default_window
from kvsim.analysis.prompt.ranking import Curve, Ranking
from kvsim.analysis.prompt.tables import Diagnosis, layer_table
from kvsim.errors import KvsimError
from kvsim.plots.style import COLOURS

from .. import cache, controls, downloads, elements, line_charts, rankings, readings

BLUE, _, GREEN, PINK, ORANGE, SKY = COLOURS[:6]

#: Curves of the overlap of windows by column of the table.
OVERLAPS = {
    "oldest": ("oldest window", line_charts.style(BLUE)),
    "second": ("second", line_charts.style(SKY)),
    "third": ("third", line_charts.style(GREEN)),
    "union": ("union of the three", line_charts.style(PINK)),
    "equal_budget": ("equal budget", line_charts.style(ORANGE)),
    "chance": ("chance, one set", line_charts.style(line_charts.GREY, "dot")),
    "chance_union": ("chance, union", line_charts.style(PINK, "dot", marker=False)),
}


def page() -> None:
    """Show ASL's test on the chosen trace, ranks of tokens, and the overlap of windows."""
    trace, source = controls.trace(), controls.source()
    elements.title(
        "Layers",
        "ASL drops tokens of the prompt after the first layer where their ranking has settled: "
        "where the variance of ranks over neighbouring layers, relative to that of the first layer "
        "tested, falls below tau. All numbers are of full attention, as if no layer had selected.",
    )
    if trace.prompt_len < 2:
        st.info("The prompt of this trace has one token, so there is nothing to rank.")
        st.stop()
    ranking, diagnosis = _diagnosis(trace, source)
    curve, remark = diagnosis.curve, diagnosis.remark
    verdict = curve.verdict()
    st.info(f"{verdict.capitalize()}." if curve.fits else f"ASL {verdict}.")
    for note in filter(None, (_few(curve), remark and f"Note: {remark}.")):
        st.caption(note)
    _curves(trace, source, ranking, diagnosis)
    _pattern(trace, source, ranking, diagnosis)
    _overlap(trace, source)


def _diagnosis(trace: Trace, source: cache.Source) -> tuple[Ranking, Diagnosis]:
    """Read the controls and rank the prompt. Where it cannot be ranked the page ends."""
    side = st.sidebar
    window = int(
        side.number_input(
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
        ranking = rankings.ranking(source, window)
    except KvsimError as error:
        st.error("The layers of this trace cannot be ranked.", icon=":material/error:")
        st.text(str(error))
        st.caption("Choose another trace on the left.")
        st.stop()
    tau = side.slider("tau", 0.0, 1.5, 0.3, 0.05, key="tau", bind="query-params")
    k = side.slider(
        "k",
        1,
        max(2, ranking.ranked),  # a slider has two ends
        max(1, ranking.ranked // 4),
        key="k",
        bind="query-params",
        help="tokens that are propagated besides the window; the budget is their sum",
    )
    first = side.selectbox(
        "First layer",
        list(range(trace.n_layers)),
        trace.n_layers // 3,
        key="first_layer",
        bind="query-params",
        help="the first layer that is tested",
    )
    look_back = side.selectbox(
        "Look-back",
        list(range(1, trace.n_layers + 1)),
        min(8, trace.n_layers) - 1,
        key="look_back",
        bind="query-params",
        help="layers whose ranks are compared",
    )
    return ranking, rankings.diagnosis(source, window, k, tau, first, look_back)


def _few(curve: Curve) -> str:
    """What users should know of a trace with few layers; empty where it has enough."""
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


def _curves(trace: Trace, source: cache.Source, ranking: Ranking, diagnosis: Diagnosis) -> None:
    """Show variance, agreement, entropy and sparsity by layer."""
    curve = diagnosis.curve
    selected = None if diagnosis.layer is None else (float(diagnosis.layer), "selects")
    table = layer_table([diagnosis])
    left, right = st.columns(2)
    with left:
        st.subheader("Do ranks settle?", anchor=False)
        line_charts.over_layers(
            {
                "relative variance": (
                    table["relative_variance"].to_list(),
                    line_charts.style(BLUE),
                ),
                f"tau {curve.rule.tau:g}": (
                    [curve.rule.tau] * trace.n_layers,
                    line_charts.style(ORANGE, "dash"),
                ),
            },
            key="variance",
            label="rank variance / first tested",
            mark=selected,
        )
        elements.reading(
            readings.ends(
                *("relative variance", table["relative_variance"].to_list()),
                *("tau", [curve.rule.tau] * trace.n_layers),
            )
        )
    with right:
        st.subheader("Do layers agree?", anchor=False)
        line_charts.over_layers(
            {
                "Jaccard with the layer before": (
                    table["jaccard"].to_list(),
                    line_charts.style(GREEN),
                ),
                "chance": (
                    table["jaccard_chance"].to_list(),
                    line_charts.style(line_charts.GREY, "dot"),
                ),
            },
            key="jaccard",
            label="overlap of first k tokens",
            top=1.05,
            mark=selected,
        )
        elements.reading(
            readings.ends(
                *("overlap", table["jaccard"].to_list()),
                *("chance", table["jaccard_chance"].to_list()),
            )
        )
    left, right = st.columns([1, 1])
    with left:
        st.subheader("How even are scores?", anchor=False)
        line_charts.over_layers(
            {
                "entropy of the scores": (table["entropy"].to_list(), line_charts.style(BLUE)),
                f"equal scores: log {ranking.ranked}": (
                    table["entropy_uniform"].to_list(),
                    line_charts.style(line_charts.GREY, "dot"),
                ),
            },
            key="entropy",
            label="entropy, nats",
            mark=selected,
        )
        elements.reading(
            readings.ends(
                *("entropy", table["entropy"].to_list()),
                *("equal scores", table["entropy_uniform"].to_list()),
            )
        )
    with right:
        st.subheader("How sparse is attention?", anchor=False)
        sparsity = rankings.sparsity(source)
        line_charts.over_layers(
            {
                f"p = {p:g}, maximum {keys}": (
                    sparsity.filter(p=p)[name].to_list(),
                    line_charts.style(colour, dash),
                )
                for p, dash in zip(sparsity["p"].unique().sort(), ("solid", "dash"), strict=True)
                for name, keys, colour in (
                    ("sequence", "over all keys", BLUE),
                    ("behind_sink", "behind the sink", ORANGE),
                )
            },
            key="sparsity",
            label="share of keys below p x maximum",
            top=1.05,
        )
        elements.reading(readings.sparsity(sparsity))
    downloads.table(table, f"{trace.name}-layers", key="layers", what="Table of ranks and scores")
    downloads.table(sparsity, f"{trace.name}-sparsity", key="sparsity", what="Table of sparsity")
    elements.fidelity(["exact"])


def _pattern(trace: Trace, source: cache.Source, ranking: Ranking, diagnosis: Diagnosis) -> None:
    """Show the ranks of the tokens that the last layers rank first."""
    curve = diagnosis.curve
    st.subheader("Rank pattern", anchor=False)
    st.markdown(
        f"Ranks, of {ranking.ranked}, of the tokens that are among the first k in one of the last "
        f"{curve.look_back} layers. A column that keeps its colour downwards is a token whose rank "
        "has settled."
    )
    order = st.sidebar.segmented_control(
        "Order of tokens in the pattern",
        ["rank", "position"],
        default="rank",
        key="order",
        bind="query-params",
        required=True,
        help="rank: that in the last layer",
    )
    window = ranking.rule.window
    pattern = rankings.pattern(source, window, curve.look_back, curve.k, str(order or "rank"))
    if len(pattern.tokens):
        rankings.draw(pattern, ranking.ranked, trace.token_text, diagnosis.layer)
        elements.reading(readings.pattern(pattern, curve.k, curve.look_back))
        elements.fidelity(["exact"])
    else:
        st.info("Only the window is propagated, so no token has a rank; give a larger k.")


def _overlap(trace: Trace, source: cache.Source) -> None:
    """Show the overlap of the top keys of windows of one layer."""
    st.subheader("Does attention come back?", anchor=False)
    st.markdown(
        "Of the top keys of the last rows, the share that earlier windows of rows had among theirs "
        "(G-KV, Fig. 1), against the share of keys that count as top. Above chance, a key that "
        "mattered before matters again."
    )
    layer = controls.layer()
    longest = (trace.n_pos - 1) // 4
    if longest < 1:
        st.info("This trace is too short for four windows of rows.")
        st.stop()
    rows = int(
        st.sidebar.number_input(
            "Rows of a window of overlap",
            1,
            longest,
            max(1, default_window(trace.n_pos)),
            key="rows_of_window",
            bind="query-params",
        )
    )
    overlap = rankings.overlap(source, layer, rows)
    line_charts.over_layers(
        {name: (overlap[column].to_list(), style) for column, (name, style) in OVERLAPS.items()},
        key="overlap",
        label="share of the last top keys",
        x=overlap["share"].to_list(),
        x_label="share of keys that count as top",
        top=1.05,
        height=380,
    )
    elements.reading(f"Layer {layer}. {readings.overlap(overlap)}")
    elements.fidelity(["exact"])
    downloads.table(
        overlap.with_columns(layer=pl.lit(layer)), f"{trace.name}-overlap", key="overlap"
    )
