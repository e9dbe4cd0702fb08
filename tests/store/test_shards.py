"""Sharded traces: a file for each layer of an array, of which parts are read."""

import json
import os
import re
import shutil
import tracemalloc
import zipfile
from contextlib import ExitStack
from http import HTTPStatus
from itertools import product
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import zarr

from damage import assign, edit, edit_header
from kvsim.errors import TraceError
from kvsim.schema import NEWEST_VERSION
from kvsim.store import describe, layout, open_trace, packing, verify
from kvsim.store.layout import StoredArray, can_be_sharded, to_shard
from kvsim.store.packing import pack, unpack
from kvsim.store.place import Folder
from kvsim.store.shards import crc32c
from kvsim.store.writer import TraceWriter
from saved_traces import files
from traces import random_trace
from web import Quiet, served

N = 600


def make(n=N, **options):
    """A trace of two layers and three blocks in memory."""
    options = {
        "prompt_len": 10,
        "tokens": np.arange(n) % 7,
        "gate": torch.ones(2, 4, n, 8),
    } | options
    return random_trace(n=n, computed=True, **options)


@pytest.fixture
def sharding(monkeypatch):
    """Traces of any size are written as large ones are."""
    monkeypatch.setattr(layout, "MOST_FILES", 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A sharded trace, to be copied before it is changed."""
    folder = tmp_path_factory.mktemp("sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MOST_FILES", 0)
        return make().save(folder / "a.zarr")


@pytest.fixture
def stored(saved, tmp_path):
    """A sharded trace that a test may damage."""
    return shutil.copytree(saved, tmp_path / "a.zarr")


def counting():
    """A server of parts that counts from zero."""
    return type("Counting", (Ranges,), {"sent": {}})


def same(trace, expected):
    """Whether two traces have the same arrays."""
    return trace.digest == expected.digest and all(
        torch.equal(trace.read(name), expected.read(name))
        for name in ("q", "k", "v", "attn_out", "lse", "gate")
    )


def test_a_long_trace_has_few_files():
    """32 layers of 32,768 positions are 224 files; a trace of 1,000 chunks is not sharded."""
    sizes = {"layer": 32, "qhead": 32, "head": 8, "pos": 32768, "dim": 128}
    names = ("q", "k", "v", "attn_out", "lse", "gate", "residual_norm")
    shapes = {name: tuple(sizes[axis] for axis in layout.AXES[name]) for name in names}
    arrays = [StoredArray(x, shapes[x], np.dtype("<f4"), None, sharded=True) for x in shapes]

    assert to_shard(shapes)
    assert sum(array.nchunks for array in arrays) == 7 * 32 * 128
    assert sum(len([*array.files()]) for array in arrays) == 7 * 32
    assert not to_shard({"q": (1000, 2, 256, 8)})
    assert to_shard({"q": (1000, 2, 256, 8), "layer": (1,)})


def test_a_sharded_trace_is_the_same_trace(saved, tmp_path):
    """Each layer of an array is one file, and numbers, digest and checksums are the same."""
    plain = make().save(tmp_path / "plain.zarr")
    opened, attributes = (
        open_trace(saved),
        [open_trace(x).source.attributes for x in (saved, plain)],
    )

    assert same(opened, make())
    assert attributes[0]["chunks"] == attributes[1]["chunks"]
    assert attributes[0]["checksums"] == attributes[1]["checksums"]
    assert attributes[0]["kvsim_format"] == NEWEST_VERSION
    assert torch.equal(opened.read("k", slice(1, 2), slice(250, 520)), make().k[1:, :, 250:520])
    assert sorted(x for x in files(saved) if "/c/" in x and x[0] in "qkv") == [
        f"{name}/c/{layer}/0/0/0" for name in "kqv" for layer in (0, 1)
    ]
    assert describe(saved)["format"] == NEWEST_VERSION
    assert verify(saved).ok


def test_zarr_reads_and_writes_the_same_shards(saved, tmp_path):
    """zarr opens the trace with its values, and writes the same bytes of the same metadata."""
    trace, group = make(), zarr.open_group(saved, mode="r")
    for name in ("q", "k", "v", "attn_out", "lse", "gate"):
        values = trace.read(name).numpy()
        metadata = json.loads((saved / name / "zarr.json").read_bytes())
        shutil.copytree(saved / name, tmp_path / name, ignore=shutil.ignore_patterns("c"))
        zarr.open_array(tmp_path / name, mode="r+")[:] = values

        assert can_be_sharded(name)
        assert metadata["codecs"][0]["name"] == "sharding_indexed"
        assert (group[name].shards[2], group[name].chunks[2]) == (768, 256)
        assert np.array_equal(group[name][:], values)
        assert np.array_equal(group[name][1, :, 300:], values[1, :, 300:])
        assert files(tmp_path / name) == files(saved / name)


def test_a_window_of_attention_is_sharded_too(sharding, tmp_path):
    """Chunks with rows and positions follow each other as in the array."""
    trace = make()
    shapes = {name: tuple(trace.read(name).shape) for name in ("q", "k", "v", "lse")}
    shapes["attention"] = (2, 4, N, N)
    with TraceWriter(
        tmp_path / "a.zarr", shapes=shapes, source_dtypes=dict.fromkeys(shapes, "float32"),
        layer_ids=[0, 1],
    ) as writer:  # fmt: skip
        for name in ("q", "k", "v", "lse"):
            for layer in range(2):
                for block in trace.read(name)[layer].split(256, 1):
                    writer.append(name, layer, block)
        writer.write_attention("attention", trace.formulas)
        path = writer.publish(trace.header)

    assert verify(path).ok
    expected = trace.attention(1, [3, 500])
    assert torch.allclose(open_trace(path).attention(1, [3, 500]), expected, atol=1e-6)


def test_a_shorter_response_shortens_the_shards(sharding, tmp_path):
    """Fewer positions than a writer was told make the same files as their number makes."""
    trace = make(n=300)
    names = ("q", "k", "v", "attn_out", "lse", "gate")
    shapes = {name: tuple(trace.read(name).shape) for name in names}
    with TraceWriter(
        tmp_path / "a.zarr",
        shapes={name: (*shape[:2], 900, *shape[3:]) for name, shape in shapes.items()},
        source_dtypes=dict.fromkeys(names, "float32"),
        layer_ids=trace.layer_ids,
    ) as writer:
        for name in names:
            for layer in range(2):
                writer.append(name, layer, trace.read(name)[layer][:, :256])
        writer.set_length(300)
        for name in names:
            for layer in range(2):
                writer.append(name, layer, trace.read(name)[layer][:, 256:])
        writer.publish(trace.header, tokens=trace.tokens.numpy())

    assert files(tmp_path / "a.zarr") == files(trace.save(tmp_path / "b.zarr"))


def test_a_sharded_trace_is_packed_and_unpacked(stored, tmp_path, monkeypatch):
    """In pieces, and back to the same files; the zip opens as the trace, in zarr too."""
    monkeypatch.setattr(packing, "PIECE", 1000)
    before, packed = files(stored), pack(stored)
    unpacked = unpack(packed, tmp_path / "b.zarr")

    assert same(open_trace(packed), make())
    assert verify(packed).ok
    assert files(unpacked) == before
    with zarr.storage.ZipStore(packed, mode="r") as store:
        assert np.array_equal(zarr.open_group(store, mode="r")["v"][:], make().v.numpy())


def test_a_damaged_shard_is_not_unpacked(stored, tmp_path):
    """A zip whose shard has another byte is refused, and leaves nothing."""
    packed = pack(stored)
    data = bytearray(packed.read_bytes())
    chunk = (stored / "v/c/1/0/0/0").read_bytes()[:64]
    data[data.index(chunk) + 30] ^= 1
    packed.write_bytes(data)

    with pytest.raises(TraceError, match=r"chunk c/1/0/0/0 of v is damaged"):
        unpack(packed, tmp_path / "b.zarr")

    assert not (tmp_path / "b.zarr").exists()


def test_a_store_gets_and_gives_shards(sharding, monkeypatch):
    """Large files are uploaded in pieces, and parts of them are read."""
    monkeypatch.setattr("kvsim.store.remote.PIECE", 1000)
    url = "memory://sharded/made.zarr"
    try:
        make().save(url)
        assert same(open_trace(url), make())
        assert verify(url).ok
        fsspec.filesystem("memory").rm_file(f"{url}/q/c/1/0/0/0")
        with pytest.raises(TraceError, match="q has 1 of 2 chunks, the first missing is c/1/0/0/0"):
            open_trace(url)
    finally:
        fsspec.filesystem("memory").rm("/sharded", recursive=True)


class Ranges(Quiet):
    """Serves parts of files, and counts their bytes."""

    sent: dict[str, list[int]]

    def send_head(self):
        """The part that a request asks for, or the whole file."""
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers["Range"] or "")
        if span is None:
            file = super().send_head()
            if file is None:
                return None
        else:
            file = Path(self.translate_path(self.path)).open("rb")  # noqa: SIM115  its caller closes
        size = os.fstat(file.fileno()).st_size
        start, end = 0, size
        if span is not None:
            start = int(span[1]) if span[1] else max(0, size - int(span[2]))
            end = min(int(span[2]) + 1, size) if span[1] else size
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
        self.size = end - start
        self.sent.setdefault(self.path, []).append(self.size)
        file.seek(start)
        return file

    def copyfile(self, source, outputfile):
        """As many bytes as were promised."""
        outputfile.write(source.read(self.size))


def test_parts_of_shards_are_read_over_http(saved):
    """A block of a layer takes the index and its own bytes alone; indexes are read once."""
    chunk = StoredArray("k", (2, 2, N, 8), np.dtype("<f4"), None, sharded=True)
    handler = counting()
    with served(saved.parent, handler) as url:
        trace = open_trace(f"{url}/a.zarr")
        assert not any(path.startswith("/a.zarr/k/c") for path in handler.sent)
        part = trace.read("k", slice(1, 2), slice(256, 512))
        sent = {path: [*sizes] for path, sizes in handler.sent.items()}
        assert verify(f"{url}/a.zarr").ok
        assert same(trace, make())

    size = (saved / "k/c/1/0/0/0").stat().st_size
    index, block = sent["/a.zarr/k/c/1/0/0/0"]
    assert torch.equal(part, make().k[1:, :, 256:512])
    assert "/a.zarr/k/c/0/0/0/0" not in sent
    assert index == chunk.index_size == 3 * 16 + 4
    assert 0 < block < size / 2
    assert sum(handler.sent["/a.zarr/k/c/1/0/0/0"]) < 3 * size + 4 * index


def test_a_server_without_parts_is_refused(saved):
    """One line says what the server lacks; whole shards are not downloaded for their parts."""
    with served(saved.parent) as url:
        trace = open_trace(f"{url}/a.zarr")
        with pytest.raises(TraceError, match="expected one that supports range requests") as caught:
            trace.read("k")

    assert "\n" not in str(caught.value)


def test_a_part_of_a_layer_reads_a_part_of_its_file(saved, monkeypatch):
    """A block takes its own bytes and the index, once."""
    read, part = [], Folder.part

    def counted(self, key, start, size):
        data, total = part(self, key, start, size)
        read.append((key, start, len(data)))
        return data, total

    trace = open_trace(saved)
    monkeypatch.setattr(Folder, "part", counted)
    for _ in range(2):
        trace.source.read("q", slice(0, 1), slice(300, 400))

    key, size = "q/c/0/0/0/0", (saved / "q/c/0/0/0/0").stat().st_size
    assert read[0] == (key, -52, 52)
    assert read[1] == read[2]
    assert 0 < read[1][1] < size
    assert read[1][2] < size / 2
    assert len(read) == 3


@pytest.mark.parametrize("name", ["q", "lse", "gate"])
@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_damaged_chunk_of_a_shard_is_named(stored, name, place):
    """`verify` names the chunk with another bit, and reading the others goes on."""
    key = f"{name}/c/1/0" + "/0" * (name != "lse") + "/0"
    file = stored / key
    data = bytearray(file.read_bytes())
    begin = int(place * len(data))
    data[begin] ^= 4
    file.write_bytes(data)
    trace = open_trace(stored)

    (problem,) = verify(stored).problems

    chunk = int(np.searchsorted(index_of(data)[:, 0], begin, side="right")) - 1
    assert re.search(rf"chunk c/1/0/{chunk}(/0)? of {name} is damaged", problem)
    assert torch.equal(trace.read(name, slice(0, 1)), make().read(name, slice(0, 1)))


def index_of(data):
    """Offset and size of each of three chunks of a shard."""
    return np.frombuffer(data[-52:-4], "<u8").reshape(3, 2).copy()


def with_index(data, table):
    """A shard with another index, rightly sealed."""
    body = np.ascontiguousarray(table, "<u8").tobytes()
    return data[:-52] + body + crc32c(body)


def moved(row, column, value):
    """A change of one number of an index."""

    def change(data):
        table = index_of(data)
        table[row, column] = value
        return with_index(data, table)

    return change


def swapped(data):
    """Two chunks that took each other's place, with the right index."""
    table = index_of(data)
    first, second, third = (data[a : a + n] for a, n in table.tolist())
    ends = np.cumsum([0, len(second), len(first), len(third)])
    table = np.stack([ends[:3], np.diff(ends)], 1)
    return with_index(second + first + third + data[-52:], table)


HOSTILE = {
    "beyond the file": (moved(2, 1, 1 << 12), "is of .* bytes, expected the .* of the file"),
    "offset beyond": (moved(1, 0, 1 << 40), "overlaps or gaps"),
    "offset of all ones": (moved(1, 0, (1 << 64) - 1), "overlaps or gaps"),
    "no such chunk": (
        lambda data: with_index(data, index_of(data) | ((1 << 64) - 1)),
        "chunk of 1844",
    ),
    "a terabyte": (moved(0, 1, 1 << 40), "has a chunk of 1099511627776 bytes, expected at most"),
    "sums that overflow": (moved(2, 1, (1 << 64) - 4000), "has a chunk of 184"),
    "one chunk for all": (
        lambda data: with_index(data, index_of(data)[[0, 0, 0]]),
        "overlaps or gaps",
    ),
    "a gap": (lambda data: b"gap!" + data, "is of .* bytes, expected the"),
    "empty chunks": (
        lambda data: with_index(data, index_of(data) * 0),
        "is of 52 bytes, expected the",
    ),
    "a checksum": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "the index of .* is damaged"),
    "a wrong count": (lambda data: data[:-52] + data[-36:], "the index of .* is damaged"),
    "no more than an index": (lambda data: data[-52:], "is of .* bytes, expected the 52 of"),
    "half an index": (lambda data: data[-20:], "the index of .* is damaged"),
    "nothing": (lambda _: b"", "the index of .* is damaged"),
    "swapped chunks": (swapped, "chunk c/1/0/[01]/0 of q is not the recorded one"),
}


#: Those that readers of other places meet in another way: by the size, the end, or the chunks.
ELSEWHERE = ("a terabyte", "half an index", "nothing", "swapped chunks")


@pytest.mark.parametrize(
    ("where", "kind"),
    [("folder", kind) for kind in HOSTILE] + [*product(("zip", "web", "store"), ELSEWHERE)],
)
def test_an_index_that_is_false_is_one_line(stored, kind, where):
    """What an index claims is compared with the file before anything of that size is allocated."""
    change, message = HOSTILE[kind]
    file = stored / "q/c/1/0/0/0"
    file.write_bytes(change(file.read_bytes()))
    with ExitStack() as stack:
        path = stored
        if where == "zip":
            path = stored.with_suffix(".zip")
            with zipfile.ZipFile(path, "w") as archive:
                for key, data in files(stored).items():
                    archive.writestr(key, data)
            message = "is empty" if kind == "nothing" else message
        elif where == "web":
            message = "does not send parts" if kind == "nothing" else message
            path = f"{stack.enter_context(served(stored.parent, counting()))}/a.zarr"
        elif where == "store":
            system, path = fsspec.filesystem("memory"), "memory://hostile/a.zarr"
            system.put(str(stored), "/hostile/a.zarr", recursive=True)
            stack.callback(system.rm, "/hostile", recursive=True)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)

        with pytest.raises(TraceError, match=message) as caught:
            open_trace(path).read("q")

        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    assert "\n" not in str(caught.value)


def test_sharding_belongs_to_version_5(stored):
    """Shards in a trace of another version are refused, and so are shards of another shape."""
    other = shutil.copytree(stored, stored.with_name("b.zarr"))
    edit_header(stored, lambda attributes: attributes.update(kvsim_format=3))
    way = ("chunk_grid", "configuration", "chunk_shape", 2)
    edit(other / "q/zarr.json", lambda document: assign(document, way, 512))

    with pytest.raises(TraceError, match=r"q has chunk_grid\.\S+\.2 768, expected 256"):
        open_trace(stored)
    with pytest.raises(TraceError, match=r"q has chunk_grid\.\S+\.2 512, expected 768"):
        open_trace(other)
