"""Captures that are killed at any moment, and recorded again."""

import signal
import subprocess
import time

import pytest
from interrupted_captures import RESPONSE, ids, names, record

from kvsim.recorder import Prompt, capture_many
from kvsim.store.verification import verify
from small_model import small

KILLED = """
import signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from interrupted_captures import record
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
record(Path(sys.argv[1]), o_proj=True, residual=True)
signal.pause()
"""


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.deep)])
def test_a_killed_capture_is_recorded_again(kills, tmp_path, warm_python, pytestconfig):
    """Its trace is that of a capture that ran through, bit for bit, and nothing else is left."""
    record(tmp_path / "first" / "a.zarr", o_proj=True, residual=True)  # loads what it needs
    begun = time.perf_counter()
    whole = record(tmp_path / "whole" / "a.zarr", o_proj=True, residual=True)
    seconds, unfinished = time.perf_counter() - begun, 0
    for kill in range(kills):
        path = tmp_path / str(kill) / "a.zarr"
        after = str(seconds * (kill + 0.5) / kills)
        tests = str(pytestconfig.rootpath / "tests")
        command = [warm_python, "-c", KILLED, str(path), after, tests]
        assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGALRM
        unfinished += not path.exists()

        trace = record(path, o_proj=True, residual=True, resume=True)

        assert trace.digest == whole.digest
        assert verify(path).ok
        assert names(path.parent) == ["a.zarr"]
    assert unfinished > kills / 10  # on a busy machine the first capture may be the slowest


def test_an_interrupted_series_keeps_what_is_complete(tmp_path):
    """Of several prompts the first stays as it is, and nothing is left of the second."""
    prompts = [Prompt(name, ids(300)) for name in ("one", "two", "three")]
    seen = []

    def progress(done, total):
        seen.append(done)
        if seen.count(320) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_many(small(), None, prompts, tmp_path, max_new_tokens=RESPONSE, progress=progress)

    assert names(tmp_path) == ["one.zarr"]
