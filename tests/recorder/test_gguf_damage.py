"""GGUF files, their cache and dumps, damaged at random."""

import importlib.util
import sys
from pathlib import Path

import pytest

from kvsim.recorder import gguf as files


@pytest.fixture(scope="module")
def fuzz():
    """The fuzzer as a module."""
    path = Path(__file__).parents[1] / "benchmarks" / "fuzz_files.py"
    spec = importlib.util.spec_from_file_location("fuzz_files", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.deep
def test_the_fuzzer_finds_nothing(fuzz, tmp_path, monkeypatch):
    """A hundred random damages are refused, read or mended, and nothing is left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    originals = fuzz.Originals(tmp_path)

    outcomes = {fuzz.run_case(originals, seed, tmp_path) for seed in range(100)}

    kinds = {"gguf refused", "gguf read", "dump refused", "dump read", "cache as it was"}
    assert outcomes == kinds
    assert not list(tmp_path.glob("case-*"))


@pytest.mark.deep
def test_the_fuzzer_notices_a_cache_that_is_trusted(fuzz, tmp_path, monkeypatch):
    """Where checksums alone are compared, the fuzzer finds another model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    originals = fuzz.Originals(tmp_path)
    monkeypatch.setattr(files, "_has_rows", lambda *_: True)

    def run():
        for seed in range(100):
            fuzz.run_case(originals, seed, tmp_path)

    with pytest.raises(AssertionError, match="another model, under the checksum of the file"):
        run()
