"""The figures by name, with their content, sources and options.

`kvsim plot`, its help and the table of docs/figures.md read this. Nothing here loads matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from kvsim.registry import Registry

#: What `kvsim plot` replays for an input: a sweep, one record with its Plans, or one eviction at
#: each ratio. Inputs that are not listed need no policy.
REPLAYS: Final[Mapping[str, Literal["sweep", "plans", "once"]]] = {
    "table": "sweep",
    "record": "sweep",
    "records": "sweep",
    "plans": "plans",
    "evictions": "once",
}
#: Inputs that are of one trace.
SINGLE: Final = frozenset({"trace", "expectation", "normality", "projections"})
#: Options of the command line whose keyword has another name.
FLAGS: Final[Mapping[str, str]] = {"layers": "layer", "metrics": "metric"}


@dataclass(frozen=True)
class Figure:
    """A figure: a function that returns a matplotlib Figure.

    Attributes:
        module: the module that has a function with the figure's name.
        summary: what it shows, in one sentence.
        inputs: its positional arguments.
        options: keywords that the command line can set.
        source: the paper and figure that it follows, or "kvsim".
        metrics: those that its Table needs, of which traces have recorded what they read.
        requires: what a trace or a policy must have, for users.
        command: the command that draws it.
    """

    module: str
    summary: str
    inputs: tuple[str, ...]
    options: tuple[str, ...] = ()
    source: str = "kvsim"
    metrics: tuple[str, ...] = ()
    requires: str = ""
    command: str = "plot"

    @property
    def replay(self) -> Literal["sweep", "plans", "once"] | None:
        """How policies are replayed for it; None where it shows no policies."""
        return next((REPLAYS[name] for name in self.inputs if name in REPLAYS), None)

    @property
    def runs(self) -> bool:
        """Whether it is drawn from a Table alone, so that run folders will do."""
        return self.inputs == ("table",)

    @property
    def single(self) -> Literal["trace", "record"] | None:
        """Whether it shows one trace, or one record of it."""
        if {"record", "plans"} & {*self.inputs}:
            return "record"
        return "trace" if SINGLE & {*self.inputs} else None

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of the command line that it has, without dashes."""
        more = ("ratio",) if self.replay == "once" else ()
        return (*(FLAGS.get(name, name) for name in self.options), *more)

    @property
    def needs(self) -> str:
        """Sources and policies that the command line needs for it, in words."""
        traces = "one trace" if self.single else "traces"
        policies = {
            None: "no policy",
            "once": "policies, no budget",
            "plans": "one policy, one budget",
            "sweep": "one policy, one budget" if self.single == "record" else "policies, budgets",
        }[self.replay]
        parts = (f"{traces}, {policies}", "or runs" if self.runs else "", self.requires)
        return "; ".join(filter(None, parts))


_PLACE, _ERRORS = ("layer", "head"), ("weighted_error", "layer_error", "output_error")
_summary, _records = partial(Figure, "kvsim.plots.summary"), partial(Figure, "kvsim.plots.records")
_events, _attention = (
    partial(Figure, "kvsim.plots.events"),
    partial(Figure, "kvsim.plots.attention"),
)
_normality = partial(Figure, "kvsim.plots.normality")
_layers = partial(Figure, "kvsim.plots.layers", command="layers")

_FIGURES: Final[Mapping[str, Figure]] = {
    "over_budgets": _summary(
        "What ranks policies, retained mass and wipe-out, or any metrics, against the budget.",
        ("table",), ("metrics",), metrics=(*_ERRORS, "retained_mass", "wipeout")),
    "pareto": _summary(
        "What ranks policies and wipe-out, or any metrics, against entries seen or bytes.",
        ("table",), ("metrics",),
        metrics=(*_ERRORS, "wipeout", "entries_seen", "bytes_held", "bytes_read")),
    "ranking": _summary(
        "Policies in the order of a metric at each budget, and which differ beyond chance.",
        ("table",), ("metrics",), metrics=_ERRORS),
    "retention_map": _records(
        "Positions that each row sees, and the evicted ones that it would attend to.",
        ("trace", "records"), _PLACE),
    "bursts": _events(
        "Positions that each policy keeps after an event, and the long runs that it evicted.",
        ("trace", "records"), (*_PLACE, "zoom"), "AMS, Fig. 2"),
    "error_over_rows": _records(
        "Output error of every row after the prompt.",
        ("trace", "records")),
    "middle_coverage": _summary(
        "Share kept of each twentieth of the sequence, mean over events.",
        ("traces", "records"), _PLACE, "AMS, Fig. 4"),
    "position_density": _summary(
        "Positions of the entries that the last event keeps, as a density.",
        ("traces", "records"), _PLACE, "G-KV, Fig. 7"),
    "iou_by": _summary(
        "Retained-set IoU by stage of the model, or by task, domain or level of the prompts.",
        ("table",), ("by",), "AMS, Fig. 5, Table 14", ("retained_iou",), "at least two events"),
    "needle": Figure(
        "kvsim.plots.haystack",
        "Share kept of a needle, or right answers of a live run, by depth and length.",
        ("table",), ("metrics",), metrics=("needle_recall",),
        requires="prompts with a needle, length and depth"),
    "overlap_curves": _attention(
        "Share of the last rows' top keys that were top keys of earlier rows.",
        ("traces",), ("layers",), "G-KV, Fig. 1"),
    "sparsity_curves": _attention(
        "Share of keys that score below p times the maximum, over p, full and compressed caches.",
        ("table",), ("layers",), "G-KV, Fig. 9", ("sparsity", "sparsity_compressed")),
    "mass_curve": _events(
        "Cumulative attention mass, the segments that it is cut into, and their quotas.",
        ("trace", "plans"), _PLACE, "AMS, Fig. 3", requires="`ams` around any scorer"),
    "token_text": _records(
        "The text, each token retained, evicted or not yet scored by one head.",
        ("trace", "record"), _PLACE, "G-KV, App. J", requires="text of tokens"),
    "lift_bars": _records(
        "Tokens that are kept more or less often than all tokens.",
        ("trace", "record"), ("layer",), "G-KV, App. I", requires="text of tokens"),
    "reconstruction_error": _attention(
        "Error of a layer's output after one eviction, against the share evicted.",
        ("evictions",), source="Expected Attention, Fig. 6"),
    "expected_observed": _attention(
        "Expected against observed attention on each key, after each step of the expectation.",
        ("expectation",), ("layers",), "Expected Attention, Fig. 10"),
    "agreement_steps": _attention(
        "Agreement of expected and observed attention after each step of the expectation.",
        ("trace_table",), ("layers",), metrics=("expectation_steps",)),
    "attention_loss": _attention(
        "Observed attention lost as keys are removed in the order of each step.",
        ("trace_table",), ("layers",), metrics=("attention_loss",)),
    "state_ridges": _normality(
        "Histograms of 32 dimensions of a layer's queries, next to normal distributions.",
        ("trace",), ("layer",), "Expected Attention, Figs. 1, 7-9"),
    "state_quantiles": _normality(
        "Quantiles of 32 dimensions of a layer's queries against normal quantiles.",
        ("trace",), ("layer",), "Expected Attention, Figs. 1, 7-9"),
    "normal_distance": _normality(
        "Distance of each head's queries from normal.",
        ("normality",)),
    "projection_gap": _normality(
        "Mean exponential of the projections of queries on keys, next to normal projections.",
        ("projections",)),
    "variance_curves": _layers(
        "Relative rank variance by layer, with the threshold and the selection layer.",
        ("diagnoses",), source="ASL, Fig. 6"),
    "gold_recall": _layers(
        "Share of the gold tokens among those that each layer would select.",
        ("diagnoses",)),
    "selection_histogram": _layers(
        "Number of traces that select at each layer.",
        ("distribution",), source="ASL, Figs. 9-10"),
    "layer_overlap": _layers(
        "Jaccard index of each layer's top tokens with the layer before, and entropy.",
        ("diagnoses",)),
    "layer_attention": _layers(
        "Attention of the last rows of the prompt in every layer.",
        ("trace",), source="ASL, Fig. 3"),
    "selection_grid": _layers(
        "Selection layer over first tested layer and look-back.",
        ("grid",), source="ASL, Fig. 8"),
    "rank_pattern": _layers(
        "Ranks in every layer of the tokens that the last layers rank first.",
        ("diagnosis",), source="ASL, Fig. 4"),
    "rank_bumps": _layers(
        "Ranks of the 30 best tokens of the last layer through all layers.",
        ("diagnosis",), source="ASL, Fig. 4"),
}  # fmt: skip

FIGURES: Final = Registry("figure", "kvsim.figures", (Figure,), _FIGURES)


def plotted() -> list[str]:
    """Return the names of the figures of `kvsim plot`."""
    return [name for name, figure in FIGURES.items() if figure.command == "plot"]
