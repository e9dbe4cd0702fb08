"""Traces on disk that the tests of sweeps share."""

import pytest

from traces import random_trace


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two small stored traces of four layers."""
    folder = tmp_path_factory.mktemp("traces")
    traces = [
        random_trace(layers=4, n=60, seed=seed, size=1.0, prompt_len=30, name=name)
        for seed, name in enumerate("ab")
    ]
    return [str(trace.save(folder / f"{trace.name}.zarr")) for trace in traces]
