"""Traces on disk that the tests of sweeps share."""

import pytest
import torch

import kvsim


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two small stored traces of four layers."""
    folder = tmp_path_factory.mktemp("traces")
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        kvsim.Trace.from_arrays(
            torch.randn(4, 4, 60, 8),
            torch.randn(4, 2, 60, 8),
            torch.randn(4, 2, 60, 8),
            prompt_len=30,
            rope=kvsim.Rope.default(8),
            name=name,
        ).save(folder / f"{name}.zarr")
    return [str(folder / f"{name}.zarr") for name in "ab"]
