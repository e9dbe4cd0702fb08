"""Training adds sums in one order."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """One thread, so that sums are added in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
