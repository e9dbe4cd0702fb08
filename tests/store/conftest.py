"""Fixtures of tests of the store."""

import shutil

import pytest

import kvsim
from saved_traces import make


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One stored trace, to be copied before it is changed."""
    return kvsim.save_trace(make(), tmp_path_factory.mktemp("saved") / "made.zarr")


@pytest.fixture
def stored(saved, tmp_path):
    """A stored trace that a test may damage."""
    return shutil.copytree(saved, tmp_path / "made.zarr")
