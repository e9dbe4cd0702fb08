"""Tasks in this process, in processes on this machine, or on any executor.

Tasks are opaque here. When a process of this machine dies, the tasks under way are tried again, one
at a time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context
from typing import Any, TypeVar

from kvsim.core.trace import Trace
from kvsim.errors import ConfigError
from kvsim.files import end_with_parent
from kvsim.store.forecast import Forecast

Task = TypeVar("Task")
#: Each task, and its result or the exception that it raised.
Results = Generator[tuple[Task, Any], None, None]

#: Floating-point operations of attention that one process computes while a second one imports its
#: modules.
_SMALL = 1e12
#: Tasks queued for each process, so that none is idle.
_AHEAD = 2
#: Environment variables that limit libraries to one thread, set before their import.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS")


def processes(
    jobs: int | None, flops: float, tasks: int, traces: Iterable[Trace], each: Forecast
) -> int:
    """Return the number of processes, with one thread each, that compute the tasks of a sweep.

    jobs: as given; None chooses one for small work, for traces in memory and on a GPU, else one per
    processor, as far as they fit the memory of the machine. flops: of the attention. each: of one
    process. Raises ConfigError for several jobs with a trace in memory.
    """
    in_memory = any(trace.path is None for trace in traces)
    if jobs is None:
        affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
        processors = len(affinity(0)) if affinity else os.cpu_count() or 1
        alone = in_memory or each.device_memory or flops < _SMALL
        jobs = 1 if alone else min(processors, int(_memory() // max(1, each.memory)))
    elif jobs > 1 and in_memory:
        raise ConfigError(IN_MEMORY)
    return max(1, min(jobs, tasks))


def _memory() -> int:
    """Bytes of memory of the machine; a large number on Windows, which does not say."""
    if not hasattr(os, "sysconf"):
        return 1 << 60
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


#: Why a trace cannot be computed elsewhere.
IN_MEMORY = (
    "a trace in memory is given, which other processes cannot read; save it and give its path, or "
    "compute in this process (jobs=1)"
)


def in_this_process(function: Callable[[Task], Any], tasks: Iterable[Task]) -> Results[Task]:
    """Yield each task and its result, or the exception that it raised."""
    for task in tasks:
        try:
            result = function(task)
        except Exception as error:  # noqa: BLE001 a task may raise anything
            result = error
        yield task, result


def in_processes(
    function: Callable[[Task], Any], tasks: Iterable[Task], jobs: int
) -> Results[Task]:
    """Yield results in any order, from processes with one thread each.

    tasks: are taken as processes become free. Closing the generator stops the processes.
    """
    todo = iter(tasks)
    suspects: list[Task] = []
    while True:
        with _pool(jobs) as pool:
            for task, result in on_executor(function, todo, pool, jobs * _AHEAD):
                if isinstance(result, BrokenExecutor):
                    suspects.append(task)
                else:
                    yield task, result
        if not suspects:
            return
        while suspects:  # one at a time, to identify the task that kills its process
            task = suspects.pop()
            for _ in range(2):
                with _pool(1) as pool:
                    ((_, result),) = on_executor(function, [task], pool)
                if not isinstance(result, BrokenExecutor):
                    break
            yield task, result


def on_executor(
    function: Callable[[Task], Any], tasks: Iterable[Task], executor: Any, most: int | None = None
) -> Results[Task]:
    """Yield results in any order, from any executor whose futures have `done` and `result`.

    most: tasks under way at a time, all by default. A broken executor takes no more tasks.
    """
    todo = iter(tasks)
    under_way: dict[Any, Task] = {}
    broken = False
    while True:
        room = 0 if broken else None if most is None else most - len(under_way)
        for task in islice(todo, room):
            try:
                under_way[_submitted(executor, function, task)] = task
            except BrokenExecutor as error:
                broken = True
                yield task, error
                break
        if not under_way:
            return
        for future in _finished([*under_way]):
            try:
                result = future.result()
            except Exception as error:  # noqa: BLE001 a task may raise anything
                result = error
                broken |= isinstance(error, BrokenExecutor)
            yield under_way.pop(future), result


def _finished(futures: Sequence[Any]) -> Iterable[Any]:
    """Wait for the first futures; submitit's are of no class of `concurrent.futures`."""
    if all(isinstance(future, Future) for future in futures):
        return wait(futures, return_when=FIRST_COMPLETED).done
    while not (done := [future for future in futures if future.done()]):
        time.sleep(0.2)
    return done


def _submitted(executor: Any, function: Callable[[Task], Any], task: Task) -> Any:
    """Submit a task; a process started here ignores Ctrl-C, which this process handles."""
    if threading.current_thread() is not threading.main_thread():
        return executor.submit(function, task)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return executor.submit(function, task)
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that end with the block, at once after an exception or a kill."""
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
