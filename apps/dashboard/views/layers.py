"""Page *Layers*: how layers rank a prompt, where ASL selects, whether attention comes back."""

from __future__ import annotations

import polars as pl
import streamlit as st

from kvsim import Trace
from kvsim.analysis.attention.windows import default_window
from kvsim.errors import KvsimError
from kvsim.plots.style import COLOURS
from kvsim.schema import plural
from kvsim.studies.layers.ranking import Curve, Ranking
from kvsim.studies.layers.tables import Diagnosis, layer_table

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
    curve = diagnosis.curve
    verdict = curve.verdict()
    st.info(f"{verdict.capitalize()}." if curve.fits else f"ASL {verdict}.")
    if few := _few(curve):
        st.caption(few)
    _curves(trace, source, ranking, diagnosis)
    _pattern(trace, source, ranking, diagnosis)
    _overlap(trace, source)


def _diagnosis(trace: Trace, source: cache.Source) -> tuple[Ranking, Diagnosis]:
    """Read the controls and rank the prompt. Where it cannot be ranked the page ends."""
    most = trace.prompt_len - 1
    about = "last rows of the prompt, whose attention ranks the tokens before them"
    window = controls.number("Window", "window", (1, most), min(32, most), help=about)
    try:
        ranking = rankings.ranking(source, window)
    except KvsimError as error:
        what = "The layers of this trace cannot be ranked."
        elements.stop(what, error, "Choose another trace on the left.")
    tau = st.sidebar.slider("tau", 0.0, 1.5, 0.3, 0.05, key="tau", bind="query-params")
    k = st.sidebar.slider(
        "k",
        1,
        max(2, ranking.ranked),  # a slider has two ends
        max(1, ranking.ranked // 4),
        key="k",
        bind="query-params",
        help="tokens that are propagated besides the window; the budget is their sum",
    )
    n, about = trace.n_layers, "the first layer that is tested"
    first = controls.choose("First layer", "first_layer", range(n), n // 3, help=about)
    about = "layers whose ranks are compared"
    backs = range(1, n + 1)
    look_back = controls.choose("Look-back", "look_back", backs, min(8, n) - 1, help=about)
    return ranking, rankings.diagnosis(source, window, k, tau, first, look_back)


def _few(curve: Curve) -> str:
    """Remark on a trace with few layers; empty where it has enough."""
    total, tested = curve.n_layers, curve.tested
    if len(tested) > 1:
        return ""
    where = (
        f"can select behind layer {tested[0]} alone, and there the relative variance is 1, or 0 "
        "where no rank moved, by definition"
        if tested
        else "cannot select at all, because behind its first tested layer there is nothing to drop"
    )
    return (
        f"This trace has {plural(total, 'layer')}. With layer {curve.first_layer} as the first "
        f"that is tested ASL {where}. A deeper model shows whether ranks settle."
    )


def _curves(trace: Trace, source: cache.Source, ranking: Ranking, diagnosis: Diagnosis) -> None:
    curve = diagnosis.curve
    selected = None if diagnosis.layer is None else (float(diagnosis.layer), "selects")
    table = layer_table([diagnosis])
    numbers = {name: table[name].to_list() for name in table.columns}
    taus = [curve.rule.tau] * trace.n_layers
    dotted = line_charts.style(line_charts.GREY, "dot")
    left, right = st.columns(2)
    with left:
        st.subheader("Do ranks settle?", anchor=False)
        variance = numbers["relative_variance"]
        line_charts.over_layers(
            {
                "relative variance": (variance, line_charts.style(BLUE)),
                f"tau {curve.rule.tau:g}": (taus, line_charts.style(ORANGE, "dash")),
            },
            key="variance",
            label="rank variance / first tested",
            mark=selected,
        )
        elements.reading(readings.ends("relative variance", variance, "tau", taus))
    with right:
        st.subheader("Do layers agree?", anchor=False)
        overlap, chance = numbers["jaccard"], numbers["jaccard_chance"]
        line_charts.over_layers(
            {
                "Jaccard with the layer before": (overlap, line_charts.style(GREEN)),
                "chance": (chance, dotted),
            },
            key="jaccard",
            label="overlap of first k tokens",
            top=1.05,
            mark=selected,
        )
        elements.reading(readings.ends("overlap", overlap, "chance", chance))
    left, right = st.columns(2)
    with left:
        st.subheader("How even are scores?", anchor=False)
        entropy, equal = numbers["entropy"], numbers["entropy_uniform"]
        line_charts.over_layers(
            {
                "entropy of the scores": (entropy, line_charts.style(BLUE)),
                f"equal scores: log {ranking.ranked}": (equal, dotted),
            },
            key="entropy",
            label="entropy, nats",
            mark=selected,
        )
        elements.reading(readings.ends("entropy", entropy, "equal scores", equal))
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
    start = max(1, default_window(trace.n_pos))
    rows = controls.number("Rows of a window of overlap", "rows_of_window", (1, longest), start)
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
