"""Fixtures of tests of the store."""

import pytest
from interrupted_captures import record


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The undisturbed capture, of 560 tokens."""
    return record(tmp_path_factory.mktemp("whole") / "whole.zarr")
