"""The sample traces that ship: their bytes, and replay on the one of SmolLM2."""

import pytest

import kvsim
from kvsim.errors import TraceNotFoundError
from kvsim.samples import SAMPLES
from kvsim.store.group import CheckedStore
from kvsim.store.reader import open_trace
from kvsim.store.verification import describe, verify

#: The SHA-256 of what each trace says and of all its numbers.
DIGESTS = {
    "tiny": "sha256:f0d786f2322e12e14ad9b97f88f8ae134ca12089be140a0ff4c62db49cac8e0a",
    "smollm2": "sha256:7feb3aeba68ec2658316e2e1ef581f9625a2224fabe89b4b582edd2639f0b842",
}
LAYERS = (7, 17, 28)


@pytest.fixture(scope="module")
def trace():
    """The sample of SmolLM2."""
    return open_trace(kvsim.sample_trace("smollm2"))


@pytest.mark.parametrize("model", SAMPLES.values())
def test_a_sample_is_small_and_undamaged(model):
    """The trace has the bytes that were recorded, at most 4 MB, and attention follows from it."""
    path = kvsim.sample_trace(model)
    result, facts = verify(path, deep=True), describe(path)

    assert (result.ok, result.problems) == (True, [])
    assert (facts["format"], facts["digest"]) == (6, DIGESTS[model])
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 4_000_000


@pytest.mark.parametrize("model", SAMPLES.values())
def test_opening_a_sample_reads_no_numbers(model, monkeypatch):
    """Opening reads metadata and tokens, no chunk of attention, whatever the size of the arrays."""
    read = []
    monkeypatch.setattr(CheckedStore, "_check", lambda _, key, __: read.append(key))
    open_trace(kvsim.sample_trace(model))

    assert read == []


def test_an_unknown_sample_is_refused():
    """The error names the models that have a sample, or the samples that ship."""
    with pytest.raises(TraceNotFoundError, match=r"did you mean 'smollm2'\?; expected one of tiny"):
        kvsim.sample_trace("smollm")
    with pytest.raises(
        TraceNotFoundError,
        match=r"one that ships: sample, sample-smollm2; did you mean 'sample-smollm2'",
    ):
        open_trace("sample-smollm")


def test_a_head_reads_the_needle_again(trace):
    """In layers 7 and 17 some head's last rows attend mostly to the needle, as the README says."""
    ((start, end),) = trace.header.spans["needle"]
    rows = slice(trace.n_pos - 6, trace.n_pos - 1)

    for layer, expected in enumerate((0.8, 0.5, 0.0)):
        weights = trace.attention(layer, rows)[..., start:end].sum(-1)
        assert weights.mean(-1).max() > expected
