"""Processes that work on tasks: what becomes of tasks whose process dies or that raise."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

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


DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
from chores import work_on
from kvsim.sweeps.workers import in_processes
for task, _ in in_processes(work_on, [("hangs", "busy"), ("says", "idle")], 2):
    print("took it from", task, flush=True)
"""


def test_workers_end_with_a_killed_driver():
    """Neither a busy nor an idle worker outlives the process that started it."""
    command = [sys.executable, "-c", DRIVER, str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        lines = [driver.stdout.readline().split() for _ in range(3)]
        driver.kill()
        try:
            # its workers have the same standard output: it ends with the last of them
            rest, _ = driver.communicate(timeout=20)
        finally:
            for _, process in (line for line in lines if len(line) == 2):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
    assert sorted(line[0] for line in lines) == ["busy", "idle", "took"]
    assert rest == ""


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
