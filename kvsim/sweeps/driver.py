"""`kvsim.sweep`: a grid computed by any number of processes into one Table."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, get_type_hints

from kvsim.analysis.folder import replace_run
from kvsim.analysis.table import BESIDE, choose
from kvsim.core.arguments import listed
from kvsim.core.checks import check_progress
from kvsim.core.options import given_options, takes_options
from kvsim.core.policy import PolicyLike
from kvsim.engine import check_cell
from kvsim.errors import ConfigError, PolicyError
from kvsim.experiment import Options, ReplayOptions, Spread, SweepOptions
from kvsim.files import lock
from kvsim.policies import as_policies
from kvsim.progress import with_bar
from kvsim.schema import plural
from kvsim.store.opening import Traces, as_traces
from kvsim.sweeps.cells import Progress
from kvsim.sweeps.cluster import on_a_cluster
from kvsim.sweeps.grid import Grid
from kvsim.sweeps.outcome import Run
from kvsim.sweeps.planning import Plan, grid_from
from kvsim.sweeps.shards import Kept, Shards, kept_in
from kvsim.sweeps.tasks import Outcome, Task
from kvsim.sweeps.terms import measurable, shared_terms
from kvsim.sweeps.workers import IN_MEMORY, Lost, in_processes, in_this_process, processes

#: Seconds between looks at what other processes have finished.
_LOOK = 1.0


@dataclass(frozen=True)
class Standing:
    """How far a sweep is: what is done of how many, and bytes read by now.

    steps: cells of tasks, those of the shard if it is one; a cell whose layers are in several tasks
    has as many. cells, traces: of the whole; those of which all is done.
    """

    steps: tuple[int, int]
    cells: tuple[int, int]
    traces: tuple[int, int]
    read: int
    label: str


Shown = Callable[[Standing], None]


@with_bar("cells", lambda standing: (*standing.steps, standing.label))
@takes_options(SweepOptions)
def sweep(
    config: str | Path | Mapping[str, Any] | Grid | None = None,
    /,
    *,
    shard: tuple[int, int] | None = None,
    scheduler: str | None = None,
    progress: Shown | bool | None = None,
    **options: Unpack[SweepOptions],
) -> Run:
    """Replay a grid of policies, parameters, budgets and intervals over traces, and measure it.

    The values are those of `kvsim.replay` and `kvsim.measure`, cell by cell, and so is the Table of
    the Run. A cell that fails stops no other one. Ctrl-C ends the sweep; what is done is kept.

    Any number of processes may compute the folder `out` at the same time, each of them what no
    other one has done; the same call goes on with what is there. With several `jobs`, a script
    needs `if __name__ == "__main__":`, as for any use of multiprocessing.

    Args:
        config: a YAML file (docs/sweeps.md), or the keys of one as a mapping or as keywords. Each
            of traces, policies, budgets and intervals is one value or several; a policy with
            settings is `{name: {parameter: values}}`.
        shard: (i, n), every n-th task, from the i-th on.
        scheduler: computes on the workers of a dask cluster, by its address or the file that it
            writes.
        progress: called with a Standing; True shows a bar.
        **options: the options of `kvsim.experiment.SweepOptions`.

    Raises:
        ConfigError: what is no grid.
        PolicyError: an unknown policy, parameter or metric.
        TraceError: a trace that cannot be opened.
        OutputError: a folder that cannot be written.
        ClusterError: a cluster that cannot be reached.
    """
    progress = check_progress(progress)
    of_sweep, of_grid = get_type_hints(Spread), dict[str, Any](options)
    spread = {name: of_grid.pop(name) for name in of_sweep if name in of_grid}
    own = given_options(Spread, spread, "sweep")
    plan = Plan.of(grid_from(config, **of_grid))
    kept = kept_in(own["out"])
    begin(plan, kept)
    return finish(plan, kept, jobs=own["jobs"], shard=shard, scheduler=scheduler, progress=progress)


@with_bar("cells")
@takes_options(ReplayOptions)
def replay_all(
    traces: Traces,
    policies: PolicyLike | Iterable[PolicyLike],
    budgets: int | str | Iterable[int | str],
    *,
    accounts: bool = True,
    progress: Progress | bool | None = None,
    **options: Unpack[ReplayOptions],
) -> Run:
    """Replay every policy at every budget over every trace, and measure the outcome.

    Args:
        traces: one or several: objects, paths, folders, names of samples.
        policies: one or several: objects or names.
        budgets: one or several: entries per KV head, or shares such as `25%`.
        accounts: keep what readers read (`Record.reads`); False frees it once it is measured, where
            there is no `out`.
        progress: called with (cells done, cells, what is being done); True shows a bar.
        **options: the options of `kvsim.experiment.ReplayOptions`.

    Without `metrics` it measures everything that the traces have the arrays for. With several
    `jobs`, a script needs `if __name__ == "__main__":`. `judge` takes True for the model that a
    trace names, or what `kvsim.recorder.load_model` takes; records that its pass cannot show have a
    remark instead. Policies that no budget binds have no regret.

    Returns:
        The Run: records, without what only measuring needs, and one Table. A cell that fails is
        among its failures, whatever its policy raises, and stops no other one. Ctrl-C ends the
        replays; what is done by then is measured and kept.

    Raises, before any work starts:
        BudgetError: a policy has no rule for a budget.
        MemoryLimitError: the memory holds no layer.
        NeedsError: a metric by name reads what a trace has not recorded.
        OutputError: the folder cannot be written.
        TraceError: two traces have one name.
    """
    given = given_options(ReplayOptions, options, "replay_all")
    show = check_progress(progress)
    accounts = accounts or given["out"] is not None
    plan = plan_replays(traces, policies, budgets, accounts=accounts, **options)
    kept = kept_in(given["out"])
    begin(plan, kept, resume=given["resume"])
    return finish(
        plan,
        kept,
        jobs=given["jobs"],
        progress=show and (lambda now: show(*now.steps, now.label)),
    )


def plan_replays(
    traces: Traces,
    policies: PolicyLike | Iterable[PolicyLike],
    budgets: int | str | Iterable[int | str],
    *,
    accounts: bool = True,
    **options: Unpack[ReplayOptions],
) -> Plan:
    """Return the plan of `replay_all`, which computes it; raises as that does."""
    given = given_options(ReplayOptions, options, "replay_all")
    traces, policies, budgets = as_traces(traces), as_policies(policies), listed(budgets)
    if not (traces and policies and budgets):
        raise PolicyError(
            f"{plural(len(traces), 'trace')}, {len(policies)} policies and {len(budgets)} budgets; "
            "expected at least one of each"
        )
    interval, own_schedule = given["interval"], given["own_schedule"]
    terms = interval, given["prefill"], given["compress"], given["prefill_chunk"]
    shared_terms(policies, terms, own_schedule=own_schedule)
    metrics, regret, judged = given["metrics"], given["regret"], bool(given["judge"])
    if metrics is None:
        chosen = choose(None, beside=BESIDE if regret else (), judged=judged)
    else:
        chosen = measurable(metrics, traces, regret=regret, judged=judged)
    grid = Grid.of(
        {name: given[name] for name in get_type_hints(Options)}
        | {"traces": traces, "policies": policies, "budgets": budgets}
        | {"intervals": [None] if own_schedule else interval}
        | {"metrics": [*chosen], "records": True}
    )
    plan = Plan.of(grid, list(chosen), accounts=accounts)
    plan = plan._replace(document={**plan.document, "command": "replay"})
    if metrics is None:
        plan = plan._replace(parameters={**plan.parameters, "metrics": None})
    for cell in plan.cells:
        check_cell(cell.trace, cell.policy, cell.budget, grid.options["memory"], cell.schedule)
    return plan


def begin(plan: Plan, kept: Kept, *, resume: bool | None = None) -> None:
    """Check that the plan can be computed, then make its folder or go on with one."""
    plan.check()
    plan.check_kind(kept)
    if isinstance(kept, Shards):
        kept.begin(plan.document, resume=resume)


def finish(plan: Plan, kept: Kept, *, shard: tuple[int, int] | None = None, **options: Any) -> Run:
    """Compute what is not finished yet; publish it unless it is a shard. options: as `work`."""
    interrupted = not work(plan, kept, shard=shard, **options)
    run = plan.run(kept, interrupted=interrupted)
    if isinstance(kept, Shards) and shard is None:
        if run.parameters["done"]:
            publish(run, kept)
        else:
            kept.withdraw()
    return run


def work(
    plan: Plan,
    kept: Kept,
    *,
    jobs: int | None = 1,
    shard: tuple[int, int] | None = None,
    scheduler: str | None = None,
    progress: Shown | None = None,
) -> bool:
    """Compute what is not finished yet; False if Ctrl-C ended it."""
    mine = plan.share(shard)
    count = processes(jobs, plan.flops, len(mine), plan.traces)
    if scheduler is not None and any(trace.path is None for trace in plan.traces):
        raise ConfigError(IN_MEMORY)
    kept.scan()
    todo = _Todo(mine, kept)
    show = _Shown(mine, plan, kept, progress)
    try:
        while True:
            if scheduler is not None:
                results = on_a_cluster(plan.compute, todo, scheduler)
            elif count > 1:
                results = in_processes(plan.compute, todo, count)
            else:
                results = in_this_process(lambda task: plan.compute(task, show.within), todo)
            with contextlib.closing(results):
                for task, result in results:
                    outcome = Outcome.lost(task, result) if isinstance(result, Lost) else result
                    kept.add(task, outcome)
                    show(task)
                    if outcome.interrupted:
                        return False
            if shard is not None or not todo.elsewhere():
                return True
            time.sleep(_LOOK)
            kept.scan()
    except KeyboardInterrupt:
        return False
    finally:
        kept.close()


class _Todo:
    """Tasks that are neither finished nor claimed; iterating claims them."""

    def __init__(self, tasks: Sequence[Task], kept: Kept) -> None:
        self._tasks, self._kept = tasks, kept
        self._tried: set[str] = set()
        self._before = set(kept.parts)  # what failed then is tried again

    def __iter__(self) -> Iterator[Task]:
        for task in self._remaining():
            if self._kept.claim(task):
                if self._seen(task):  # finished before it was claimed
                    self._kept.release(task.key)
                    continue
                self._tried.add(task.key)
                yield task

    def elsewhere(self) -> bool:
        """Whether tasks are left, which other processes compute."""
        return any(True for _ in self._remaining())

    def _remaining(self) -> Iterator[Task]:
        parts = (part for name, part in self._kept.parts.items() if name not in self._before)
        done = self._kept.done.union(*(part.failed for part in parts))
        for task in self._tasks:
            rest = task.without(done)
            if rest is not None and rest.key not in self._tried and not self._seen(rest):
                yield rest

    def _seen(self, task: Task) -> bool:
        return task.key not in self._before and self._kept.look(task.key)


class _Shown:
    """Calls `progress` with what is done."""

    def __init__(
        self, mine: Sequence[Task], plan: Plan, kept: Kept, progress: Shown | None
    ) -> None:
        self._plan, self._progress = plan, progress
        done = kept.done
        finished = sum(len({*task.keys} & done) for task in mine if task.cells)
        self._steps = finished, sum(len(task.cells) for task in mine)
        self._left = {number: len(set(keys) - done) for number, keys in plan.keys.items()}
        self._trace_of = {cell.number: cell.trace.name for cell in plan.cells}
        #: cells that are left of each trace
        self._open = Counter(name for at, name in self._trace_of.items() if self._left[at])
        self._read = 0
        self._show("")

    def __call__(self, task: Task) -> None:
        self._steps = self._steps[0] + len(task.cells), self._steps[1]
        self._read += self._plan.bytes_of(task)
        for cell in task.cells:
            self._left[cell.number] -= 1
            self._open[task.name] -= not self._left[cell.number]
        self._show(task.name if task.cells else "")

    def within(self, done: int, _: int, label: str) -> None:
        """Show that so many cells of the task at hand are done."""
        self._show(label, done)

    def _show(self, label: str, more: int = 0) -> None:
        if self._progress is None:
            return
        cells, traces = len(self._plan.cells), len(self._plan.traces)
        done_cells = cells - self._open.total()
        steps = self._steps[0] + more, self._steps[1]
        done_traces = traces - sum(count > 0 for count in self._open.values())
        self._progress(
            Standing(steps, (done_cells, cells), (done_traces, traces), self._read, label)
        )


def publish(run: Run, shards: Shards) -> None:
    """Write the whole next to the parts: run.json, results.parquet, failures.json, and records."""
    failures = [vars(failure) for failure in run.failures]

    def write(draft: Path) -> None:
        run.write(draft)
        (draft / "failures.json").write_text(json.dumps(failures, indent=2) + "\n")

    with shards.writing(), (shards.folder / "lock").open("ab") as locked:
        lock(locked, wait=True)
        replace_run(shards.folder, write)
