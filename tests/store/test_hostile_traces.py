"""Untrusted traces: false claims are refused at once, and nothing of that size is allocated."""

import os
import shutil
import subprocess
from types import SimpleNamespace

import fuzz_reader as fuzz
import google_crc32c
import numcodecs
import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec

from damage import assign, edit
from kvsim.errors import TraceError
from kvsim.store import open_trace, verify
from kvsim.store.layout import array_document
from mutations import renew_digest, reseal_folder
from traces import random_trace

N = 300


def make(seed=0, **options):
    """A trace in memory of two layers and two blocks, with everything that `save` stores."""
    tokens = np.arange(N) % 5
    embedding, stream, weights = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for shape in ((5, 6), (N, 6), (2, 4, 8, 6))
    )
    settings = {
        "prompt_len": 10,
        "tokens": tokens,
        "token_text": [f"t{i}" for i in range(N)],
        "o_proj": weights,
        "residual": torch.stack([embedding[tokens], stream]),
        **options,
    }
    return random_trace(n=N, heads=4, group=1, seed=seed, computed=True, **settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two stored traces of one shape, to be copied before they are changed."""
    folder = tmp_path_factory.mktemp("saved")
    make().save(folder / "a.zarr")
    make(seed=1).save(folder / "b.zarr")
    return folder


@pytest.fixture
def stored(saved, tmp_path):
    """A stored trace that a test may damage."""
    return shutil.copytree(saved / "a.zarr", tmp_path / "a.zarr")


def seal(body):
    """A chunk with the checksum that it should have."""
    return body + google_crc32c.value(body).to_bytes(4, "little")


GRID = ("chunk_grid", "configuration", "chunk_shape")
CODECS = array_document("q", (2, 4, N, 8), "float32", None)["codecs"]
BLOSC = ("codecs", 1, "configuration")


@pytest.mark.parametrize(
    ("array", "changes", "message"),
    [
        (
            "q",
            {("shape", 2): 1 << 30},
            r"k has shape \(2, 4, 300, 8\), expected \(2, 4, 1073741824",
        ),
        ("q", {("shape", 2): 1 << 60}, "q has shape"),
        ("q", {("shape",): None}, "q has shape None"),
        ("q", {("zarr_format",): 2}, "q has zarr_format 2, expected 3"),
        ("tokens", {("shape", 0): 200, (*GRID, 0): 200}, r"has shape \(200,\), expected \(300,\)"),
        ("q", {("shape", 0): 1 << 30}, "q has chunks: 2147483648, expected at most"),
        ("q", {("shape", 1): 1 << 30, (*GRID, 1): 1 << 30}, "q has bytes in a chunk"),
        ("q", {("shape", 3): 1 << 30, (*GRID, 3): 1 << 30}, "q has bytes in a chunk"),
        ("o_proj", {("shape", 3): 1 << 24, (*GRID, 3): 1 << 24}, "o_proj has bytes in a chunk"),
        ("layer", {("shape", 0): 1 << 28, (*GRID, 0): 1 << 28}, r"layer has shape \(268435456,\)"),
        ("tokens", {("shape", 0): 1 << 28, (*GRID, 0): 1 << 28}, "tokens has shape"),
        ("token_text", {("shape", 0): 1 << 30, (*GRID, 0): 1 << 30}, "token_text has shape"),
        ("q", {("shape",): [2, 4, N]}, "q has shape"),
        ("q", {("shape", 0): True}, "q has shape"),
        ("q", {("shape", 0): 0}, "q has shape"),
        ("q", {("shape", 0): 1.5}, "q has shape"),
        ("q", {(*GRID, 2): 1}, "q has chunk_grid"),
        ("q", {("chunk_grid", "name"): "rectilinear"}, "q has chunk_grid"),
        ("q", {("chunk_key_encoding", "name"): "v2"}, "q has chunk_key_encoding"),
        ("q", {("chunk_key_encoding", "configuration", "separator"): "."}, "chunk_key_encoding"),
        ("q", {("fill_value",): 0}, "q has fill_value 0, expected 'NaN'"),
        ("tokens", {("fill_value",): 0}, "tokens has fill_value 0, expected -1"),
        ("q", {("fill_value",): {"a": 1}}, "q has fill_value"),
        ("q", {("storage_transformers",): [{"name": "x"}]}, "q has storage_transformers"),
        ("q", {("later",): {"name": "x"}}, "q has later {'name': 'x'}, expected None"),
        ("q", {("later",): {"must_understand": False}}, "q has later"),
        ("q", {("",): None}, "q has  None"),
        ("q", {("a\nb",): 1}, r"q has a\\nb 1"),
        ("q", {("dimension_names",): None}, "q has dimension_names None"),
        ("q", {("dimension_names", 3): "pos"}, "q has dimension_names.3 'pos', expected 'dim'"),
        ("q", {("attributes",): []}, "q has attributes"),
        ("q", {("attributes", "source_dtype"): "int4"}, "q has source_dtype 'int4'"),
        ("q", {("attributes", "source_dtype"): ["float32"]}, "q has source_dtype"),
        ("q", {("data_type",): "int32"}, "q has data type 'int32'"),
        ("q", {("data_type",): {"name": "struct", "configuration": {}}}, "q has data type"),
        ("tokens", {("data_type",): "float32"}, "tokens has data type 'float32'"),
        ("token_text", {("data_type",): "float32"}, "token_text has data type 'float32'"),
        ("q", {("codecs",): []}, "q has codecs"),
        ("q", {("codecs",): [*CODECS, {"name": "numcodecs.pickle"}]}, "'numcodecs.pickle'"),
        ("q", {("data_type",): "object"}, "q has data type 'object'"),
        ("q", {("dimension_names", 1): "head"}, "dimension_names.1 'head', expected 'qhead'"),
        ("q", {("codecs",): CODECS[:2]}, r"q has codecs \[.*\], expected"),
        ("q", {("codecs", 0, "name"): "vlen-utf8"}, "q has codecs.0.name"),
        ("q", {("codecs", 0, "name"): "sharding_indexed"}, "q has codecs.0.name 'sharding_in"),
        ("q", {("codecs", 0, "configuration", "endian"): "big"}, "endian 'big', expected 'little'"),
        *(
            ("q", {(*BLOSC, "cname"): name}, f"cname '{name}', expected 'lz4'")
            for name in ("zlib", "zstd")
        ),
        ("q", {(*BLOSC, "shuffle"): "noshuffle"}, "q has codecs.1.configuration.shuffle"),
        ("q", {(*BLOSC, "later"): 7}, r"q has codecs\.1\.configuration\.later 7, expected None"),
        ("q", {("codecs", 1, "configuration"): 7}, "q has codecs.1.configuration 7"),
    ],
)
def test_metadata_of_an_array_that_is_refused(stored, array, changes, message):
    """Each thing that the format does not allow is refused by name, in one line."""
    for way, value in changes.items():
        edit(stored / array / "zarr.json", lambda found: assign(found, way, value))  # noqa: B023  now

    with pytest.raises(TraceError, match=message) as caught:
        open_trace(stored)

    assert "\n" not in str(caught.value)


def test_unknown_attributes_of_an_array_are_ignored(stored):
    """Attributes of an array that kvsim does not know have no effect."""
    edit(stored / "q/zarr.json", lambda found: found["attributes"].update(later={"a": 1}))

    assert verify(stored).ok


LONG = {"inv_freq": [0.5] * 1_000_000, "attention_scaling": 1.0}
LONG |= {"rotary_dim": 2_000_000, "layout": "half"}


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (("kvsim_format",), True, "has no kvsim_format"),
        (("kvsim_format",), "1", "has no kvsim_format"),
        (("complete",), "yes", "is incomplete"),
        (("digest",), "sha256:", "has no digest"),
        (("digest",), None, "has no digest"),
        (("prompt_len",), 1 << 60, "prompt_len is"),
        (("prompt_len",), 10.0, "attribute prompt_len is 10.0"),
        (("prompt_len",), "ten", "attribute prompt_len is 'ten'"),
        (("n_tokens",), "300", "n_tokens is '300'"),
        (("attention", 0, "scale"), float("nan"), "scale is nan, expected a finite number"),
        (("attention", 0, "scale"), float("inf"), "scale is inf"),
        (("attention", 0, "scale"), [1], r"\[1\] is not a finite number"),
        (("attention", 0, "scale"), "x" * 1_000_000, "xxx' is not a finite number"),
        (("ropes", 0, "inv_freq"), "abcd", "attribute rope"),
        (("ropes", 0, "inv_freq"), [float("nan"), 0.1], "inv_freq.* expected a finite number"),
        (("ropes", 0, "attention_scaling"), 1e999, "attention_scaling.* expected a finite number"),
        (("ropes", 0), LONG, "rope rotates 2000000 dimensions, but a head has 8"),
        (("ropes",), {"inv_freq": "abcd"}, "attribute ropes is"),
        # what a reader does not know could change the meaning of the rest
        (("bias",), 1.5, "attribute 'bias' is not part of"),
        (("attention", 0, "bias"), 1.5, "'bias' is not a key of"),
        (("ropes", 0, "bias"), 1.5, "'bias' is not a key of"),
        (("..", "storage_transformers"), [], "has 'storage_transformers', expected only"),
    ],
    ids=lambda value: "long" if len(str(value)) > 99 else None,
)
def test_attributes_that_are_refused(stored, way, value, message):
    """Unknown keys, other kinds, and numbers that are none are refused in one short line."""
    place = way[1:] if way[0] == ".." else ("attributes", *way)
    edit(stored / "zarr.json", lambda root: assign(root, place, value))

    with pytest.raises(TraceError, match=message) as caught:
        open_trace(stored)

    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "is not readable"),
        ('{"a": ' + "[" * 80 + "]" * 80 + "}", "nested more than 64 deep"),
        ('{"a": ' + "1" * 5000 + "}", "is not readable"),
        ('{"a": 1' + "0" * 400 + "}", "integers of at most 64 bits"),
        ('{"a": 18446744073709551616}', "integers of at most 64 bits"),
        ('{"a": [-9223372036854775809]}', "integers of at most 64 bits"),
        ('{"a": [' + "[]," * (1 << 21) + "[]]}", "more than 4194304 values"),
        ("[]", "is not a JSON object"),
        ("", "is not readable"),
    ],
)
@pytest.mark.parametrize("key", ["zarr.json", "q/zarr.json"])
def test_documents_that_are_no_metadata(stored, key, text, message):
    """Nesting that recursion would not survive, and numbers without an end, are refused."""
    (stored / key).write_text(text)

    with pytest.raises(TraceError, match=f"{message}|expected at most 1048576"):
        open_trace(stored)


@pytest.mark.parametrize("key", ["zarr.json", "q/zarr.json", "q/c/0/0/0/0"])
def test_a_file_of_a_terabyte_is_not_read(stored, key):
    """A file that is far too large is refused by its size."""
    with (stored / key).open("r+b") as file:
        file.truncate(1 << 40)

    with pytest.raises(TraceError, match="has 1099511627776 bytes, expected at most"):
        open_trace(stored)


@pytest.mark.parametrize("key", ["zarr.json", "q/zarr.json", "q/c/0/0/0/0", "q", "q/c", "q/stray"])
@pytest.mark.parametrize("kind", ["link", "dangling", "loop", "fifo", "folder"])
def test_what_is_no_plain_file_is_refused(stored, saved, key, kind):
    """Links and pipes anywhere in a trace are refused; no pipe is waited for."""
    path = stored / key
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(saved / "a.zarr" / key)
    elif kind == "dangling":
        path.symlink_to(stored / "nowhere")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    if kind == "folder" and key == "q/stray":
        return

    with pytest.raises(
        TraceError, match=r"is not a regular file|is missing|first missing|no array q"
    ):
        open_trace(stored)


def test_a_link_to_a_trace_is_a_trace(saved, tmp_path):
    """The folder itself may be reached by a link."""
    (tmp_path / "link.zarr").symlink_to(saved / "a.zarr")

    assert verify(tmp_path / "link.zarr").ok


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "", "/dev/null", "nowhere/else.zarr"])
def test_paths_that_are_none(name, tmp_path):
    """A path that cannot be one is no trace, in one line."""
    with pytest.raises(TraceError) as caught:
        open_trace(tmp_path / name if name else tmp_path)

    assert "\n" not in str(caught.value)


def blosc(size):
    """A blosc frame of 32 bytes that claims `size` decoded ones."""
    return b"\x02\x01\x21\x04" + size.to_bytes(4, "little") + b"\0\0\0\0 \0\0\0" + bytes(16)


BOMBS = {
    "blosc claim": blosc((1 << 31) - 20),
    "blosc bomb": numcodecs.Blosc("zstd", clevel=9).encode(bytes(1 << 28)),
    "blosc nothing": b"",
    "blosc cut": blosc(32768)[:20],
}


@pytest.mark.parametrize("array", ["q", "token_text"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_chunk_that_claims_more_is_refused(stored, array, bomb):
    """Room for more than the chunk that the format says is there is never made."""
    chunk = stored / array / "c" / ("0/0/0/0" if array == "q" else "0")
    chunk.write_bytes(seal(bytes(BOMBS[bomb])))
    reseal_folder(stored)

    with pytest.raises(TraceError, match=f"of {array} is damaged"):
        open_trace(stored).read("q", slice(0, 1))


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xff\xff\xff",
        N.to_bytes(4, "little") + b"\xff\xff\xff\xff",
        N.to_bytes(4, "little") + b"\x01\0\0\0\xff" * N,
        (N - 1).to_bytes(4, "little") + b"\0\0\0\0" * (N - 1),
    ],
)
def test_text_that_claims_more_is_refused(stored, body):
    """Neither the number of texts nor the length of one makes room for itself."""
    encoded = numcodecs.Blosc("lz4").encode(body)
    (stored / "token_text" / "c" / "0").write_bytes(seal(bytes(encoded)))
    reseal_folder(stored)

    with pytest.raises(TraceError, match="of token_text is damaged"):
        open_trace(stored)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_chunks_of_zarr_are_read_as_zarr_reads_them(stored, dtype):
    """Chunks that zarr itself wrote are decoded to what zarr reads, whole and in parts."""
    group = zarr.open_group(stored, mode="r+", use_consolidated=False)
    values = group["q"][:].astype(dtype)
    shutil.rmtree(stored / "q")
    array = group.create_array(
        "q",
        shape=values.shape,
        dtype=dtype,
        chunks=(1, 4, 256, 8),
        serializer=BytesCodec(endian="little"),
        compressors=[
            BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=values.itemsize),
            Crc32cCodec(),
        ],
        fill_value=float("nan"),
        dimension_names=("layer", "qhead", "pos", "dim"),
        config={"write_empty_chunks": True},
    )
    array[:] = values
    reseal_folder(stored)
    renew_digest(stored)  # whatever the dtype: the values are what counts here
    reseal_folder(stored)

    trace = open_trace(stored)

    assert np.array_equal(trace.source.read("q", slice(None), slice(None)).numpy(), array[:])
    part = trace.source.read("q", slice(1, 2), slice(250, 259)).numpy()
    assert np.array_equal(part, array[1:2, :, 250:259])


def test_tokens_and_layers_that_are_no_numbers_of_such_are_refused(stored, tmp_path):
    """Tokens below 0, and layers that do not increase, are refused."""
    other = shutil.copytree(stored, tmp_path / "other.zarr")
    zarr.open_group(stored, mode="r+", use_consolidated=False)["tokens"][7] = -3
    zarr.open_group(other, mode="r+", use_consolidated=False)["layer"][:] = [4, 4]
    for path in (stored, other):
        reseal_folder(path)

    with pytest.raises(TraceError, match="tokens has -3, expected 0 or more"):
        _ = open_trace(stored).tokens
    assert "tokens has -3" in verify(stored).problems[0]
    with pytest.raises(TraceError, match=r"layer is \[4, 4\], expected"):
        open_trace(other)


@pytest.mark.deep
def test_refusing_takes_neither_time_nor_memory(stored, tmp_path, warm_python):
    """The most expensive claims are refused in two seconds each, within 100 MB of memory."""
    cases = []

    def case(change):
        path = shutil.copytree(stored, tmp_path / f"case-{len(cases)}.zarr")
        change(path)
        cases.append(str(path))

    def declare(name, axis, n, *, chunk=True):
        def change(path):
            for way in (("shape", axis), *([(*GRID, axis)] if chunk else [])):
                edit(path / name / "zarr.json", lambda found, way=way: assign(found, way, n))

        return change

    def replace(key, data):
        return lambda path: (path / key).write_bytes(data)

    def grow(path):
        for name in ("q", "k", "v", "attn_out", "lse", "residual"):
            declare(name, 1 if name == "residual" else 2, 1 << 30, chunk=False)(path)

    for name in ("layer", "tokens", "token_text"):
        case(declare(name, 0, (1 << 31) - 1))
    for axis in range(4):
        case(declare("q", axis, (1 << 31) - 1, chunk=axis in (1, 3)))
    case(grow)
    case(replace("zarr.json", b'{"a":' * 10_000_000))
    case(replace("zarr.json", b"[" * 60_000_000))
    case(replace("zarr.json", b'{"a": [' + b"[]," * 20_000_000 + b"[]]}"))
    case(replace("token_text/c/0", seal(bytes(BOMBS["blosc bomb"]))))
    case(replace("token_text/c/0", seal(bytes(BOMBS["blosc claim"]))))
    program = """
import resource, sys, time
from pathlib import Path
from kvsim import open_trace
from kvsim.errors import TraceError
open_trace(sys.argv[1])
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[2:]:
    start = time.perf_counter()
    try:
        open_trace(path)
    except TraceError as error:
        pass
    else:
        print(path, "opens")
    if time.perf_counter() - start > 2:
        print(path, "took", time.perf_counter() - start)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
if grown > 100_000:
    print("memory grew by", grown, "kB")
"""
    done = subprocess.run(
        [warm_python, "-c", program, str(stored), *cases],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a/q/c/0/0/0/0", "a/q/c/1/0/0/0"),
        ("a/q/c/0/0/0/0", "a/attn_out/c/0/0/0/0"),
        ("a/k/c/1/0/1/0", "a/v/c/1/0/1/0"),
        ("a/lse/c/0/0/1", "a/lse/c/1/0/1"),
        ("a/o_proj/c/0/0/0/0", "a/o_proj/c/1/0/0/0"),
        ("a/residual/c/0/0/0", "a/residual/c/1/0/0"),
        *((f"a/{name}/c/0/0/1/0", f"b/{name}/c/0/0/1/0") for name in ("q", "k", "v", "attn_out")),
        ("a/lse/c/1/0/0", "b/lse/c/1/0/0"),
        ("a/o_proj/c/1/0/0/0", "b/o_proj/c/1/0/0/0"),
        ("a/residual/c/1/1/0", "b/residual/c/1/1/0"),
    ],
)
def test_chunks_that_took_each_others_place_are_refused(saved, tmp_path, one, other):
    """A chunk in another place is refused when it is read; `verify` finds it if all is sealed."""
    for name in ("a", "b"):
        shutil.copytree(saved / f"{name}.zarr", tmp_path / name)
    first, second = tmp_path / one, tmp_path / other
    data = first.read_bytes(), second.read_bytes()
    assert data[0] != data[1]
    first.write_bytes(data[1])
    second.write_bytes(data[0])

    for name in {one.split("/")[0], other.split("/")[0]}:
        changed = [at.split("/")[1] for at in (one, other) if at.startswith(f"{name}/")]
        trace = open_trace(tmp_path / name)
        for array in changed:
            with pytest.raises(TraceError, match=f"of {array} is not the recorded one") as caught:
                trace.source.read(array, slice(None), slice(None))
            assert "\n" not in str(caught.value)
        reseal_folder(tmp_path / name)
        problems = verify(tmp_path / name).problems
        for array in changed:
            assert any(f"the checksum of {array} in layer" in problem for problem in problems)


@pytest.mark.parametrize("key", ["tokens/c/0", "tokens/zarr.json", "layer/c/0", "zarr.json"])
def test_verify_finds_files_of_another_trace(saved, stored, tmp_path, key):
    """Tokens, layers and the attributes of another trace of the same shape are found."""
    other = make(seed=1, layer_ids=[3, 4], tokens=np.arange(N) % 5 + 1).save(tmp_path / "c.zarr")
    if key == "tokens/zarr.json":
        shutil.rmtree(stored / "tokens")
    else:
        shutil.copy(other / key, stored / key)

    try:
        problems = verify(stored).problems
    except TraceError as error:
        problems = (str(error),)
    assert problems


@pytest.mark.parametrize("name", ["attn_out", "lse", "o_proj", "residual", "tokens", "token_text"])
def test_an_array_that_is_gone_is_refused(stored, name):
    """An array that has checksums has to be there."""
    shutil.rmtree(stored / name)

    with pytest.raises(TraceError, match=f"{name} has checksums and is not there"):
        open_trace(stored)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The traces that the fuzzer damages."""
    folder = tmp_path_factory.mktemp("originals")
    return [fuzz.Original(path) for path in fuzz.make_traces(folder).values()]


@pytest.mark.deep
def test_the_fuzzer_finds_nothing(originals, tmp_path):
    """A hundred random damages of five traces have clean outcomes, of all three kinds."""
    outcomes = {fuzz.run_case(originals, seed, tmp_path) for seed in range(100)}

    assert outcomes == {"refused", "reported", "harmless"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.deep
def test_the_fuzzer_notices_a_reader_that_trusts(originals, tmp_path, monkeypatch):
    """Where nobody compares checksums of layers, the fuzzer finds another trace called whole."""
    from kvsim.store import verification

    monkeypatch.setattr(verification._Check, "result", lambda _: SimpleNamespace(ok=True))

    def run():
        for seed in range(60):
            fuzz.run_case(originals, seed, tmp_path)

    with pytest.raises(AssertionError, match="another trace, which verify calls whole"):
        run()
