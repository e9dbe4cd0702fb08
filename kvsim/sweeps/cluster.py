"""Tasks on the workers of a dask cluster that runs already (docs/sweeps.md).

dask.distributed runs what any client sends: keep its scheduler on a private network, or use its
TLS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from importlib.metadata import version
from itertools import islice
from typing import Any, TypeVar

from kvsim.errors import ClusterError, ConfigError, error_line
from kvsim.sweeps.workers import AHEAD, ATTEMPTS, Lost

Task = TypeVar("Task")

#: Seconds to wait for the scheduler, and for a worker that no longer answers: a result lies on its
#: worker, and asking a dead one takes this long.
_PATIENCE = {"distributed.comm.timeouts.connect": "5s", "distributed.comm.timeouts.tcp": "20s"}


def on_a_cluster(
    function: Callable[[Task], Any], tasks: Iterable[Task], scheduler: str
) -> Generator[tuple[Task, Any], None, None]:
    """Yield each task and its result or `Lost`, in any order, from the workers of a cluster.

    scheduler: its address (tcp://host:port), or the file that it writes (--scheduler-file).

    Raises ClusterError where it cannot be reached, has no workers, or runs another version.
    """
    try:
        import dask  # noqa: PLC0415  an optional extra
        import distributed  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "a scheduler needs dask.distributed; pip install 'kvsim[dask]'"
        ) from error
    where = {"scheduler_file": scheduler} if scheduler.endswith(".json") else {"address": scheduler}
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(_PATIENCE))
        try:
            make: Any = distributed.Client
            client = stack.enter_context(make(**where, timeout=5, set_as_default=False))
        except (OSError, ValueError, TimeoutError) as error:
            raise ClusterError(
                f"the scheduler at {scheduler} cannot be reached ({error_line(error)}); check its "
                "address, and that it runs"
            ) from error
        _check_versions(client, scheduler)
        yield from _results(distributed, client, function, iter(tasks))


def _check_versions(client: Any, scheduler: str) -> None:
    """Raise ClusterError unless scheduler, which reads tasks too, and workers have this version."""
    try:
        versions = {"the scheduler": client.run_on_scheduler(_version)}
        workers = client.run(_version, on_error="return")
    except (ImportError, OSError, RuntimeError) as error:
        raise _not_importable(scheduler, error) from error
    # a worker that has just died is still listed, and does not answer
    versions |= {place: x for place, x in workers.items() if not isinstance(x, OSError)}
    if len(versions) == 1:
        option = "--scheduler-file " if scheduler.endswith(".json") else ""
        raise ClusterError(
            f"{scheduler} has no workers; start some with `dask worker {option}{scheduler}`"
        )
    for place, theirs in versions.items():
        if isinstance(theirs, BaseException):
            raise _not_importable(place, theirs)
        if theirs != _version():
            raise ClusterError(f"{place} has kvsim {theirs}, expected {_version()}")


def _not_importable(place: str, error: BaseException) -> ClusterError:
    return ClusterError(
        f"{place}: kvsim cannot be imported there ({error_line(error)}); install kvsim "
        f"{_version()} for the scheduler and its workers"
    )


def _version() -> str:
    return version("kvsim")


def _results(
    distributed: Any, client: Any, function: Callable[[Task], Any], tasks: Iterator[Task]
) -> Generator[tuple[Task, Any], None, None]:
    """Yield results; tasks that took a worker with them are tried again one at a time."""
    under_way: dict[Any, Task] = {}
    suspects: list[Task] = []
    most = AHEAD * max(1, sum(client.nthreads().values()))
    finished = distributed.as_completed(loop=client.loop)

    def submit() -> None:
        for task in islice(tasks, most - len(under_way)):
            future = client.submit(function, task, pure=False)
            under_way[future] = task
            finished.add(future)

    submit()
    for future in finished:
        task = under_way.pop(future)
        # by its result and never by its status: a finished one can be lost with its worker, and is
        # then computed again
        result = _result(distributed, future)
        if result is None:
            suspects.append(task)
        else:
            yield task, result
        submit()
    for task in suspects:
        attempts = (
            _result(distributed, client.submit(function, task, pure=False))
            for _ in range(ATTEMPTS - 1)
        )
        lost = Lost.of_deaths("worker")
        yield task, next((result for result in attempts if result is not None), lost)


def _result(distributed: Any, future: Any) -> Any:
    """Return the result of a future, `Lost` for an error of its own, None if its worker died."""
    try:
        return future.result()
    except distributed.scheduler.KilledWorker:
        return None
    except Exception as error:  # noqa: BLE001  what a task raises is anybody's
        return Lost.of_error(error)
    finally:
        future.release()
