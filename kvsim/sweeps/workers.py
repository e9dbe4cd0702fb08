"""Processes that work on tasks: this one, a pool on this machine, or the workers of a cluster.

Nothing here knows what a task is. `processes` says how many compute a sweep. A process that dies
takes no other task with it: those that were under way are tried again, one at a time, and given up
after three attempts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

from kvsim.core.trace import Trace
from kvsim.errors import ConfigError, KvsimError, error_line
from kvsim.files import end_with_parent

Task = TypeVar("Task")

#: Floating-point operations of the attention of a sweep that one process is done with before a
#: second one has imported what it needs.
_SMALL = 1e12
#: How often a task is tried that was under way when a process died.
ATTEMPTS = 3
#: Tasks that wait for each process, so that none is idle.
AHEAD = 2
#: Variables by which libraries take one thread, before they are imported.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS")


class Lost(NamedTuple):
    """Why a task has no result; unexpected: for an error that the task itself raised, or worse."""

    reason: str
    unexpected: bool = True

    @classmethod
    def of_error(cls, error: BaseException) -> Lost:
        """The loss of a task that raised an error."""
        if isinstance(error, KvsimError):
            return cls(str(error), unexpected=False)
        return cls(f"{type(error).__name__}: {error_line(error)}")

    @classmethod
    def of_deaths(cls, host: str) -> Lost:
        """The loss of a task whose host, a process or a worker, died each time it was tried."""
        return cls(f"its {host} died {ATTEMPTS} times; was it killed for memory?")


def processes(jobs: int | None, flops: float, tasks: int, traces: Iterable[Trace]) -> int:
    """Return how many processes, with one thread each, compute the tasks of a sweep.

    jobs: as given; None chooses, one for small work and for traces in memory, else one for each
    processor. flops: of the attention. Raises ConfigError where several are given for a trace in
    memory.
    """
    in_memory = any(trace.path is None for trace in traces)
    if jobs is None:
        affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
        processors = len(affinity(0)) if affinity else os.cpu_count() or 1
        jobs = 1 if in_memory or flops < _SMALL else processors
    elif jobs > 1 and in_memory:
        raise ConfigError(IN_MEMORY)
    return max(1, min(jobs, tasks))


#: Why a trace cannot be computed elsewhere.
IN_MEMORY = (
    "a trace in memory is given, which other processes cannot read; save it and give its path, or "
    "compute in this process (jobs=1)"
)


def in_this_process(
    function: Callable[[Task], Any], tasks: Iterable[Task]
) -> Generator[tuple[Task, Any], None, None]:
    """Yield each task and its result, or `Lost`."""
    for task in tasks:
        try:
            result = function(task)
        except Exception as error:  # noqa: BLE001  what a task raises is anybody's
            result = Lost.of_error(error)
        yield task, result


def in_processes(
    function: Callable[[Task], Any], tasks: Iterable[Task], jobs: int
) -> Generator[tuple[Task, Any], None, None]:
    """Yield each task and its result or `Lost`, in any order, from processes with one thread each.

    tasks: are taken as processes become free. Closing the generator stops the processes.
    """
    todo = iter(tasks)
    while suspects := (yield from _until_broken(function, todo, jobs, jobs * AHEAD)):
        deaths = dict.fromkeys(map(id, suspects), 1)
        alone = iter(suspects)  # one at a time: whose death it was now shows
        while died := (yield from _until_broken(function, alone, 1, 1)):
            (task,) = died
            deaths[id(task)] += 1
            if deaths[id(task)] < ATTEMPTS:
                alone = chain(died, alone)
            else:
                yield task, Lost.of_deaths("process")


def _until_broken(
    function: Callable[[Task], Any], tasks: Iterator[Task], jobs: int, most: int
) -> Generator[tuple[Task, Any], None, list[Task]]:
    """Yield results until no task is left, or a process dies; return the tasks under way then."""
    with _pool(jobs) as pool:
        under_way: dict[Future[Any], Task] = {}
        while True:
            for task in islice(tasks, most - len(under_way)):
                try:
                    under_way[_submitted(pool, function, task)] = task
                except BrokenProcessPool:
                    return [*under_way.values(), task]
            if not under_way:
                return []
            finished, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in finished:
                error = future.exception()
                if not isinstance(error, BrokenProcessPool):
                    task = under_way.pop(future)
                    yield task, future.result() if error is None else Lost.of_error(error)
            if any(future in under_way for future in finished):
                return list(under_way.values())


def _submitted(
    pool: ProcessPoolExecutor, function: Callable[[Task], Any], task: Task
) -> Future[Any]:
    """Submit a task; a process that this starts ignores Ctrl-C, which is for this one to handle."""
    if threading.current_thread() is not threading.main_thread():
        return pool.submit(function, task)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return pool.submit(function, task)
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that end with the block, at once if an exception or a kill ends it."""
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent)
    try:
        with _one_thread():
            yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):  # noqa: SLF001  public in 3.14
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let processes that are started meanwhile take one thread each."""
    before = {name: os.environ[name] for name in _THREADS if name in os.environ}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name in _THREADS:
            os.environ.pop(name, None)  # another thread may have ended a sweep of its own
        os.environ.update(before)
