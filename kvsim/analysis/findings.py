"""What a trace says before any policy evicts, as rows of a Table.

One value per row, by the names in `FINDINGS`: what Devoto, Jeblick and Jegou (Expected Attention,
arXiv 2510.00636) assume of queries and attention, how layers rank a prompt after Taniguchi et al.
(ASL, arXiv 2601.07667), and one question of G-KV (arXiv 2512.00504). Each is a number of another
module of this package, with the choices that make it one number per trace, layer and head:

    cut     the prompt is the past and the response the future; the first 4 positions are sinks
    k       tokens that go on beside ASL's window: 10, 25 and 50 % of those before it, by default.
            ASL's budgets are 2 to 50 % of its prompts; a share means the same in prompts of any
            length, a number of tokens (such as a run's budget less the window) can be given
    rule    ASL's defaults. A variant names k and tau, and look-back or first layer where they are
            not the rule's: a quarter, half and double of its look-back, as many layers as there
            are, and the layers at a sixth and at half of the depth

What a trace is too short for has no rows. A selection layer that does not exist is null: the trace
was asked and never selects. Everything is a property of full attention over recorded queries and
keys, so every value is `exact`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.analysis.attention.agreement import spearman
from kvsim.analysis.attention.expectation import STEPS, Expectation, expected_and_observed
from kvsim.analysis.attention.fit import LEAST_SAMPLES, normal_ks
from kvsim.analysis.attention.normality import Normality, state_normality
from kvsim.analysis.attention.projections import Projections, key_projections
from kvsim.analysis.attention.windows import WINDOW, row_blocks, window_scores
from kvsim.analysis.prompt.ranking import Curve, Ranking, ranking
from kvsim.analysis.registry import mean_known
from kvsim.analysis.subject import Cells
from kvsim.analysis.table import COLUMNS
from kvsim.core.trace import Trace
from kvsim.engine.source import windows
from kvsim.errors import PolicyError, suggest
from kvsim.policies.asl import ASL, Selecting
from kvsim.schema import LABELS

Floats = NDArray[np.float64]

#: k where nothing else is asked for, as shares of the tokens before ASL's window.
SHARES = ("10%", "25%", "50%")

#: ASL's thresholds, Table 9.
TAUS = (0.2, 0.3, 0.4, 0.5, 0.6)

#: First positions that are no keys and no samples.
SINK = 4


@dataclass(frozen=True)
class Analysis:
    """The analyses of one trace, each made when it is first asked for and then kept.

    ks: tokens beside ASL's window, numbers or shares (`25%`) of those before it. rule: ASL's
    parameters, its defaults if None. What is None is what the trace is too short for, or what is
    not defined where some layers have a sliding window; `left_out` says why.

    Raises PolicyError for a k that is neither, and for a rule that the model has no layer for.
    """

    trace: Trace
    ks: Sequence[int | str] = SHARES
    rule: Selecting = field(default_factory=ASL)
    device: str = "cpu"

    def __post_init__(self) -> None:
        for asked in self.ks:
            _tokens(asked, 1)
        self.rule.check(self.trace.n_layers)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why an analysis is None or empty, by its name: what the trace lacks, or has."""
        trace = self.trace
        cut, n, rows = trace.prompt_len, trace.n_pos, self.rule.window
        window = bool(trace.windowed), f"a sliding window in {windows(trace)}"
        least = SINK + LEAST_SAMPLES
        reasons = {
            "expectation": [
                (cut < SINK + 2, f"a prompt of {cut} tokens, fewer than {SINK + 2}"),
                (cut == n, "no response"),
                window,
            ],
            "projections": [(n < SINK + 2, f"{n} tokens, fewer than {SINK + 2}"), window],
            "normality": [(n < least, f"{n} tokens, fewer than {least}")],
            "ranking": [
                (not trace.whole, "only some layers of the model"),
                window,
                (cut <= rows, f"a prompt of {cut} tokens, no more than ASL's {rows} rows"),
            ],
        }
        held = {name: [why for holds, why in of if holds] for name, of in reasons.items()}
        return {name: found[0] for name, found in held.items() if found}

    @cached_property
    def expectation(self) -> Expectation | None:
        """Attention on the prompt's keys: what the response does and what is expected of it."""
        if "expectation" in self.left_out:
            return None
        cut = self.trace.prompt_len
        return expected_and_observed(self.trace, cut, sink=SINK, device=self.device)

    @cached_property
    def projections(self) -> Mapping[int, Projections]:
        """Projections of queries on keys, with the sinks' (0) and without them (`SINK`)."""
        return {
            skip: key_projections(self.trace, skip=skip, device=self.device)
            for skip in (0, SINK)
            if self.trace.n_pos >= skip + 2 and not self.trace.windowed
        }

    @cached_property
    def normality(self) -> Normality | None:
        """How queries before RoPE are distributed behind the sinks."""
        if "normality" in self.left_out:
            return None
        return state_normality(self.trace, skip=SINK)

    @cached_property
    def ranking(self) -> Ranking | None:
        """How the layers rank the prompt; None too where layers are missing from the trace."""
        if "ranking" in self.left_out:
            return None
        return ranking(self.trace, self.rule, device=self.device)

    def curves(self) -> Iterator[tuple[str, Curve]]:
        """ASL's test at each k, by the k as it was asked for."""
        if self.ranking is not None:
            for asked in self.ks:
                k = _tokens(asked, self.ranking.ranked)
                yield str(asked), self.ranking.curve(k + self.rule.window)

    def findings(
        self,
        names: Sequence[str] | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> pl.DataFrame:
        """As the function `findings`."""
        chosen = _chosen(names)
        frames = [pl.DataFrame(schema=COLUMNS)]
        for done, (name, what) in enumerate(chosen.items()):
            if progress is not None:
                progress(done, len(chosen), f"{self.trace.name}: {name}")
            frames += [_frame(self.trace, name, what, cells) for cells in what.cells(self)]
        return pl.concat(frames)


@dataclass(frozen=True)
class Finding:
    """A named function from the analyses of a trace to Cells, without a better direction.

    main: the variant that stands for the others where there is room for one number.
    """

    summary: str
    unit: str
    source: str
    cells: Callable[[Analysis], Iterable[Cells]]
    main: str = ""
    better: None = None


def findings(
    trace: Trace,
    names: Sequence[str] | None = None,
    *,
    ks: Sequence[int | str] = SHARES,
    rule: Selecting | None = None,
    device: str = "cpu",
    progress: Callable[[int, int, str], None] | None = None,
) -> pl.DataFrame:
    """A Table of `names` of `FINDINGS`, all by default: the columns of `kvsim.measure`.

    Policy, budget and schedule are null. ks: tokens beside ASL's window, numbers or shares (`25%`)
    of those before it. rule: ASL's parameters, its defaults if None. progress: called with
    (findings done, findings, what is being done).

    Raises PolicyError for an unknown name, for a k that is neither number nor share, and for a rule
    that the model has no layer for.
    """
    analysis = Analysis(trace, ks, ASL() if rule is None else rule, device)
    return analysis.findings(names, progress)


def _expectation(of: Analysis) -> Iterator[Cells]:
    if of.expectation is not None:
        for layer, values in enumerate(of.expectation.spearman[-1]):
            yield Cells(layer, values, "qhead")


def _steps(of: Analysis) -> Iterator[Cells]:
    if of.expectation is not None:
        for step, by_layer in zip(STEPS, of.expectation.spearman, strict=True):
            for layer, values in enumerate(by_layer):
                yield Cells(layer, values, "qhead", step)


def _gap(of: Analysis) -> Iterator[Cells]:
    for skip, found in of.projections.items():
        off = np.abs(np.median(found.gap - found.normal_gap, axis=(1, 2)))
        for layer, value in enumerate(off):
            yield Cells(layer, value.reshape(1), variant=f"skip={skip}")


def _distance(of: Analysis) -> Iterator[Cells]:
    found = of.normality
    if found is None:
        return
    chance = np.full(found.effects["ks"].shape[1], normal_ks(found.samples))
    for layer, by_head in enumerate(found.effects["ks"]):
        yield Cells(layer, mean_known(by_head), "qhead", chance=chance)


def _variance(of: Analysis) -> Iterator[Cells]:
    for asked, curve in of.curves():
        yield from _of_layers(asked, curve, curve.variance)


def _relative(of: Analysis) -> Iterator[Cells]:
    for asked, curve in of.curves():
        yield from _of_layers(asked, curve, curve.relative)


def _union(of: Analysis) -> Iterator[Cells]:
    for asked, curve in of.curves():
        m = curve.prompt_len - curve.rule.window
        # a token is in none of the first k of independent random rankings with this probability
        out = (1 - curve.k / m) ** curve.look_back
        over_k = np.where(np.isnan(curve.variance), np.nan, curve.union / curve.k)
        yield from _of_layers(asked, curve, over_k, m * (1 - out) / curve.k)


def _of_layers(
    asked: str, curve: Curve, values: Floats, chance: float | None = None
) -> Iterator[Cells]:
    """One value for each layer that has one; none where the whole prompt goes on."""
    for layer in np.flatnonzero(~np.isnan(values)) if not curve.fits else ():
        beside = None if chance is None else np.array([chance])
        yield Cells(int(layer), values[layer].reshape(1), variant=f"k={asked}", chance=beside)


def _entropy(of: Analysis) -> Iterator[Cells]:
    if of.ranking is not None:
        for layer, nats in enumerate(of.ranking.entropy()):
            yield Cells(layer, nats.reshape(1))


def _selection(of: Analysis) -> Iterator[Cells]:
    if of.ranking is None:
        return
    for asked, curve in of.curves():
        for tau in dict.fromkeys((*TAUS, of.rule.tau)):
            yield _selected(curve, f"k={asked},tau={tau:g}", tau)
        for name, rule in _other_rules(of.rule, of.trace.n_layers):
            other = of.ranking.curve(curve.budget, rule)
            yield _selected(other, f"k={asked},tau={of.rule.tau:g},{name}", rule.tau)


def _selected(curve: Curve, variant: str, tau: float) -> Cells:
    at = curve.selected(tau)
    return Cells(None, np.array([np.nan if at is None else float(at)]), variant=variant)


def _other_rules(rule: Selecting, n_layers: int) -> Iterator[tuple[str, Selecting]]:
    """Rules with another look-back or first layer, and the variant's name for it.

    At least two layers are compared, since the ranks of one do not vary.
    """
    first, back = rule.rule(n_layers)
    for other in dict.fromkeys((back // 4, back // 2, min(2 * back, first + 1))):
        if other >= 2 and other != back:
            yield f"look_back={other}", replace(rule, look_back=other)
    for other in dict.fromkeys((n_layers // 6, n_layers // 2)):
        if other >= 1 and other != first:
            yield f"first_layer={other}", replace(rule, first_layer=other)


def _decline(of: Analysis) -> Iterator[Cells]:
    trace = of.trace
    first = trace.prompt_len
    whole = (trace.n_pos - first) // WINDOW * WINDOW
    windows = row_blocks(first, first + whole, WINDOW)
    if len(windows) < 2:
        return
    number = np.arange(len(windows), dtype=np.float64)
    for layer in range(trace.n_layers):
        if layer in trace.windowed:
            continue
        scores = window_scores(trace, layer, windows, first, device=of.device)
        largest = np.stack([one.max(-1) for one in scores], -1)  # [head, window]
        yield Cells(layer, spearman(largest, np.broadcast_to(number, largest.shape)), "head")


FINDINGS: Mapping[str, Finding] = {
    "expectation": Finding(
        "rank correlation over the prompt's keys of expected attention with what the response "
        "attends to",
        "correlation", "Expected Attention, Fig. 10", _expectation,
    ),
    "expectation_steps": Finding(
        "the same after each assumption on the way from observed to expected attention",
        "correlation", "kvsim, after Expected Attention", _steps, main=STEPS[-1],
    ),
    "projection_gap": Finding(
        "distance of a key's log mean exponential over queries from that of normal ones, median "
        "over heads and keys",
        "nats", "Expected Attention, eq. 7", _gap, main=f"skip={SINK}",
    ),
    "normal_distance": Finding(
        "Kolmogorov-Smirnov distance of queries before RoPE from normal, mean over dimensions, "
        "beside that of normal samples",
        "share", "Expected Attention, Fig. 7 to 9", _distance,
    ),
    "rank_variance": Finding(
        "variance over neighbouring layers of a token's rank, mean over the tokens that rank high",
        "squared ranks", "ASL, section 4.1", _variance, main="k=25%",
    ),
    "rank_relative": Finding(
        "rank variance over that of the first layer that ASL tests",
        "ratio", "ASL, Fig. 6", _relative, main="k=25%",
    ),
    "rank_union": Finding(
        "tokens among the first k of one of the layers compared, over k, beside chance",
        "ratio", "ASL, section 4.1", _union, main="k=25%",
    ),
    "layer_entropy": Finding(
        "entropy of a layer's scores as a distribution over the prompt's tokens",
        "nats", "after ASL, Fig. 3", _entropy,
    ),
    "selection_layer": Finding(
        "layer after which ASL selects; none where it never does",
        "layer", "ASL, Fig. 9 and 10", _selection, main="k=25%,tau=0.3",
    ),
    "score_decline": Finding(
        "rank correlation of the number of a window of later rows with its largest score of a "
        "prompt's key",
        "correlation", "after G-KV, eq. 5", _decline,
    ),
}  # fmt: skip


def _chosen(names: Sequence[str] | None) -> Mapping[str, Finding]:
    """The findings asked for by name, all by default."""
    for name in names or ():
        if name not in FINDINGS:
            raise PolicyError(
                f"unknown finding {name!r}{suggest(name, FINDINGS)}; known: {', '.join(FINDINGS)}"
            )
    return FINDINGS if names is None else {name: FINDINGS[name] for name in names}


def _tokens(asked: int | str, ranked: int) -> int:
    """Tokens that go on beside the window: a number, or a share of those that are ranked."""
    found = re.fullmatch(r"(?P<share>\d+(\.\d+)?)%|(?P<tokens>\d+)", str(asked).strip())
    share, tokens = (None, None) if found is None else found.group("share", "tokens")
    if tokens and int(tokens) > 0:
        return int(tokens)
    if share and 0 < float(share) <= 100:
        return max(1, int(ranked * float(share) / 100 + 1e-9))
    raise PolicyError(f"k is {asked!r}; expected tokens (128) or a share of those ranked (25%)")


def _frame(trace: Trace, name: str, what: Finding, cells: Cells) -> pl.DataFrame:
    """Rows of a Table: one value per head, or one."""
    labels = {label: trace.labels.get(label) for label in LABELS}
    constant: dict[str, Any] = dict.fromkeys(COLUMNS)
    constant |= {key: None if label is None else str(label) for key, label in labels.items()}
    constant |= {"trace": trace.name, "metric": name, "variant": cells.variant}
    constant |= {"layer": cells.layer, "unit": what.unit, "fidelity": "exact"}
    values: dict[str, Any] = {"value": cells.values}
    if cells.chance is not None:
        values["chance"] = cells.chance
    if cells.heads is not None:
        values[cells.heads] = np.arange(len(cells.values))
    rest = {key: pl.lit(value) for key, value in constant.items() if key not in values}
    return (
        pl.DataFrame(values)
        .with_columns(pl.selectors.float().fill_nan(None))
        .with_columns(**rest)
        .select(pl.col(key).cast(kind) for key, kind in COLUMNS.items())
    )
