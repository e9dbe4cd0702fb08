"""The binding of a trace: digest and seal at opening, listed checksums of chunks at reading."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import mutations
from damage import edit, edit_header
from kvsim.core.attention import Formula, Rope
from kvsim.core.trace import Trace
from kvsim.errors import TraceError
from kvsim.store import open_trace, reader
from kvsim.store.packing import pack
from mutations import renew_digest, reseal_folder
from traces import random_trace

N = 300


def make(seed=0, *, mixed=False):
    """A trace in memory of two layers and two blocks, with tokens and text."""
    formulas = [
        Formula(0.5, window=9, sinks=(0.5, 0.0, -1.0, 2.0)),
        Formula(0.25, softcap=3.0, window=20),
    ]
    ropes = [Rope.default(8), Rope((0.5,), 1.1, layout="interleaved")]
    facts = {
        "prompt_len": 200,
        "context_len": 150 if mixed else None,
        "rope": ropes if mixed else ropes[0],
        "formulas": formulas if mixed else None,
        "tokens": np.arange(N) % 5,
        "token_text": [f"t{i}" for i in range(N)],
    }
    return random_trace(n=N, seed=seed, computed=True, **facts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Stored traces of one shape, to be copied before they are changed."""
    folder = tmp_path_factory.mktemp("saved")
    make().save(folder / "plain.zarr")
    make(mixed=True).save(folder / "mixed.zarr")
    make(seed=1).save(folder / "other.zarr")
    return folder


@pytest.fixture
def stored(saved, tmp_path):
    """A stored trace that a test may damage."""
    return shutil.copytree(saved / "plain.zarr", tmp_path / "a.zarr")


def refused(path):
    """Return the message with which a trace is refused; an assertion fails if it opens."""
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


HEADER = {
    "prompt_len": lambda a: a.update(prompt_len=180),
    "context_len": lambda a: a.update(context_len=100),
    "no context_len": lambda a: a.pop("context_len"),
    "scale": lambda a: a["attention"][0].update(scale=0.51),
    "window": lambda a: a["attention"][0].update(window=8),
    "window of no layer": lambda a: a["attention"][1].pop("window"),
    "softcap": lambda a: a["attention"][1].update(softcap=3.5),
    "sinks": lambda a: a["attention"][0]["sinks"].reverse(),
    "which rope": lambda a: a["attention"][0].update(rope=1),
    "order of layers": lambda a: a["attention"].reverse(),
    "order of ropes": lambda a: a["ropes"].reverse(),
    "frequency": lambda a: a["ropes"][0]["inv_freq"].__setitem__(1, 0.11),
    "scaling": lambda a: a["ropes"][1].update(attention_scaling=1.0),
    "layout": lambda a: a["ropes"][1].update(layout="half"),
    "checksums of two layers": lambda a: a["checksums"]["q"].reverse(),
    "checksums of two arrays": lambda a: a["checksums"].update(
        k=a["checksums"]["v"], v=a["checksums"]["k"]
    ),
    "digest": lambda a: a.update(digest="sha256:" + "0" * 64),
}


@pytest.mark.parametrize("name", HEADER)
def test_an_edited_header_is_refused(saved, tmp_path, name):
    """Whatever the digest covers is refused at opening, with a valid seal and without one."""
    path = shutil.copytree(saved / "mixed.zarr", tmp_path / "a.zarr")
    assert open_trace(path).prompt_len == 200
    edit_header(path, HEADER[name])

    assert "the digest of its header and checksums is" in refused(path)
    reseal_folder(path)
    assert "the digest of its header and checksums is" in refused(path)


OUTSIDE = {
    "name": lambda a: a.update(name="another"),
    "labels": lambda a: a["meta"].update(labels={"task": "sort"}),
    "committed tokens": lambda a: a.update(committed_tokens=256),
    "checksum of the text": lambda a: a["checksums"].update(token_text=["0" * 64]),
    "list of chunks": lambda a: a["chunks"].update(q=a["chunks"]["q"][::-1]),
    "seal": lambda a: a.update(seal="sha256:" + "0" * 64),
    "no seal": lambda a: a.pop("seal"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_the_digest_leaves_out_is_sealed(stored, name):
    """The rest of the header, and the list of checksums, is refused by the seal."""
    edit_header(stored, OUTSIDE[name])

    assert "its seal does not fit" in refused(stored)


def test_the_source_dtype_is_sealed(stored):
    """The dtype that an array had in the model cannot be edited."""
    edit(stored / "k/zarr.json", lambda array: array["attributes"].update(source_dtype="bfloat16"))

    assert "its seal does not fit" in refused(stored)


@pytest.mark.parametrize("value", [None, "", "0" * 8, "g" * 32, 3])
def test_the_list_of_chunks_has_every_chunk(stored, value):
    """A list of other length or of no digits is refused by name."""
    edit_header(stored, lambda a: a["chunks"].update(k=value))

    assert "attribute chunks.k is" in refused(stored)
    assert "expected 8 hex digits for each of 4 chunks" in refused(stored)


@pytest.mark.parametrize("version", [0, 1, 2, 6, -1])
def test_a_trace_of_another_version_is_refused(stored, version):
    """One line says that another version of kvsim recorded it, and what to do; nothing is tried."""
    edit_header(stored, lambda a: a.update(kvsim_format=version))
    with pytest.raises(TraceError) as caught:
        open_trace(stored)

    reason = f"another version of kvsim (trace format {version}, expected 3 to 5); record it again"
    assert str(caught.value) == f"{stored} was recorded by {reason}"


@pytest.mark.parametrize("packed", [False, True])
def test_an_open_trace_is_one_snapshot(saved, tmp_path, packed):
    """A trace that is overwritten while it is open is not read any further."""
    path = make().save(tmp_path / "a.zarr")
    if packed:
        path = pack(path, tmp_path / "a.zip")
    trace = open_trace(path)
    before = trace.read("k", slice(0, 1)).clone()
    digest = trace.digest

    if packed:
        pack(saved / "other.zarr", tmp_path / "b.zip").replace(path)
    else:
        make(seed=1).save(path, overwrite=True)

    assert trace.digest == digest
    with pytest.raises(TraceError, match=r"is not the recorded one|is damaged|not where"):
        trace.read("k", slice(0, 1))
    assert not torch.equal(open_trace(path).read("k", slice(0, 1)), before)


def test_a_forger_of_the_header_gets_another_digest(stored):
    """A header that is changed, with digest and seal renewed, is another trace by its digest."""
    digest = open_trace(stored).digest
    edit_header(stored, lambda a: a.update(prompt_len=100))
    renew_digest(stored)
    reseal_folder(stored)

    assert open_trace(stored).digest != digest


def test_the_seal_does_not_depend_on_keys_that_are_numbers(tmp_path):
    """Provenance whose keys are integers, such as labels of a configuration, is sealed as read."""
    trace = make()
    header = replace(trace.header, meta={"labels": {10: "a", 2: "b", 1: "c"}, "t": (1, 2)})
    path = Trace(trace.source, header).save(tmp_path / "a.zarr")

    assert open_trace(path).meta["labels"] == {"10": "a", "2": "b", "1": "c"}


@pytest.mark.deep
def test_no_mutation_goes_unnoticed(tmp_path):
    """Mutations are refused in one line, have another digest, or change nothing at all."""
    originals = list(mutations.originals_in(tmp_path))

    outcomes = {mutations.run_case(originals, seed, tmp_path) for seed in range(150)}

    assert {"refused", "identical", "another digest", "reported by verify"} <= outcomes


@pytest.mark.deep
def test_what_replays_read_is_what_the_mutator_compares(tmp_path):
    """All that 16 policies and their metrics read is compared, so identical content is enough."""
    (original, _) = mutations.originals_in(tmp_path)
    mutations.check_reads(original.path, original.content)

    del original.content["attn_out"]
    with pytest.raises(AssertionError, match=r"replays read \['attn_out'\]"):
        mutations.check_reads(original.path, original.content)


@pytest.mark.deep
@pytest.mark.parametrize("trusted", ["check_binding", "bound"])
def test_the_mutator_notices_a_reader_that_trusts(trusted, tmp_path, monkeypatch):
    """Without the checks at opening, or without those of chunks, there are findings."""
    originals = list(mutations.originals_in(tmp_path))
    nothing = {"check_binding": lambda *_: None, "bound": lambda arrays, *_: dict(arrays)}
    monkeypatch.setattr(reader, trusted, nothing[trusted])

    def run():
        for seed in range(150):
            mutations.run_case(originals, seed, tmp_path)

    with pytest.raises(AssertionError, match="changed, "):
        run()
