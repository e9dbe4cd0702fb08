"""The figures by name, with their content, sources and options; loads no matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from kvsim.registry import Registry

if TYPE_CHECKING:
    from kvsim.core.trace import Trace

#: What `kvsim plot` replays for an input: a sweep, one record with its Plans, or one eviction at
#: each ratio. Inputs that are not listed need no policy.
REPLAYS: Final[Mapping[str, Literal["sweep", "plans", "once"]]] = {
    "table": "sweep",
    "record": "sweep",
    "records": "sweep",
    "plans": "plans",
    "evictions": "once",
}
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
        command: the command that draws it, "plot" or another with what it takes.
        prepare: computes the only argument from the traces, and the metrics, where it is not the
            input itself.
    """

    module: str
    summary: str
    inputs: tuple[str, ...]
    options: tuple[str, ...] = ()
    source: str = "kvsim"
    metrics: tuple[str, ...] = ()
    requires: str = ""
    command: str = "plot"
    prepare: Callable[[Sequence[Trace], Sequence[str]], Any] | None = None

    @property
    def replay(self) -> Literal["sweep", "plans", "once"] | None:
        """How policies are replayed for it; None where it shows no policies."""
        return next((REPLAYS[name] for name in self.inputs if name in REPLAYS), None)

    @property
    def runs(self) -> bool:
        """Whether it is drawn from a Table, such as that of runs."""
        return "table" in self.inputs

    @property
    def single(self) -> Literal["trace", "record"] | None:
        """Whether it shows one trace, or one record of it."""
        if {"record", "plans"} & {*self.inputs}:
            return "record"
        return "trace" if "trace" in self.inputs else None

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of the command line that it has, without dashes."""
        return tuple(FLAGS.get(name, name) for name in self.options)

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
        runs = "or a trace and runs" if self.single else "or runs"
        parts = (f"{traces}, {policies}", runs * self.runs, self.requires)
        return "; ".join(filter(None, parts))


_PLACE, _ERRORS = ("layer", "head"), ("weighted_error", "layer_error", "output_error")
_summary, _records = partial(Figure, "kvsim.plots.summary"), partial(Figure, "kvsim.plots.records")
_text = partial(Figure, "kvsim.plots.text", requires="text of tokens")
_events = partial(Figure, "kvsim.plots.events")
_attention = partial(Figure, "kvsim.plots.attention")

_FIGURES: Final[Mapping[str, Figure]] = {
    "over_budgets": _summary(
        "What ranks policies, retained mass and wipe-out, or any metrics, against the budget.",
        ("table",), ("metrics",), metrics=(*_ERRORS, "retained_mass", "wipeout")),
    "pareto": _summary(
        "What ranks policies and wipe-out, or any metrics, against entries seen or bytes.",
        ("table",), ("metrics",),
        metrics=(*_ERRORS, "wipeout", "entries_seen", "bytes_held", "bytes_read")),
    "ranking": _summary(
        "Policies in the order of a metric at each budget, and which could be the best.",
        ("table",), ("metrics",), metrics=_ERRORS),
    "retention_map": _records(
        "Positions that each row sees, and the evicted ones that it would attend to.",
        ("trace", "records"), _PLACE),
    "bursts": _events(
        "Positions that each policy keeps after an event, and the long runs that it evicted.",
        ("trace", "records"), _PLACE, "AMS, Fig. 2"),
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
    "token_text": _text(
        "The text, each token retained, evicted or not yet scored by one head.",
        ("trace", "record"), _PLACE, "G-KV, App. J"),
    "kl_text": _text(
        "The response, each token coloured by its KL, and where the most likely one changes first.",
        ("trace", "table"), metrics=("response_kl_tokens",)),
    "lift_bars": _records(
        "Tokens that are kept more or less often than all tokens.",
        ("trace", "record"), ("layer",), "G-KV, App. I", requires="text of tokens"),
    "reconstruction_error": _attention(
        "Error of a layer's output after one eviction, against the share evicted.",
        ("evictions",), source="Expected Attention, Fig. 6"),
}  # fmt: skip

FIGURES: Final = Registry("figure", "kvsim.figures", (Figure,), _FIGURES)


def plotted() -> list[str]:
    """Return the names of the figures of `kvsim plot`."""
    return [name for name, figure in FIGURES.items() if figure.command == "plot"]
