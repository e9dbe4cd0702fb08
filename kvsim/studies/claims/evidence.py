"""Values of a Table by policy, parameters and schedule: one per prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf
from typing import Any

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
from kvsim.studies.claims.claim import MATTERS, Claim

IntervalPrefill = tuple[int | None, bool | None]
Cases = dict[str, Floats]

#: The largest share of its budget that the window of a policy may have for a claim about it: with
#: more, most of what it keeps may be the window itself.
WINDOW = 0.5

#: Means of two settings that are alike differ by no more than this share: of an error, and of what
#: grows with its square.
ALIKE = {"response_kl": 0.1, "weighted_error": 0.1, "layer_error": 0.05, "output_error": 0.05}


@dataclass(frozen=True)
class PolicySetting:
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

    @property
    def wanted(self) -> dict[str, Any]:
        """The parameters that are to have a value; of several the first."""
        return {
            name: wanted[0] if isinstance(wanted, tuple) else wanted
            for name, wanted in self.params.items()
            if wanted is not ... and wanted is not None
        }

    @property
    def command(self) -> str:
        """Options of `kvsim replay` that compute this setting."""
        options = [f"--policy {self.policy}"]
        for name, value in self.wanted.items():
            if isinstance(value, dict):
                options += [f"--{key} {count}" for key, count in value.items() if count]
            else:
                options.append(f"--set {name}={str(value).lower()}")
        return " ".join(options)

    def __str__(self) -> str:
        return f"{self.policy} ({in_words(self.wanted)})" if self.wanted else self.policy


def of(policy: str, **params: Any) -> PolicySetting:
    """A setting of a policy."""
    return PolicySetting(policy, params)


@dataclass(frozen=True)
class Seconds:
    """Seconds of one event by policy, over caches of so many entries; each [repeat, length]."""

    lengths: Sequence[int]
    of: Mapping[str, Floats]


class Evidence:
    """A Table, and the seconds of events if they were taken.

    at_prompt: whether claims are about the one event after the prompt, or the schedule nearest to
    it; otherwise about all schedules with events while the response is written.
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
        self._labels = table.unique("trace", keep="first", maintain_order=True)

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
        of the trace. chance: what chance alone gives.
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

    def label(self, name: str) -> pl.Series:
        """A label of each prompt."""
        return self._labels[name]

    def _of(self, metric: str, variant: str | None, *, layered: bool) -> dict[Any, Floats]:
        """Values and chance [2, prompt] by (result, budget as requested, layer)."""
        at = metric, _main(metric) if variant is None else variant, layered
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
        """The schedules that claims are about, each in words where it has to be said."""
        if not self.at_prompt:
            chosen = [terms for terms in schedules if terms[0] is not None]
        else:
            chosen = sorted(
                schedules, key=lambda terms: (not terms[1], -inf if terms[0] is None else -terms[0])
            )
            chosen = chosen[:1]
        plain = len(chosen) == 1 and (not self.at_prompt or chosen[0] == (None, True))
        after = {terms: f"after: {schedule(terms[0], prefill=bool(terms[1]))}" for terms in chosen}
        return dict.fromkeys(chosen, "") if plain else after

    def alone(self, setting: PolicySetting) -> list[tuple[str, Result]]:
        """The main result of a setting at each schedule, labelled by its schedule."""
        by_schedule: dict[IntervalPrefill, list[Result]] = {}
        for result in filter(setting.fits, self.results):
            by_schedule.setdefault(result.schedule, []).append(result)
        chosen = self._chosen(by_schedule)
        return [(after, main(by_schedule[terms])) for terms, after in chosen.items()]

    def pairs(
        self, first: PolicySetting, second: PolicySetting
    ) -> list[tuple[str, Result, Result]]:
        """Results of two settings at the same schedule, with the label of each pair.

        Of two settings of one policy, those that are equal in all other parameters; of two policies
        the main result of each.
        """
        free = {*first.params, *second.params}
        by_schedule: dict[IntervalPrefill, list[tuple[Result, Result]]] = {}
        for terms in dict.fromkeys(result.schedule for result in self.results):
            same = [result for result in self.results if result.schedule == terms]
            a, b = (list(filter(setting.fits, same)) for setting in (first, second))
            if first.policy == second.policy:
                couples = [(x, y) for x, y in product(a, b) if differing(x, y) <= free and x != y]
            else:
                couples = [(main(a), main(b))] if a and b else []
            if couples:
                by_schedule[terms] = couples
        return [
            (joined(_differences((x, y), by_schedule[terms]), after), x, y)
            for terms, after in self._chosen(by_schedule).items()
            for x, y in by_schedule[terms]
        ]

    def around(self, policy: str, name: str) -> Iterator[tuple[str, Result, Result]]:
        """Results that differ from the main one of a policy in one parameter, and the main one."""
        for label, base in self.alone(of(policy)):
            for result in self.results:
                same = result.policy == policy and result.schedule == base.schedule
                if same and differing(result, base) == {name}:
                    changed = in_words({name: result.parameters.get(name)})
                    yield joined(changed, label), result, base

    def by_layer(
        self, metric: str, variant: str | None = None, number: Callable[[int], Floats] | None = None
    ) -> Cases:
        """A property of the traces in each layer that has it, or a number of such a layer."""
        number = number or partial(self.value, metric, variant)
        return {_layer(layer): number(layer) for layer in self.layers(metric, variant)}

    def compared(
        self,
        number: str,
        says: str,
        more: PolicySetting,
        less: PolicySetting,
        metric: str | None = None,
        variant: str | None = None,
        *,
        layers: bool = False,
    ) -> Claim:
        """A claim that a setting has more of a metric, by default `quality`; layers: in each."""
        cases, least, outside = {}, {}, {}
        pairs = self.pairs(more, less)
        metric = metric or self.quality(pairs)
        for label, a, b in pairs:
            for layer in self.layers(metric, variant) if layers else [None]:
                for budget in self.budgets:
                    case = joined(f"budget {budget}", _layer(layer), label)
                    if why := self.outside(budget, a, b):
                        outside[case] = why
                        continue
                    x, y = (self.value(metric, variant, layer, of=(one, budget)) for one in (a, b))
                    cases[case] = x - y
                    least[case] = least_of(x, y)
        where = ", each layer" if layers else ""
        tested = f"{metric_text(metric, variant)}{where}: {more} minus {less}"
        needs = self.lacks([more, less], metric, variant)
        return Claim(number, says, tested, cases, least=least, outside=outside, needs=needs)

    def quality(self, pairs: Iterable[tuple[str, Result, Result]]) -> str:
        """The metric that says which of two results is better: the best evidence that all have."""
        wanted = {result for _, *pair in pairs for result in pair}
        for name in EVIDENCE:
            if wanted and wanted <= {result for result, *_ in self._of(name, None, layered=False)}:
                return name
        return EVIDENCE[-1]

    def outside(self, budget: str, *results: Result) -> str:
        """Why a policy is out of its range at a budget; empty where each is in it."""
        for result in results:
            window = result.parameters.get("window")
            if isinstance(window, int) and window > WINDOW * self._sizes[budget]:
                return f"the window of {result.policy} is more than half of budget {budget}"
        return ""

    def measured(
        self,
        number: str,
        says: str,
        tested: str,
        setting: PolicySetting,
        metric: str,
        variant: str | None = None,
        *,
        case: Callable[[Floats], Floats],
        layers: Iterable[int | None] = (None,),
        outside: Callable[[str, Result], str] | None = None,
    ) -> Claim:
        """A claim about the values of one setting on each prompt at each budget.

        case: what of a value is above 0 where the claim is right. layers: in each of them. outside:
        why the policy is out of its range; by default as for all claims.
        """
        cases, beyond = {}, {}
        for label, result in self.alone(setting):
            for layer, budget in product(layers, self.budgets):
                name = joined(f"budget {budget}", _layer(layer), label)
                if why := (outside or self.outside)(budget, result):
                    beyond[name] = why
                else:
                    cases[name] = case(self.value(metric, variant, layer, of=(result, budget)))
        needs = self.lacks([setting], metric, variant)
        return Claim(number, says, tested, cases, outside=beyond, needs=needs)

    def alike(
        self,
        number: str,
        says: str,
        tested: str,
        pairs: Iterable[tuple[str, Result, Result]],
        settings: Sequence[PolicySetting],
    ) -> Claim:
        """A claim that the quality of each pair is within `ALIKE` of the mean of the second."""
        cases, outside, pairs = {}, {}, [*pairs]
        metric = self.quality(pairs)
        for label, a, b in pairs:
            for budget in self.budgets:
                case = joined(f"budget {budget}", label)
                x, base = (self.value(metric, of=(result, budget)) for result in (a, b))
                measured = base[~np.isnan(x - base)]
                if why := self.outside(budget, a, b):
                    outside[case] = why
                elif len(measured) and measured.mean():
                    cases[case] = (x - base) / measured.mean()
        margin = ALIKE[metric]
        tested = f"relative change of the {metric_text(metric)} {tested}; within {margin:.0%}"
        needs = self.lacks(settings, metric)
        return Claim(number, says, tested, cases, margin=margin, outside=outside, needs=needs)

    def lacks(
        self, settings: Sequence[PolicySetting], metric: str, variant: str | None = None
    ) -> str:
        """Replays that are missing for a value of a metric of these settings at the same terms."""
        rows = _ONE_EVENT if self.at_prompt else "--interval N --no-prefill"
        lost = [setting for setting in settings if not any(map(setting.fits, self.results))]
        if lost:
            alone = ",".join(dict.fromkeys(setting.policy for setting in settings))
            plain = not any(setting.wanted for setting in settings)
            options = [f"--policy {alone}"] if plain else [setting.command for setting in lost]
            commands = ", ".join(f"kvsim replay {option} {rows} --out RUN" for option in options)
            last = "" if plain else "; with all else equal, and all runs in one report"
            return f"needs {_listed(map(str, lost))}: {commands}{last}"
        pairs = self.pairs(settings[0], settings[-1])
        if not (pairs if len(settings) > 1 else self.alone(settings[0])):
            after = _listed(
                f"{result.policy} after {schedule(result.interval, prefill=bool(result.prefill))}"
                for result in self.results
                if any(setting.fits(result) for setting in settings)
            )
            same = "with one schedule and all else equal" if len(settings) > 1 else "with events"
            return f"needs {_listed(map(str, settings))} {same}: {rows}; there is {after}"
        return self.unmeasured(metric, variant)

    def unmeasured(self, metric: str, variant: str | None = None) -> str:
        """Why a metric has no value."""
        wanted = _main(metric) if variant is None else variant
        if wanted not in self.variants(metric):
            name = f"{metric} ({wanted})" if wanted else metric
            return f"needs the metric {name}: kvsim replay --out RUN measures all of them"
        return f"needs values of {metric} at the same budgets: these traces or budgets give none"

    def untraced(self, metric: str, of_what: str = "") -> str:
        """Why a property of the traces that no replay measures has no value."""
        if not self.variants(metric):
            return f"needs {metric}, from the traces: kvsim report RUN TRACE..."
        return " ".join(filter(None, (f"needs traces that have {metric}", of_what)))


#: A schedule of one event, for a policy that has another one of its own.
_ONE_EVENT = f"--prefill --interval {BEYOND}"

#: The long names of policies that claims know by the short one.
_SAME = {"ams+tova": "ams", "ams@release+tova": "ams@release"}

#: Names of some quantities in tests; others as in METRICS.
_CALLED = {
    ("response_kl", ""): "KL to the full cache",
    ("retained_iou", ""): "IoU of consecutive kept sets",
    ("middle_coverage", ""): "share kept of the middle third",
    ("burst_length", "longest"): "longest run of evicted tokens",
    ("boundary_shift", ""): "tokens from a boundary to the nearest one of the event before",
    ("retained_position", ""): "mean place of what is kept, 0 to 1",
    ("retained_position", "distance"): "largest distance of the places kept from even ones",
    ("retained_position", "older"): "mean place of what is kept behind the recent half, 0 to 1",
    ("key_similarity", ""): "mean cosine of two kept keys",
    ("wipeout", ""): "wipe-out of regions of 32",
}


def metric_text(metric: str, variant: str | None = None) -> str:
    """A metric in words."""
    plain = metric.replace("_", " ") + (f" ({variant})" if variant else "")
    return _CALLED.get((metric, variant or ""), plain)


def _main(metric: str) -> str:
    return METRICS[metric].main if metric in METRICS else ""


def least_of(x: Floats, y: Floats) -> float:
    """The least difference of two settings [prompt] that matters, over prompts that have both."""
    both = (np.abs(x) + np.abs(y))[~np.isnan(x - y)] / 2
    return MATTERS * float(both.mean()) if len(both) else 0.0


def _differences(pair: tuple[Result, Result], couples: Sequence[tuple[Result, Result]]) -> str:
    """The parameters that tell one of several pairs from the others."""
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


def _listed(names: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(names))
