"""Processes that work on tasks: what becomes of tasks whose process dies or that raise."""

import os

from chores import work_on

from kvsim.sweeps.workers import Lost, _one_thread, in_processes, in_this_process


def test_a_task_that_kills_its_process_takes_no_other_with_it(tmp_path):
    """Good tasks come through, one that dies once too; the error and the killer are named."""
    tasks = [("good", number) for number in range(6)]
    tasks[3:3] = [("dies", 0), ("raises", 0), ("dies once", str(tmp_path / "flag"))]

    results = dict(in_processes(work_on, tasks, 2))
    endless = in_processes(work_on, (("good", number) for number in range(10_000_000)), 1)
    next(endless)
    endless.close()  # stops the process, and waits for no other task

    assert len(results) == len(tasks)
    assert all(results["good", number] == number for number in range(6))
    assert results["dies once", str(tmp_path / "flag")] == str(tmp_path / "flag")
    assert results["raises", 0] == Lost("ValueError: of its own")
    assert "died 3 times" in results["dies", 0].reason


def test_one_process_keeps_what_raises_apart():
    """In this process an exception is the result of its task alone."""
    assert list(in_this_process(work_on, [("raises", 0), ("good", 1)])) == [
        (("raises", 0), Lost("ValueError: of its own")),
        (("good", 1), 1),
    ]


def test_sweeps_of_two_threads_may_end_in_any_order(monkeypatch):
    """Neither raises where the other has put the environment back."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    first, second = _one_thread(), _one_thread()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "OMP_NUM_THREADS" not in os.environ
    second.__exit__(None, None, None)
