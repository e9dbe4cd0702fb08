"""GGUF files, their cache and dumps, damaged at random."""

import fuzz_files as fuzz
import pytest

from kvsim.recorder import gguf as files


@pytest.mark.deep
def test_the_fuzzer_finds_nothing(tmp_path, monkeypatch):
    """A hundred random damages are refused, read or mended, and nothing is left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    originals = fuzz.Originals(tmp_path)

    outcomes = {fuzz.run_case(originals, seed, tmp_path) for seed in range(100)}

    kinds = {"gguf refused", "gguf read", "dump refused", "dump read", "cache as it was"}
    assert outcomes == kinds
    assert not list(tmp_path.glob("case-*"))


@pytest.mark.deep
def test_the_fuzzer_notices_a_cache_that_is_trusted(tmp_path, monkeypatch):
    """Where checksums alone are compared, the fuzzer finds another model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    originals = fuzz.Originals(tmp_path)
    monkeypatch.setattr(files, "_has_rows", lambda *_: True)

    def run():
        for seed in range(100):
            fuzz.run_case(originals, seed, tmp_path)

    with pytest.raises(AssertionError, match="another model, under the checksum of the file"):
        run()
