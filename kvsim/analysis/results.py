"""Results of a Table: policies with their parameters and schedules, and their labels.

Labels of results of one policy name the parameters in which they differ, so that an ablation is
distinguished from its policy.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import polars as pl

from kvsim.analysis.table import model_name
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError, TraceError
from kvsim.schema import first_of, object_at, schedule

#: The columns that make a result.
COLUMNS = ("policy", "params", "interval", "prefill")

#: Results whose budget limits the held entries, or the rows that reach deeper layers.
HELD = pl.col("bounds").str.contains("held", literal=True)

#: The budget as requested: a share of the tokens such as "25%", or the number of entries.
REQUESTED = pl.coalesce("share", pl.col("budget").cast(pl.String))

#: An interval this long leaves only the event after the prompt: `--interval 1000000`.
BEYOND = 1_000_000

#: Kinds of results, by the fidelity of their values; all others are of replays.
LOOPS = {"closed": "live runs", "judged": "judged replays"}

Params = Mapping[str, Any]


def csv_text(table: pl.DataFrame) -> str:
    """Return a table as CSV, with an apostrophe before text that a spreadsheet would compute."""
    text = table.with_columns(pl.selectors.enum().cast(pl.String))
    formula = r"(?s)^(\s*[=@]|[\t\r]|\s*[+-].*[^\d.eE])"  # no signed number
    return text.with_columns(pl.selectors.string().str.replace(formula, "'$0")).write_csv()


def is_live(table: pl.DataFrame) -> bool:
    """Whether a Table has values of a running model."""
    return bool(table["fidelity"].eq("closed").any())


def check_distinct(traces: Sequence[Trace]) -> None:
    """Raise TraceError where two traces have one name, by which a Table distinguishes them."""
    by_name: dict[str, Trace] = {}
    for trace in traces:
        if trace.name in by_name:
            both = by_name[trace.name], trace
            where = (f"{x.path or 'in memory'} (of {model_name(x) or 'no model'})" for x in both)
            raise TraceError(
                f"{' and '.join(where)} are both called {trace.name!r}; expected one name per "
                "trace: give them one by one, or record one again under another id"
            )
        by_name[trace.name] = trace


def models_of(traces: Iterable[Trace]) -> dict[str, str]:
    """Return for each trace by name its model, `NAME@WEIGHTS`, either empty if unknown."""
    facts = ((each, object_at(each.meta, "model").get("weights") or "") for each in traces)
    return {each.name: f"{model_name(each) or ''}@{weights}" for each, weights in facts}


def model_labels(models: Mapping[str, str]) -> dict[str, str]:
    """Return the model of each trace, with 8 digits of its weights where several have one name."""
    pairs = {trace: tuple(model.rpartition("@")[::2]) for trace, model in models.items()}
    several = Counter(name for name, weights in {*pairs.values()} if weights)
    return {
        trace: f"{name} ({weights[7:15]})" if weights and several[name] > 1 else name
        for trace, (name, weights) in pairs.items()
        if name
    }


def by_model(table: pl.DataFrame, models: Mapping[str, str]) -> pl.DataFrame:
    """Return a Table with `model_labels` in its column `model` where several have one name."""
    names = model_labels(models).items()
    labels = {trace: x for trace, x in names if not models[trace].startswith(f"{x}@")}
    model = pl.col("trace").replace_strict(labels, default=pl.col("model"), return_dtype=pl.String)
    return table.with_columns(model=model)


def several_models(traces: Iterable[tuple[str | None, str]]) -> str:
    """Return the models of the traces where they differ, so that no mean is over them; else empty.

    traces: model and name of each; a trace without a model may be of any.
    """
    models: dict[str, list[str]] = {}
    for model, name in traces:
        if model is not None:
            models.setdefault(model, []).append(name)
    if len(models) < 2:
        return ""
    parts = (f"{model} ({first_of(names)})" for model, names in models.items())
    return (
        f"traces of several models: {', '.join(parts)}; expected one, because no mean is over "
        "several; take traces of one model, or split values by 'model' (kvsim compare --by model)"
    )


def check_models(traces: Iterable[Trace]) -> None:
    """Raise PolicyError where traces are of several models, so that no mean is over them."""
    labels = model_labels(models_of(traces))
    if remark := several_models((label, name) for name, label in labels.items()):
        raise PolicyError(remark)


def mixed(table: pl.DataFrame, by: Sequence[str] = ()) -> str:
    """Return why values have no common mean: several models, or several of `LOOPS`; else empty.

    by: columns that split means.
    """
    if "model" not in by and of_model(table):
        of_traces = table.select("model", "trace").unique(maintain_order=True)
        return several_models(of_traces.iter_rows())
    loop = pl.col("fidelity").cast(pl.String).replace_strict(LOOPS, default="replays")
    values = table.drop_nulls(["policy", "value"]).select("metric", "policy", loop=loop)
    values = values.unique(maintain_order=True)
    several = values.filter(pl.col("loop").n_unique().over("metric") > 1)
    if not several.height:
        return ""
    name, kinds = several["metric"][0], several.filter(metric=several["metric"][0])
    parts = (
        f"of {loop} ({first_of(kinds.filter(loop=loop)['policy'].to_list())})"
        for loop in (*LOOPS.values(), "replays")
        if loop in kinds["loop"]
    )
    return (
        f"{name} is {' and '.join(parts)}; expected one kind, because no mean is over several; "
        "take them one by one"
    )


def of_model(table: pl.DataFrame) -> list[str]:
    """Return `["model"]`, the column that splits a Table of several models, else nothing."""
    several = "model" in table and table["model"].drop_nulls().n_unique() > 1
    return ["model"] if several else []


@dataclass(frozen=True)
class Result:
    """A policy as it was replayed.

    params: the JSON of its parameters, keys in order. changed: those that differ from their
    defaults; None where defaults are unknown.
    """

    policy: str
    params: str
    interval: int | None
    prefill: bool | None
    changed: frozenset[str] | None = field(default=None, compare=False)

    @cached_property
    def parameters(self) -> Params:
        """The parameters by name."""
        return MappingProxyType(json.loads(self.params))

    @property
    def schedule(self) -> tuple[int | None, bool | None]:
        """Interval and prefill; an interval beyond any text is None."""
        return None if (self.interval or 0) >= BEYOND else self.interval, self.prefill


def results(table: pl.DataFrame) -> dict[tuple[Any, ...], Result]:
    """The results of a Table, by the values of `COLUMNS`, in the order of the Table."""
    rows = table.drop_nulls("policy").select(*COLUMNS, "changed").unique(maintain_order=True)
    out = {}
    for name, params, interval, prefill, changed in rows.iter_rows():
        names = None if changed is None else frozenset(filter(None, changed.split(",")))
        parameters = json.loads(params or "null")
        if not isinstance(parameters, dict):
            raise PolicyError(f"the parameters of {name} are {params!r}; expected a JSON object")
        text = json.dumps(parameters, sort_keys=True)
        out[name, params, interval, prefill] = Result(name, text, interval, prefill, names)
    return out


def differing(result: Result, other: Result) -> frozenset[str]:
    """Names of the parameters in which two results differ; a missing parameter is None."""
    a, b = result.parameters, other.parameters
    return frozenset(name for name in (*a, *b) if a.get(name) != b.get(name))


def main(results: Sequence[Result]) -> Result:
    """Return the main result of a policy, of which the others are variants.

    Most others differ from it in a single parameter; among several candidates it has the fewest
    parameters that are not the policy's defaults; then it is the first.
    """

    def rank(result: Result) -> tuple[int, int]:
        near = sum(len(differing(result, other)) == 1 for other in results)
        given = (name for name, value in result.parameters.items() if value is not None)
        return -near, len([*given] if result.changed is None else result.changed)

    return min(results, key=rank)


def in_words(params: Params) -> str:
    """Parameters as `credit=False, window=8`."""
    return ", ".join(f"{name}={_value(value)}" for name, value in params.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        parts = (f"{name} {_value(part)}" for name, part in sorted(value.items()) if part)
        return " ".join(parts) or "none"
    return str(value)


def labels(results: Sequence[Result]) -> dict[Result, str]:
    """Return the label of each result: the policy, and the differences of several results of it.

    `ams` is the main result and `ams (credit=False)` a variant; if the main one has no default
    value of the parameter, both name it: `ams (window=16)` and `ams (window=32)`. Defaults of a
    user's policy are unknown, so all values of a single parameter are named. Schedules are named
    where only they differ: `tova (after: every 16 rows)`.
    """
    by_policy: dict[str, list[Result]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    schedules = Counter((result.policy, result.params) for result in results)
    named: dict[Result, str] = {}
    for name, of_policy in by_policy.items():
        base = main(list({result.params: result for result in of_policy}.values()))
        varied = frozenset[str]().union(*(differing(result, base) for result in of_policy))
        known = base.changed
        if known is None:  # of several, results vary around the main one
            known = frozenset() if len(varied) > 1 else varied
        changed = varied & known & base.parameters.keys()
        for result in of_policy:
            differ = sorted(differing(result, base) | changed)
            remarks = [in_words({x: result.parameters.get(x) for x in differ})]
            if schedules[name, result.params] > 1:
                remarks.append(f"after: {schedule(result.interval, prefill=bool(result.prefill))}")
            remark = "; ".join(filter(None, remarks))
            label = f"{name} ({remark})" if remark else name
            named[result] = label
    return named


def labelled(table: pl.DataFrame) -> pl.DataFrame:
    """The Table with labels of results (see `labels`) instead of the names of policies."""
    by_row = results(table)
    names = labels(list(dict.fromkeys(by_row.values())))
    if all(name == result.policy for result, name in names.items()):
        return table
    rows = [(*row, names[result]) for row, result in by_row.items()]
    schema = {name: table.schema[name] for name in COLUMNS} | {"label": pl.String}
    labels_of = pl.DataFrame(rows, schema=schema, orient="row")
    joined = table.join(labels_of, on=COLUMNS, how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(policy="label").drop("label")


def task_of(trace: Trace) -> str:
    """Return the column by which traces are grouped: the label `task`, else a part of the name.

    The part before the first `-` or `_`, without digits at its end: `walk-f32-s1-0` is of the task
    `walk`, `p12` of `p`.
    """
    label = str(trace.header.labels.get("task", ""))
    return label or re.split("[-_]", trace.name)[0].rstrip("0123456789") or trace.name
