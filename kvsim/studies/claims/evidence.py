"""Values of a Table by policy, parameters and schedule: one per prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import product
from math import inf
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats
from kvsim.analysis.evidence import EVIDENCE
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import (
    BEYOND,
    COLUMNS,
    REQUESTED,
    Result,
    differing,
    in_words,
    main,
    results,
)
from kvsim.analysis.summaries import per_prompt
from kvsim.schema import schedule
from kvsim.studies.claims.claim import ALL, MOST, Claim

IntervalPrefill = tuple[int | None, bool | None]
Cells = dict[str, Floats]

#: Largest share of its budget that the window of a policy may have for a claim about it: above it
#: most kept entries may be the window.
WINDOW = 0.5

#: Largest difference of the means of two equal settings, as a share: of an error, and of a quantity
#: that grows with its square.
ALIKE = {"response_kl": 0.1, "weighted_error": 0.1, "layer_error": 0.05, "output_error": 0.05}


class PolicySetting(NamedTuple):
    """A policy, with parameters that have a value, one of a tuple, or ... for any."""

    policy: str
    params: Mapping[str, Any]

    def fits(self, result: Result) -> bool:
        """Whether a result is of this setting."""
        values = result.parameters
        return result.policy == self.policy and all(
            wanted is ...
            or values.get(name) in (wanted if isinstance(wanted, tuple) else (wanted,))
            for name, wanted in self.params.items()
        )

    def __str__(self) -> str:
        params = {x: y[0] if isinstance(y, tuple) else y for x, y in self.params.items()}
        wanted = {x: y for x, y in params.items() if y is not ... and y is not None}
        return f"{self.policy} ({in_words(wanted)})" if wanted else self.policy


def of(policy: str, **params: Any) -> PolicySetting:
    """A setting of a policy."""
    return PolicySetting(policy, params)


class Seconds(NamedTuple):
    """Seconds of one event by policy, over caches of so many entries; each [repeat, length]."""

    lengths: Sequence[int]
    of: Mapping[str, Floats]


def paired(x: Floats, y: Floats) -> Floats:
    """The difference of two settings on each prompt, and their mean [2, prompt]."""
    return np.stack([x - y, (np.abs(x) + np.abs(y)) / 2])


class Evidence:
    """A Table, and the seconds of events if they were measured.

    at_prompt: whether claims are about the one event after the prompt, or the schedule nearest to
    it; otherwise about all schedules with events during the response.
    """

    at_prompt = False

    def __init__(self, table: pl.DataFrame, seconds: Seconds | None = None) -> None:
        named = pl.col("policy").replace(_SAME)
        table = table.with_columns(requested=REQUESTED, policy=named)
        sizes = table.drop_nulls("requested").group_by("requested").agg(pl.col("budget").mean())
        self.seconds = seconds
        self.traces: list[str] = table["trace"].unique(maintain_order=True).to_list()
        self._sizes: dict[str, float] = dict(sizes.sort("budget", "requested").iter_rows())
        self.budgets = list(self._sizes)
        self._none = np.full((2, len(self.traces)), np.nan)
        self._rows = results(table)
        self.results = list(dict.fromkeys(self._rows.values()))
        self._parts = table.drop("requested").partition_by("metric", "variant", as_dict=True)
        self._values: dict[tuple[str, str, bool], dict[Any, Floats]] = {}

    def value(
        self,
        metric: str,
        variant: str | None = None,
        layer: int | None = None,
        *,
        of: tuple[Result, str] | None = None,
        chance: bool = False,
    ) -> Floats:
        """The mean over heads of all layers, or of one; [prompt], NaN without a value.

        variant: the main one by default. of: a result and the requested budget; None for a property
        of the trace. chance: the expected value by chance instead.
        """
        values = self._of(metric, variant, layered=layer is not None)
        mean: Floats = values.get((*(of or (None, None)), layer), self._none)[int(chance)]
        return mean

    def layers(self, metric: str, variant: str | None = None) -> list[int]:
        """The layers that have a value of a metric."""
        values = self._of(metric, variant, layered=True)
        return sorted({layer for _, _, layer in values if layer is not None})

    def variants(self, metric: str) -> list[str]:
        """The variants of a metric, in the order of the Table."""
        return [variant for name, variant in self._parts if name == metric]

    def _of(self, metric: str, variant: str | None, *, layered: bool) -> dict[Any, Floats]:
        """Values and chance [2, prompt] by (result, budget as requested, layer)."""
        if variant is None:
            variant = METRICS[metric].main
        at = metric, variant, layered
        if at not in self._values:
            values = self._values[at] = {}
            part = self._parts.get(at[:2], pl.DataFrame())
            rows = per_prompt(part, ["layer"] if layered else []) if part.height else part
            for row in rows.iter_rows(named=True):
                result = self._rows.get(tuple(row[name] for name in COLUMNS))
                numbers = [np.nan if row[x] is None else row[x] for x in ("value", "chance")]
                place = self.traces.index(row["trace"])
                key = result, row["requested"], row.get("layer")
                values.setdefault(key, self._none.copy())[:, place] = numbers
        return self._values[at]

    def of_prompt(self) -> Evidence:
        """The same evidence, for claims about the event after the prompt."""
        evidence = copy(self)
        evidence.at_prompt = True
        return evidence

    def _chosen(self, schedules: Iterable[IntervalPrefill]) -> dict[IntervalPrefill, str]:
        """The schedules that claims are about, each in words where the claim has to name it."""
        chosen = [terms for terms in schedules if terms[0] is not None]
        if self.at_prompt:
            chosen = sorted(schedules, key=lambda terms: (not terms[1], -(terms[0] or inf)))[:1]
        plain = len(chosen) == 1 and (not self.at_prompt or chosen[0] == (None, True))
        after = {terms: f"after: {schedule(terms[0], prefill=bool(terms[1]))}" for terms in chosen}
        return dict.fromkeys(chosen, "") if plain else after

    def found(self, *settings: PolicySetting) -> list[tuple[Any, ...]]:
        """Results of one setting or of two at the same schedule, each with its label.

        Of two settings of one policy, results that are equal in all other parameters; otherwise the
        main result of each.
        """
        free = {name for setting in settings for name in setting.params}
        by_schedule: dict[IntervalPrefill, list[tuple[Result, ...]]] = {}
        for terms in dict.fromkeys(result.schedule for result in self.results):
            same = [result for result in self.results if result.schedule == terms]
            sides = [[*filter(setting.fits, same)] for setting in settings]
            each: list[tuple[Result, ...]]
            if len({setting.policy for setting in settings}) < len(settings):
                each = [(x, y) for x, y in product(*sides) if x != y and differing(x, y) <= free]
            else:
                each = [(*map(main, sides),)] if all(sides) else []
            if each:
                by_schedule[terms] = each
        return [
            (joined(_differences(one, by_schedule[terms]), after), *one)
            for terms, after in self._chosen(by_schedule).items()
            for one in by_schedule[terms]
        ]

    def around(self, policy: str, name: str) -> Iterator[tuple[Any, ...]]:
        """Results that differ from the main one of a policy in one parameter, and the main one."""
        for label, base in self.found(of(policy)):
            for result in self.results:
                same = result.policy == policy and result.schedule == base.schedule
                if same and differing(result, base) == {name}:
                    changed = in_words({name: result.parameters.get(name)})
                    yield joined(changed, label), result, base

    def traced(
        self,
        number: str,
        says: str,
        tested: str,
        metric: str,
        variant: str | None = None,
        cell: Callable[[int], Floats] | None = None,
        level: float = 0,
    ) -> Claim:
        """A claim about a property of the traces in each layer that has it.

        cell: a function of a layer's property, positive where the claim is right; by default the
        property.
        """
        cell = cell or partial(self.value, metric, variant)
        cells = {_layer(layer): cell(layer) - level for layer in self.layers(metric, variant)}
        return Claim(number, says, f"{tested}, each layer", cells, needs=untraced(metric))

    def claim(
        self,
        number: str,
        says: str,
        *settings: tuple[PolicySetting, ...],
        metric: str | None = None,
        variants: Sequence[str | None] = (),
        cell: Callable[..., Floats] = paired,
        layers: Sequence[int | None] = (None,),
        where: str = MOST,
        tested: str = "",
        outside: Callable[..., str] | None = None,
    ) -> Claim:
        """A claim about the values of settings at each budget; with several, of each of them.

        settings: single ones, or couples of which the first should have more. metric: by default
        `quality`. cell: a function of their values, positive where the claim is right. layers: in
        each of them. outside: why a policy is not tested, if not for its window.
        """
        variants = variants or (None,)
        named = zip(_distinct(settings), settings, strict=True)
        found = {name: self.found(*sides) for name, sides in named}
        results = [(joined(name, label), *x) for name, each in found.items() for label, *x in each]
        metric = metric or self.quality(results)
        cells, untested = self._cells(results, metric, cell, variants, layers, outside)
        untested |= {name: "not replayed" for name, each in found.items() if results and not each}
        if not tested:
            of_metric = f"{metric} ({variants[0]})" if [*variants] == [variants[0] or 0] else metric
            tested = f"{of_metric}: {' minus '.join(map(str, settings[0]))}"
            if len(found) > 1:
                tested += f", and likewise {', '.join([*found][1:])}"
        if len(layers) > 1:
            tested += ", each layer"
        needs = self.lacks(settings[0], metric)
        return Claim(number, says, tested, cells, where, untested=untested, needs=needs)

    def quality(self, pairs: Iterable[tuple[Any, ...]]) -> str:
        """The metric that compares two results: the best evidence that all have."""
        wanted = {result for _, *pair in pairs for result in pair}
        has = {x: {result for result, *_ in self._of(x, None, layered=False)} for x in EVIDENCE}
        return next((x for x in EVIDENCE if wanted and wanted <= has[x]), EVIDENCE[-1])

    def outside(self, budget: str, *results: Result) -> str:
        """Why a policy is not tested at a budget; empty otherwise."""
        windows = (result.parameters.get("window") for result in results)
        wide = any(isinstance(x, int) and x > WINDOW * self._sizes[budget] for x in windows)
        return "a window of more than half of the budget" if wide else ""

    def alike(
        self,
        number: str,
        says: str,
        tested: str,
        pairs: Iterable[tuple[Any, ...]],
        settings: Sequence[PolicySetting],
    ) -> Claim:
        """Claims, in each direction, that the qualities of pairs differ by less than `ALIKE`."""
        pairs = [*pairs]
        metric = self.quality(pairs)
        margin = ALIKE[metric]
        changes, untested = self._cells(pairs, metric, paired)
        cells = {
            joined(cell, way): np.stack([margin * size + sign * change, size])
            for way, sign in (("rise", -1), ("fall", 1))
            for cell, (change, size) in changes.items()
        }
        tested = f"{margin:.0%} minus the change of the {metric} {tested}, either way"
        needs = self.lacks(settings, metric)
        return Claim(number, says, tested, cells, ALL, 0, untested, needs)

    def _cells(
        self,
        results: Iterable[tuple[Any, ...]],
        metric: str,
        number: Callable[..., Floats],
        variants: Sequence[str | None] = (None,),
        layers: Sequence[int | None] = (None,),
        outside: Callable[..., str] | None = None,
    ) -> tuple[Cells, dict[str, str]]:
        """Numbers of labelled results at each budget, and why some are not tested."""
        cells, untested = {}, {}
        for label, *sides in results:
            for variant, layer, budget in product(variants, layers, self.budgets):
                named = variant or "" if len(variants) > 1 else ""
                cell = joined(f"budget {budget}", named, _layer(layer), label)
                if why := (outside or self.outside)(budget, *sides):
                    untested[cell] = why
                else:
                    values = (self.value(metric, variant, layer, of=(x, budget)) for x in sides)
                    cells[cell] = number(*values)
        return cells, untested

    def lacks(self, settings: Sequence[PolicySetting], metric: str) -> str:
        """Missing replays for a metric of these settings on the same terms."""
        rows = _ONE_EVENT if self.at_prompt else "--interval N --set prefill=false"
        policies = ",".join(dict.fromkeys(setting.policy for setting in settings))
        return (
            f"needs {metric} of {' and '.join(map(str, settings))} at the same budgets, with one "
            f"schedule and all else equal: kvsim replay --policy {policies} {rows} --out RUN"
        )


#: A schedule of one event, for a policy with another schedule of its own.
_ONE_EVENT = f"--set prefill=true --interval {BEYOND}"

#: The long names of policies that claims know by the short one.
_SAME = {"ams+tova": "ams", "ams@release+tova": "ams@release"}


def untraced(metric: str, of_what: str = "") -> str:
    """Why a property of the traces has no value."""
    return f"needs {metric} of traces{of_what}: kvsim report RUN TRACE..."


def _distinct(settings: Sequence[tuple[PolicySetting, ...]]) -> list[str]:
    """Return the part that distinguishes each of several settings or couples; empty for one."""
    sides = ([str(side) for side in each] for each in zip(*settings, strict=True))
    return max(sides, key=lambda names: len({*names})) if len(settings) > 1 else [""]


def _differences(pair: tuple[Result, ...], couples: Sequence[tuple[Result, ...]]) -> str:
    """Parameters that distinguish one of several pairs from the others."""
    values: dict[str, Any] = {}
    for result, same_side in zip(pair, zip(*couples, strict=True), strict=True):
        names = {name for other in same_side for name in differing(result, other)}
        values = {name: result.parameters.get(name) for name in sorted(names)} | values
    return in_words(values)


def _layer(layer: int | None) -> str:
    return "" if layer is None else f"layer {layer}"


def joined(*parts: str) -> str:
    """The parts that distinguish a case, as one text."""
    return ", ".join(filter(None, parts))
