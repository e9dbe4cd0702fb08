"""`live`: policies on a running model, over recorded prompts, into one Table and one run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, get_type_hints

import polars as pl
import torch
from torch import Tensor

from kvsim.analysis.live.table import choose_live, measure_live
from kvsim.analysis.subject import LiveSubject
from kvsim.core.arguments import listed
from kvsim.core.checks import check_progress
from kvsim.core.options import given_options, takes_options
from kvsim.core.outcome import Outcome as Lived
from kvsim.core.policy import PolicyLike
from kvsim.core.record import Record
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.engine.checks import check_cell
from kvsim.errors import MemoryLimitError, PolicyError
from kvsim.experiment import LiveOptions, OfCells
from kvsim.policies import as_policies
from kvsim.progress import with_bar
from kvsim.recorder import load_model
from kvsim.recorder.batching import separate
from kvsim.recorder.choice import Choice, stop_tokens
from kvsim.runner.batch import respond, unbatched
from kvsim.runner.checks import check_live
from kvsim.runner.closed import ClosedLoop, Own, Writing
from kvsim.runner.decoding import Decoding, RunningModel
from kvsim.runner.paged import Paging
from kvsim.runner.recorded import check_recorded
from kvsim.store.opening import Traces, as_traces
from kvsim.sweeps.cells import Cell, Outcome, Progress, cells_of, compute
from kvsim.sweeps.driver import Plan, describe
from kvsim.sweeps.folder import Parts
from kvsim.sweeps.grid import grid_of
from kvsim.sweeps.outcome import Run
from kvsim.sweeps.tasks import Task, tasks_of
from kvsim.sweeps.terms import described, params_of


@with_bar("cells")
@takes_options(LiveOptions)
def live(
    model: Any,
    traces: Traces,
    policies: PolicyLike | Iterable[PolicyLike],
    budgets: int | str | Iterable[int | str],
    *,
    tokenizer: Any = None,
    progress: Progress | bool | None = None,
    **options: Unpack[LiveOptions],
) -> Run:
    """Run every policy at every budget on the model itself, over recorded prompts.

    The same policies decide through the same View as in a replay, on what their own evictions have
    made of the model: the cache is compressed, and memory freed. The recorded response is fed to
    the model (teacher-forced), so that records and values compare with those of `replay_all`; with
    max_new_tokens the model also writes a response of its own to each prompt, which is compared
    with the right answer. Values have fidelity `closed`. One sequence runs at a time, but `batch`
    responses are written at once: tokens and metrics are those of one by one, and `decode_seconds`
    is the time until the response ended.

    Args:
        model: a decoder model of transformers, or what `kvsim.recorder.load_model` takes.
        traces: one or several, as for `kvsim.sweep`.
        policies: one or several.
        budgets: one or several.
        tokenizer: the model's, where the model is no name.
        progress: called with (cells done, cells, what is being done); True shows a bar.
        **options: the options of `kvsim.experiment.LiveOptions`.

    Raises:
        PolicyError: a policy that a running model cannot follow (`kvsim.runner.checks.check_live`).
        NeedsError: a trace without tokens.
        CaptureError: another model or tokenizer than the recorded ones, by configuration, the
            digest of the weights and what the model computes with the full cache
            (`kvsim.runner.recorded`).
        KvsimError: what `replay_all` raises.
    """
    show = check_progress(progress)
    given = given_options(LiveOptions, options, "live", PolicyError)
    plan, loops = plan_live(model, traces, policies, budgets, tokenizer=tokenizer, **options)
    return loops.finish(plan, plan.begin(given["out"]), given["batch"], show)


def plan_live(
    model: Any,
    traces: Traces,
    policies: PolicyLike | Iterable[PolicyLike],
    budgets: int | str | Iterable[int | str],
    *,
    tokenizer: Any = None,
    **options: Unpack[LiveOptions],
) -> tuple[Plan, Loops]:
    """Return the plan of `live`, and what computes it; raises as that does.

    model: without weights it can be planned alone.
    """
    given = given_options(LiveOptions, options, "live", PolicyError)
    of_grid = {name: given[name] for name in get_type_hints(OfCells)}
    of_grid |= {"traces": as_traces(traces), "policies": as_policies(policies)}
    sizes: list[Any] = listed(budgets)
    grid = grid_of(of_grid | {"budgets": sizes})
    (terms, shared), *more = grid.schedules()
    if more:
        raise PolicyError(f"interval has {1 + len(more)} values; expected one for a running model")
    traces, policies = grid.opened(), grid.policies
    layers = grid.options["layers"]
    new_tokens = given["max_new_tokens"]
    chosen = choose_live(grid.options["metrics"])
    cells = cells_of(traces, policies, grid.budgets, [terms])
    for cell in cells:
        check_live(cell.policy)
        check_cell(cell.trace, cell.policy, cell.budget, None, cell.schedule)
    if isinstance(model, str | Path):
        model, tokenizer = load_model(model)
    running = RunningModel(model)
    for trace in traces:
        check_recorded(trace, running.described, tokenizer)
        later = sum(new_tokens + stop - start for start, stop in trace.questions)
        running.check_length(max(trace.n_pos, trace.prompt_len + new_tokens + later))
    stop = stop_tokens(running.model, tokenizer)
    draws = {name: given[name] for name in ("temperature", "seed", "top_k", "top_p")}
    draws = {name: value for name, value in draws.items() if value is not None}
    choice = Choice(running.model, stop, **draws)
    parameters: dict[str, Any] = {
        "loop": "closed",
        "weights": running.described.get("weights"),
        "policies": params_of(policies),
        "budgets": list(grid.budgets),
        "schedules": [described(terms)],
        **{name: grid.options[name] for name in ("layers", "metrics", "events", "memory")},
        "max_new_tokens": new_tokens,
        **draws,
        **(choice.settings if new_tokens else {}),
        "device": str(running.device),
    }
    paging = None
    if given["paged"] is not None:
        paging = Paging(given["paged"], given["block_tables"])
        parameters |= {name: given[name] for name in ("paged", "block_tables")}
    joined, alone = _batched(running, cells, given)
    writing = Writing(new_tokens, choice) if new_tokens else None
    sampling = {"stop": stop, "choice": choice}

    def loop_of(trace: Trace) -> ClosedLoop:
        if paging is not None:
            paging.release()  # the prefixes of another prompt
        return ClosedLoop(running, trace, tokenizer, writing, paging)

    names = list(chosen)
    loops = Loops(loop_of, cells, names, layers, joined, sampling, paging, events=given["events"])
    plan = Plan(
        traces=traces,
        cells=cells,
        tasks=tasks_of(cells, names, {"records": True}, together=1),
        metrics=names,
        parameters={**parameters, "batch": given["batch"]},
        notes=(*filter(None, [shared]), *alone, *(choice.notes if new_tokens else ())),
        description=describe(traces, policies, names, parameters),
        model_bytes=sum(each.nbytes for each in running.model.parameters()),
        compute=loops.compute,
        check=loops.check,
    )
    return plan, loops


def _batched(
    running: RunningModel, cells: Sequence[Cell], given: Mapping[str, Any]
) -> tuple[list[Cell], list[str]]:
    """Return the cells whose responses are written in batches, and notes on the others.

    Raises PolicyError for a batch without responses, or with a paged cache.
    """
    if given["batch"] == 1:
        return [], []
    if not given["max_new_tokens"] or given["paged"] is not None:
        raise PolicyError(
            f"batch is {given['batch']}, without max_new_tokens or with a paged cache; expected "
            "responses, of caches that are not paged: give --max-new-tokens, leave --paged out"
        )
    longest = max(cell.trace.prompt_len for cell in cells) + given["max_new_tokens"]
    whole = separate(running.model, longest)
    reasons = {cell.policy.name: whole or unbatched(cell.policy) for cell in cells}
    reasons |= {cell.trace.name: "it has several turns" for cell in cells if cell.trace.questions}
    notes = [f"{name} writes one by one: {reason}" for name, reason in reasons.items() if reason]
    alone = {name for name, reason in reasons.items() if reason}
    return [cell for cell in cells if not {cell.policy.name, cell.trace.name} & alone], notes


class Loops:
    """Runs the cells of tasks on a model, one after the other.

    joined: cells whose responses are written in batches. sampling: how.
    """

    def __init__(
        self,
        loop_of: Callable[[Trace], ClosedLoop],
        cells: Sequence[Cell],
        metrics: Sequence[str],
        layers: Sequence[int] | None,
        joined: Sequence[Cell],
        sampling: Mapping[str, Any],
        paging: Paging | None,
        *,
        events: bool,
    ) -> None:
        self._loop_of, self._cells, self._metrics = loop_of, cells, metrics
        self._layers, self._events = layers, events
        self._joined, self._sampling, self._paging = joined, sampling, paging
        self._loop: ClosedLoop | None = None  # of the trace at hand, with what its cells share
        self._outcomes: dict[int, Lived] = {}
        self._batches: list[list[Cell]] = []
        self._responses: dict[int, Own | MemoryLimitError] = {}

    def check(self) -> None:
        """Raise CaptureError for a trace of another model, before the first cell of any is run."""
        traces = {cell.trace.name: cell.trace for cell in self._cells}
        for trace in reversed(traces.values()):
            self._loop = self._loop_of(trace)  # that of the first trace is used
            with threads_for(self._loop.running.model):
                self._loop.check([cell.schedule for cell in self._cells])

    def finish(self, plan: Plan, parts: Parts, batch: int, progress: Progress | None) -> Run:
        """Run what is not finished yet, so many responses at once."""
        left = {cell.number for task in parts.left(plan.tasks) for cell in task.cells}
        rest = [cell for cell in self._joined if cell.number in left]
        self._batches = [rest[at : at + batch] for at in range(0, len(rest), batch)]
        run = plan.finish(parts, progress=progress)
        return replace(run, notes=(*run.notes, *(self._paging.notes if self._paging else ())))

    def compute(self, task: Task, report: Progress = lambda *_: None) -> Outcome:
        """Run the cell of a task."""
        cells = [cell for cell in self._cells if cell.number in task.numbers]
        if self._loop is None or self._loop.trace is not cells[0].trace:
            self._loop = self._loop_of(cells[0].trace)
        with threads_for(self._loop.running.model):
            return compute(cells, self.record, self.table, report)

    def record(self, cell: Cell) -> Record:
        """Run a cell."""
        loop = self._loop or self._loop_of(cell.trace)
        for batch in self._batches:
            if cell in batch:
                self._batches.remove(batch)
                self._write(batch)
                break
        response = self._responses.pop(cell.number, None)
        if isinstance(response, MemoryLimitError):
            raise response
        record, self._outcomes[cell.number] = loop.run(
            cell.policy, cell.budget, cell.schedule, self._layers, response
        )
        digest = cell.trace.fingerprint if cell.trace.path is not None else ""
        return replace(record, digest=digest)

    def _write(self, cells: Sequence[Cell]) -> None:
        """Write the responses of a batch; a cell that cannot says why when it runs alone."""
        loops = {} if self._loop is None else {self._loop.trace.name: self._loop}
        lanes: dict[int, tuple[Decoding, Tensor]] = {}
        try:
            for cell in cells:
                name = cell.trace.name
                loop = loops[name] = loops.get(name) or self._loop_of(cell.trace)
                with suppress(Exception):
                    lanes[cell.number] = loop.begin(
                        cell.policy, cell.budget, cell.schedule, self._layers
                    )
            sequences, logits = zip(*lanes.values(), strict=True)
            limits = [each.sketch.n_pos - each.sketch.prompt_len for each in sequences]
            written = respond(sequences, logits, limits, **self._sampling)
        except torch.OutOfMemoryError:
            error = MemoryLimitError(
                f"{len(cells)} responses at once take more memory than the device has free; "
                "expected a smaller batch (--batch)"
            )
            self._responses |= dict.fromkeys((cell.number for cell in cells), error)
        except Exception:  # noqa: BLE001, S110  a policy is anybody's code
            pass
        else:
            answers = ([each] for each in written)
            self._responses |= zip(lanes, zip(sequences, answers, strict=True), strict=True)

    def table(self, cells: Sequence[Cell], records: Sequence[Record]) -> pl.DataFrame:
        """Measure what the model did."""
        subjects = [
            LiveSubject(cell.trace, record, self._outcomes.pop(cell.number))
            for cell, record in zip(cells, records, strict=True)
        ]
        return measure_live(subjects, self._metrics, events=self._events)
