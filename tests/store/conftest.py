"""Fixtures of tests of the store."""

import shutil
import uuid

import fsspec
import pytest

from saved_traces import make
from web import served


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One stored trace, to be copied before it is changed."""
    return make().save(tmp_path_factory.mktemp("saved") / "made.zarr")


@pytest.fixture
def stored(saved, tmp_path):
    """A stored trace that a test may damage."""
    return shutil.copytree(saved, tmp_path / "made.zarr")


@pytest.fixture
def memory():
    """The URL of a place in fsspec's memory, empty before and after."""
    system = fsspec.filesystem("memory")
    root = f"/{uuid.uuid4()}"
    yield f"memory:/{root}/made.zarr"
    if system.exists(root):
        system.rm(root, recursive=True)


@pytest.fixture
def folder_on_the_web(tmp_path):
    """The URL of a server of `tmp_path`."""
    with served(tmp_path) as url:
        yield url
