"""`live`: policies on a running model, over recorded prompts, into one Table and one run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import polars as pl
import torch
from torch import Tensor

from kvsim.analysis.live.table import measure_live
from kvsim.analysis.measuring import choose
from kvsim.core.lazy import threads_for
from kvsim.core.options import takes_options
from kvsim.core.outcome import Outcome as Lived
from kvsim.core.policy import PolicyLike
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import MemoryLimitError, PolicyError
from kvsim.experiment import Experiment, LiveOptions
from kvsim.progress import with_bar
from kvsim.recorder import load_model
from kvsim.recorder.batching import separate
from kvsim.recorder.choice import Choice, stop_tokens
from kvsim.recorder.loading import ModelLike, Tokenizer
from kvsim.runner.batch import respond, unbatched
from kvsim.runner.closed import ClosedLoop, Own, Writing
from kvsim.runner.decoding import Decoding, RunningModel, check_live
from kvsim.runner.paged import Paging
from kvsim.runner.recorded import check_recorded
from kvsim.store.opening import Traces
from kvsim.sweeps.driver import Plan, describe, refusals
from kvsim.sweeps.folder import Run
from kvsim.sweeps.grid import EVERYTHING, described, grid_of, params_of
from kvsim.sweeps.tasks import Cell, Outcome, Progress, Task, compute, tasks_of


@with_bar("cells")
@takes_options(LiveOptions)
def live(
    model: ModelLike,
    traces: Traces,
    policies: PolicyLike | Iterable[PolicyLike],
    budgets: int | str | Iterable[int | str],
    *,
    tokenizer: Tokenizer = None,
    progress: Progress | bool | None = None,
    **options: Unpack[LiveOptions],
) -> Run:
    """Run every policy at every budget on the model itself, over recorded prompts.

    Policies decide through the same View as in a replay, but on the model's own compressed cache,
    whose memory is freed. The recorded response is fed to the model (teacher-forced), so that
    records and values compare with those of `replay_all`; with max_new_tokens the model also writes
    its own response to each prompt, which is compared with the right answer. Values have fidelity
    `closed`. One sequence runs at a time, or `batch` responses at once with equal tokens and
    metrics; `decode_seconds` is then the time until the response ended.

    Args:
        model: a decoder model of transformers, or a name for `kvsim.recorder.load_model`.
        traces: one or several, as for `kvsim.sweep`.
        policies: one or several.
        budgets: one or several.
        tokenizer: the model's, if `model` is not a name.
        progress: called with (cells done, cells, current step); True shows a bar.
        **options: the options of `kvsim.experiment.LiveOptions`.

    Raises:
        PolicyError: a policy that a running model cannot follow (`check_live`).
        NeedsError: a trace without tokens.
        CaptureError: not the recorded model or tokenizer, by configuration, digest of the weights
            and outputs with the full cache (`kvsim.runner.recorded`).
        KvsimError: as for `replay_all`.

    Example:
        >>> run = kvsim.live("tiny", "sample", "tova", 64)
        >>> run.table.filter(metric="response_kl")["fidelity"].to_list()
        ['closed']
    """
    show: Any = progress or None
    named = model if isinstance(model, str | Path) else None
    load = (lambda _: (model, tokenizer)) if named is None else (lambda _: load_model(named))
    plan = plan_live(load, traces=traces, policies=policies, budgets=budgets, **options)
    return plan.finish(plan.begin(), progress=show)


def plan_live(load: Callable[[Sequence[Trace]], tuple[Any, Any]], **options: Any) -> Plan:
    """Return the plan of `live`; raises as `live` does.

    load: returns the model of traces (without weights for a plan) and its tokenizer; called after
    options and policies are checked.
    """
    grid = grid_of(of=Experiment, where="live", **options)
    given = {**grid.options, "records": True}
    if given["metrics"] == EVERYTHING:
        given["metrics"] = None
    (terms, shared), *more = grid.schedules()
    if more:
        raise PolicyError(f"interval has {1 + len(more)} values; expected one for a running model")
    traces, policies, new_tokens = grid.opened(), grid.policies, given["max_new_tokens"]
    names = [*choose(given["metrics"], live=True)]
    for policy in policies:
        check_live(policy)
    cells = grid.cells(traces, [terms])
    refused = refusals(cells, None)
    model, tokenizer = load(traces)
    running = RunningModel(model)
    for trace in traces:
        check_recorded(trace, running.described, tokenizer)
        later = sum(new_tokens + stop - start for start, stop in trace.header.questions)
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
        **{name: given[name] for name in ("layers", "metrics", "events", "memory")},
        "max_new_tokens": new_tokens,
        **draws,
        **(choice.settings if new_tokens else {}),
        "device": str(running.device),
    }
    paging = None
    if given["paged"] is not None:
        paging = Paging(given["paged"])
        parameters["paged"] = given["paged"]
    joined, alone = _batched(running, cells, given)
    loops = Loops(running, tokenizer, cells, names, given, joined, stop, choice, paging)
    return Plan(
        traces=traces,
        cells=cells,
        tasks=tasks_of(cells, names, {"records": True}, refused, together=1),
        metrics=names,
        parameters={**parameters, "batch": given["batch"]},
        options=given,
        notes=(*filter(None, [shared]), *alone, *(choice.notes if new_tokens else ())),
        refused=refused,
        description=describe(traces, policies, names, parameters),
        model_bytes=sum(each.nbytes for each in running.model.parameters()),
        compute=loops.compute,
        check=loops.check,
        closing=lambda: () if paging is None else paging.notes,
    )


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
    reasons |= {
        cell.trace.name: "it has several turns" for cell in cells if cell.trace.header.questions
    }
    notes = [f"{name} writes one by one: {reason}" for name, reason in reasons.items() if reason]
    alone = {name for name, reason in reasons.items() if reason}
    return [cell for cell in cells if not {cell.policy.name, cell.trace.name} & alone], notes


@dataclass
class Loops:
    """Runs the cells of tasks on a model, one after the other.

    options: of the experiment. joined: cells whose responses are written in batches.
    """

    running: RunningModel
    tokenizer: Any
    cells: Sequence[Cell]
    metrics: Sequence[str]
    options: Mapping[str, Any]
    joined: Sequence[Cell]
    stop: Any
    choice: Choice
    paging: Paging | None
    _loop: ClosedLoop | None = None  # of the current trace, shared by its cells
    _outcomes: dict[int, Lived] = field(default_factory=dict)
    _batches: list[list[Cell]] = field(default_factory=list)
    _responses: dict[int, Own | MemoryLimitError] = field(default_factory=dict)

    def _loop_of(self, trace: Trace) -> ClosedLoop:
        if self.paging is not None:
            self.paging.release()
        new_tokens = self.options["max_new_tokens"]
        writing = Writing(new_tokens, self.choice) if new_tokens else None
        return ClosedLoop(self.running, trace, self.tokenizer, writing, self.paging)

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise CaptureError for a trace of another model, before its first cell runs."""
        traces = {cell.trace.name: cell.trace for cell in self.cells}
        for trace in reversed(traces.values()):
            self._loop = self._loop_of(trace)  # that of the first trace is used
            with threads_for(self._loop.running.model):
                self._loop.check([cell.schedule for cell in self.cells])
        left, batch = {n for task in tasks for n in task.numbers}, self.options["batch"]
        rest = [cell for cell in self.joined if cell.number in left]
        self._batches = [rest[at : at + batch] for at in range(0, len(rest), batch)]

    def compute(self, task: Task, report: Progress = lambda *_: None) -> Outcome:
        """Run the cell of a task."""
        cells = [cell for cell in self.cells if cell.number in task.numbers]
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
            cell.policy, cell.budget, cell.schedule, self.options["layers"], response
        )
        digest = cell.trace.fingerprint if cell.trace.path is not None else ""
        return replace(record, digest=digest)

    def _write(self, cells: Sequence[Cell]) -> None:
        """Write the responses of a batch; a failing cell reports its error when it runs again."""
        loops = {} if self._loop is None else {self._loop.trace.name: self._loop}
        lanes: dict[int, tuple[Decoding, Tensor]] = {}
        try:
            for cell in cells:
                name = cell.trace.name
                loop = loops[name] = loops.get(name) or self._loop_of(cell.trace)
                with suppress(Exception):
                    lanes[cell.number] = loop.begin(
                        cell.policy, cell.budget, cell.schedule, self.options["layers"]
                    )
            sequences, logits = zip(*lanes.values(), strict=True)
            limits = [each.sketch.n_pos - each.sketch.prompt_len for each in sequences]
            written = respond(sequences, logits, limits, stop=self.stop, choice=self.choice)
        except torch.OutOfMemoryError:
            error = MemoryLimitError(
                f"{len(cells)} responses at once take more memory than the device has free; "
                "expected a smaller batch (--batch-size)"
            )
            self._responses |= dict.fromkeys((cell.number for cell in cells), error)
        except Exception:  # noqa: BLE001, S110 a policy is user code
            pass
        else:
            answers = ([each] for each in written)
            self._responses |= zip(lanes, zip(sequences, answers, strict=True), strict=True)

    def table(self, cells: Sequence[Cell], records: Sequence[Record]) -> pl.DataFrame:
        """Measure the live run."""
        outcomes = [self._outcomes.pop(cell.number) for cell in cells]
        events = self.options["events"]
        return measure_live(cells[0].trace, records, outcomes, self.metrics, events=events)
