"""Search for the parameters of a policy, and what they gain on prompts that the search never saw.

By optuna's TPE sampler (Bergstra et al. 2011, NeurIPS), over the ranges that parameters declare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats
from kvsim.analysis.evidence import EVIDENCE
from kvsim.analysis.registry import metric as metric_named
from kvsim.analysis.significance import sign_flip
from kvsim.analysis.summaries import WEAKEST, Interval, averages, main_variants, per_prompt
from kvsim.analysis.table import BESIDE, available, choose
from kvsim.core.arguments import resolve_budget
from kvsim.core.checks import resolve_device
from kvsim.core.options import given_options, takes_options
from kvsim.core.trace import Trace
from kvsim.errors import KvsimError, PolicyError, suggest
from kvsim.policies import declared, policy
from kvsim.schema import FIDELITY, plural
from kvsim.studies.tuning.options import TuneOptions
from kvsim.studies.tuning.space import Dimension, dimension
from kvsim.sweeps.driver import replay_all
from kvsim.sweeps.held_out import FEWEST, split

if TYPE_CHECKING:
    import optuna

#: What a reader or a codec must not gain by, and the share by which bytes may differ.
COSTS, _EQUAL = ("bytes_held", "bytes_read"), 0.001


#: Columns of `Tuning.gains`.
GAINS: dict[str, Any] = {
    "prompts": pl.String,
    "n": pl.Int64,
    **dict.fromkeys(("default", "tuned", "gain", "low", "high", "p"), pl.Float64),
    "fidelity": pl.Enum(FIDELITY),
}

#: Called with (trials done, trials, what is being done).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Tuning:
    """The outcome of `tune`.

    parameters: those in which the best setting differs from the default one. gains: how much
    better it is than the default, mean over the prompts "searched" on and "held out", with 95 %
    bootstrap intervals and, of prompts held out, the p-value of `sign_flip`. trials: one row for
    each, its state (done, failed, or more bytes: than the default holds or reads), mean over the
    searched prompts, and parameters as JSON.
    """

    policy: str
    budget: str
    metric: str
    better: str
    seed: int
    space: tuple[Dimension, ...]
    parameters: dict[str, Any]
    gains: pl.DataFrame
    trials: pl.DataFrame
    searched: tuple[str, ...]
    held_out: tuple[str, ...]
    remarks: tuple[str, ...]
    interrupted: bool


@takes_options(TuneOptions)
def tune(
    traces: Sequence[Trace],
    name: str,
    budget: int | str,
    metric: str | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Unpack[TuneOptions],
) -> Tuning:
    """Search the parameters of a policy for the best mean of a metric over prompts.

    Equal arguments find equal parameters. Settings of a reader or a codec that hold or read more
    bytes than the default one on the prompts searched on are no gain, and are not taken. Ctrl-C
    ends the search; the best of the trials that are done is reported.

    Args:
        traces: of the prompts; they are split at random.
        name: of the policy, as for `kvsim.policy`.
        budget: entries per KV head, or a share of each trace such as `25%`.
        metric: by name, one of a replay that has a better direction. By default the best evidence
            (`EVIDENCE`): response_kl with a judge, else the first that all traces have arrays for.
        fixed: parameters with other values than the default; they are not searched.
        progress: called with (trials done, trials, what is being done).
        **options: the options of `TuneOptions`.

    Raises:
        PolicyError: the metric has no better direction, there is nothing to search, or the default
            setting cannot be replayed.
        KvsimError: optuna is not installed.
    """
    given = given_options(TuneOptions, options, "tune", PolicyError)
    judge, trials, seed = given["judge"], given["trials"], given["seed"]
    metric = metric or available(EVIDENCE[0 if judge else 1 :], traces)[0]
    entry = metric_named(metric)
    choose([metric], beside=BESIDE, judged=bool(judge))
    if entry.better is None or entry.kind == "trace":
        raise PolicyError(f"{metric} says of no policy that it is better; expected another metric")
    if not traces:
        raise PolicyError("no traces; expected at least one to tune on")
    sizes = [resolve_budget(budget, trace.n_pos) for trace in traces]
    space = _space(name, max(sizes), given["search"], fixed or {})
    searched, kept_back = split(traces, given["held_out"], seed)
    own = ("search", "trials", "held_out", "seed")
    terms = {name: value for name, value in given.items() if name not in own}
    terms |= {"device": resolve_device(given["device"]), "regret": bool(entry.beside)}
    objective = _Objective(name, budget, metric, fixed or {}, terms)
    sign = 1 if entry.better == "higher" else -1
    report = progress or (lambda *_: None)
    report(0, trials, "the default setting")
    default = objective.values({}, searched).mean()
    if kept_back:  # an error here would lose the trials if it came after them
        objective.values({}, kept_back)
    study, fail = _study(space, seed)
    rows: list[dict[str, Any]] = []
    best, parameters, interrupted = default, dict[str, Any](), False
    try:
        for number in range(trials):
            trial = study.ask()
            setting = {parameter.name: parameter.suggest(trial) for parameter in space}
            report(number, trials, ", ".join(f"{key}={x}" for key, x in setting.items()))
            row = {"trial": number, "state": "done", "params": json.dumps(setting)}
            try:
                row["value"] = value = float(objective.values(setting, searched).mean())
                if objective.takes_more_bytes(setting, searched):
                    row["state"] = "more bytes"
            except KvsimError as error:
                row |= {"state": "failed", "error": str(error)}
            rows.append(row)
            if row["state"] != "done":
                study.tell(trial, state=fail)
                continue
            study.tell(trial, sign * value)
            if sign * (value - best) > 0:
                best, parameters = value, setting
        parameters = _needed(objective, parameters, searched, best)
    except KeyboardInterrupt:
        interrupted = True
    parts = {"searched": searched, "held out": kept_back}
    gains = [
        _gain(objective, part, parameters, of_part, sign)
        for part, of_part in parts.items()
        if of_part
    ]
    done = pl.DataFrame(rows, schema=_TRIALS)
    return Tuning(
        *(name, str(budget), metric, entry.better, seed, tuple(space), parameters),
        gains=pl.DataFrame(gains, schema=GAINS),
        trials=done,
        searched=tuple(trace.name for trace in searched),
        held_out=tuple(trace.name for trace in kept_back),
        remarks=tuple(_remarks(space, len(traces), kept_back, done)),
        interrupted=interrupted,
    )


_TRIALS = {
    "trial": pl.Int64,
    "state": pl.String,
    "value": pl.Float64,
    "params": pl.String,
    "error": pl.String,
}


def _space(
    name: str, entries: int, search: Sequence[str] | None, fixed: Mapping[str, Any]
) -> list[Dimension]:
    """The dimensions of a policy that are to be searched; entries: of the largest budget."""
    values = replace(policy(name, **fixed).at(entries), scaled=()).params
    every = {key: dimension(key, x, values.get(key), entries) for key, x in declared(name).items()}
    free = {key: x for key, x in every.items() if x is not None and key not in fixed}
    if search is not None:
        for key in search:
            if key not in free:
                raise PolicyError(
                    f"--search {key}: {name} has no such parameter to search{suggest(key, free)}; "
                    f"it has {', '.join(free) or 'none'}"
                )
        free = {key: free[key] for key in search}
    else:
        free.pop("seed", None)  # chance is no parameter
    if not free:
        raise PolicyError(f"{name} has no parameters to search; tune another policy")
    return [*free.values()]


def _study(space: Sequence[Dimension], seed: int) -> tuple[optuna.Study, Any]:
    """A search that begins with the default setting, and the state of a trial that is not taken."""
    try:
        import optuna  # noqa: PLC0415 - an extra
    except ImportError:
        raise KvsimError(
            "tuning needs optuna, which is not installed; `pip install 'kvsim[tune]'`"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial({key: x for parameter in space for key, x in parameter.initial.items()})
    return study, optuna.trial.TrialState.FAIL


class _Objective:
    """Values of a metric of one policy at one budget with any parameters, each replayed once."""

    def __init__(
        self,
        name: str,
        budget: int | str,
        metric: str,
        fixed: Mapping[str, Any],
        terms: Mapping[str, Any],
    ) -> None:
        self._name, self._budget, self._metric = name, budget, metric
        self._fixed, self._terms = dict(fixed), terms
        built = policy(name, **fixed)
        self._costs = COSTS if built.reader or built.rounds else ()
        self._replayed: dict[tuple[str, ...], tuple[pl.DataFrame, Floats]] = {}

    def values(self, setting: Mapping[str, Any], traces: Sequence[Trace]) -> Floats:
        """One value per trace [trace]; a KvsimError where one has none."""
        return self.table(setting, traces)["value"].to_numpy()

    def takes_more_bytes(self, setting: Mapping[str, Any], traces: Sequence[Trace]) -> bool:
        """Whether a setting of a reader or a codec holds or reads more bytes than the default."""
        if not self._costs:
            return False
        default, costs = (self._outcome(each, traces)[1] for each in ({}, setting))
        return bool((costs > (1 + _EQUAL) * default).any())

    def table(self, setting: Mapping[str, Any], traces: Sequence[Trace]) -> pl.DataFrame:
        """The `per_prompt` rows of the metric, one per trace."""
        return self._outcome(setting, traces)[0]

    def _outcome(
        self, setting: Mapping[str, Any], traces: Sequence[Trace]
    ) -> tuple[pl.DataFrame, Floats]:
        """The rows of the metric, and mean bytes by the names of `_costs`."""
        key = json.dumps(setting, sort_keys=True), *(trace.name for trace in traces)
        if key not in self._replayed:
            built = policy(self._name, **{**self._fixed, **setting})
            metrics = [self._metric, *(cost for cost in self._costs if cost != self._metric)]
            terms = {**self._terms, "metrics": metrics, "accounts": False}
            run = replay_all(traces, [built], [self._budget], **terms).whole()
            if run.failures:
                raise PolicyError(f"{run.failures[0].trace}: {run.failures[0].error}")
            rows = per_prompt(main_variants(run.table, [self._metric])).drop_nulls("value")
            if rows.height < len(traces):
                reasons = [record.remark for record in run.records if record.remark]
                raise PolicyError(
                    f"{self._metric} has values on {rows.height} of {len(traces)} traces; expected "
                    f"one on each: {(reasons or ['leave the others out, or lower --budget'])[0]}"
                )
            costs = np.empty(0)
            if self._costs:
                means = averages(run.table, metrics=self._costs).sort("metric")
                costs = means["mean"].to_numpy()
            self._replayed[key] = rows, costs
        return self._replayed[key]


def _needed(
    objective: _Objective, setting: Mapping[str, Any], traces: Sequence[Trace], best: float
) -> dict[str, Any]:
    """The parameters of a setting without those that change nothing on the traces."""
    kept = dict(setting)
    for name in setting:
        fewer = {key: x for key, x in kept.items() if key != name}
        try:
            same = objective.values(fewer, traces).mean() == best
            same = same and not objective.takes_more_bytes(fewer, traces)
        except KvsimError:  # the default of this one does not go with the others
            same = False
        kept = fewer if same else kept
    return kept


def _gain(
    objective: _Objective,
    part: str,
    parameters: Mapping[str, Any],
    traces: Sequence[Trace],
    sign: int,
) -> dict[str, Any]:
    """How much better a setting is than the default on traces; sign: 1 where higher is better."""
    default, tuned = (objective.table(setting, traces) for setting in ({}, parameters))
    first, second = (rows["value"].to_numpy() for rows in (default, tuned))
    gaps = sign * (second - first)
    interval = Interval.of(gaps)
    return {
        "prompts": part,
        "n": len(gaps),
        "default": first.mean(),
        "tuned": second.mean(),
        "gain": interval.mean,
        "low": None if np.isnan(interval.low) else interval.low,
        "high": None if np.isnan(interval.high) else interval.high,
        "p": float(sign_flip(gaps[None])[0]) if part == "held out" else None,
        "fidelity": pl.concat([default, tuned]).select(WEAKEST).item(),
    }


def _remarks(
    space: Sequence[Dimension], prompts: int, kept_back: Sequence[Trace], done: pl.DataFrame
) -> list[str]:
    out = []
    if not kept_back:
        few = (
            f"with {plural(prompts, 'prompt')}" if prompts < FEWEST else "without prompts held out"
        )
        out.append(
            f"{few} over-fitting cannot be seen: the gain is on the prompts that were searched on"
        )
    assumed = [
        f"{parameter.name} {parameter.low:g} to {parameter.high:g} ({parameter.assumed})"
        for parameter in space
        if parameter.assumed
    ]
    if assumed:
        out.append(f"ranges that the policy does not declare: {', '.join(assumed)}")
    costly = done.filter(state="more bytes")
    if costly.height:
        out.append(
            f"{costly.height} of {done.height} trials hold or read more bytes than the default "
            "setting, and are not taken"
        )
    failed = done.filter(state="failed")
    if failed.height:
        out.append(
            f"{failed.height} of {done.height} trials failed, the first: {failed['error'][0]}"
        )
    return out
