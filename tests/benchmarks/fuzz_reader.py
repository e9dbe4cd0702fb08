"""Damages whole traces at random and looks at what reading them does.

    python tests/benchmarks/fuzz_reader.py --cases 10000 --seed 0

A case is refused with a TraceError, or opens and `verify` reports problems, or opens and everything
in it is as it was. Anything else is a finding, printed with the seed of its case: another
exception, more than five seconds, more than a gigabyte, or a change that `verify` calls whole.
Case i of a run has the seed `--seed` + i, so a run goes on where another one ended.
"""

import contextlib
import io
import json
import random
import shutil
import tempfile
import warnings
import zipfile
from pathlib import Path
from unittest import mock

import google_crc32c
import numcodecs
import numpy as np
import torch

from campaign import campaign, limit_memory, options, watched
from kvsim import Trace, capture, open_trace
from kvsim.cli import _status
from kvsim.errors import TraceError
from kvsim.recorder import load_model
from kvsim.samples import sample_trace
from kvsim.store import describe, layout, verify
from kvsim.store.packing import pack
from mutations import Files, damaged, make, read_files, removed, reseal

#: Errors of resealing files that are damaged beyond reading.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)

#: What stands in a document for text that no JSON writer would write.
RAW = {
    "@deep@": "[" * 70 + "]" * 70,
    "@deeper@": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "@digits@": "1" * 5000,
    "@large@": "1" + "0" * 400,
    "@infinite@": "1e999",
    "@half@": '"\\ud800"',
    "@control@": '"\\u0000\\u001b[2J\\n"',
}
#: Bytes of the index of a shard of two chunks.
_INDEX = 36

HOSTILE = [
    *(None, True, False, 0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**53, 2**60, 2**63, 2**64, 0.5, -0.0),
    *(float("nan"), float("inf"), 1e300, 1e-320, "", "x", "q", "NaN", "../x", "/etc/passwd", "3"),
    *("float64", "int8", "object", "bytes", "x" * 100_000, [], {}, [[]], [0], [1, 1, 1, 1]),
    *([2**60] * 2, [2**31 - 1] * 4, [0.5] * 100_000, [None] * 3, {"name": "x"}, {"a": {"b": [1]}}),
    *({"must_understand": False}, {"must_understand": True}, {"kind": "causal"}, *RAW),
]
EXTRA = ["storage_transformers", "extension", "complete", "kvsim_format", "chunks", "", "__class__"]


def make_traces(folder: Path) -> dict[str, Path]:
    """A plain trace, one of layers that differ, sharded, packed, with every array, the sample."""
    for name, mixed in (("plain", False), ("mixed", True)):
        make(0, mixed=mixed).save(folder / f"{name}.zarr")
    with mock.patch.object(layout, "MOST_FILES", 0):
        make(0, mixed=False).save(folder / "sharded.zarr")
    pack(folder / "plain.zarr", folder / "packed.zip")
    options = {"layers": [0, 2], "attention": "full", "o_proj": True, "residual": True}
    model, _ = load_model("tiny")
    ids = [i % 60 for i in range(280)]
    capture(model, None, ids, max_new_tokens=20, out=folder / "full.zarr", **options)
    shutil.copytree(sample_trace(), folder / "sample.zarr")
    names = ("plain.zarr", "mixed.zarr", "sharded.zarr", "packed.zip", "full.zarr", "sample.zarr")
    return {name: folder / name for name in names}


class Original:
    """What a whole trace has to say, in arrays and facts."""

    def __init__(self, path: Path) -> None:
        self.path, self.packed = path, path.suffix == ".zip"
        if self.packed:
            with zipfile.ZipFile(path) as archive:
                self.files = {name: archive.read(name) for name in archive.namelist()}
            self.bytes = path.read_bytes()
        else:
            self.files = read_files(path)
        assert verify(path).ok
        self.trace = open_trace(path)
        self.digest = self.trace.digest
        self.arrays = {
            name: self.trace.source.read(name, slice(None), slice(None))
            for name in self.trace.source.shapes
        }
        self.facts = _facts(self.trace)

    def same(self, trace: Trace) -> bool:
        """Whether a trace has the same facts and numbers, as far as it has them.

        Text is covered by the checksum of its chunk alone, which some of the damage here renews.
        """
        # dense attention follows from the rest, and nothing says that it should be there; output
        # projections lie next to the trace, and stay behind
        named = set(self.arrays) - set(trace.source.shapes) <= {"attention", "o_proj"}
        return (
            named
            and _facts(trace) == self.facts
            and all(
                torch.allclose(
                    trace.source.read(name, slice(None), slice(None)),
                    self.arrays[name],
                    rtol=0,
                    # dense attention has no checksum: it is held to what q and k give
                    atol=2e-4 if name == "attention" else 0,
                )
                for name in trace.source.shapes
            )
        )


def _facts(trace: Trace) -> tuple[object, ...]:
    return trace.prompt_len, trace.formulas, trace.ropes, trace.layer_ids, trace.digest


def flip_checked(rng: random.Random, case: Original, files: Files) -> None:
    """Change a byte of a chunk, and its checksum with it: what a decoder has to withstand."""
    key = _chunk(rng, files)
    data = bytearray(files[key][:-4])
    for _ in range(rng.choice((1, 1, 2, 8))):
        if data:
            first = rng.random() < 0.5  # the header of a codec
            data[rng.randrange(min(len(data), 32) if first else len(data))] = rng.randrange(256)
    files[key] = _sealed(bytes(data))


def encode(rng: random.Random, case: Original, files: Files) -> None:
    """Put other content, rightly encoded, into a chunk."""
    key = _chunk(rng, files)
    content = rng.choice(
        [
            *(b"", b"\xff" * 4, b"\xff" * 64, bytes(1 << 22), rng.randbytes(100)),
            np.full(rng.choice((1, 40, 2048)), rng.choice((0, 1, -1, np.nan)), "<f4").tobytes(),
        ]
    )
    codec = rng.choice(
        [numcodecs.Blosc("lz4"), numcodecs.Blosc("zstd"), numcodecs.Zstd(), numcodecs.GZip(), None]
    )
    files[key] = _sealed(content if codec is None or not content else bytes(codec.encode(content)))


def reindex(rng: random.Random, case: Original, files: Files) -> None:
    """Change numbers of the index of a shard, and its checksum with them."""
    key = _chunk(rng, files)
    if len(files[key]) > _INDEX:
        table = np.frombuffer(files[key][-_INDEX:-4], "<u8").copy()
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(table))
            hostile = (0, 1, 4, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
            near = int(table[at]) + rng.choice((-1, 1, 4, -16))
            table[at] = rng.choice([*hostile, near % (1 << 64), int(rng.choice(table))])
        files[key] = files[key][:-_INDEX] + _sealed(table.tobytes())


def duplicate(rng: random.Random, case: Original, files: Files) -> None:
    """Put a file to another place too: where one is, or where none belongs."""
    key = rng.choice(sorted(files))
    name = rng.choice(
        [*sorted(files), f"{key}.partial", "later/c/0", "q/c/9/9/9/9", "q/c/00/0/0/0"]
    )
    files[name] = files[key]


def swap(rng: random.Random, case: Original, files: Files) -> None:
    """Let two files take each other's place."""
    kind = rng.random() < 0.7
    keys = [key for key in sorted(files) if ("/c/" in key) == kind]
    if keys:
        a, b = rng.choice(keys), rng.choice(keys)
        files[a], files[b] = files[b], files[a]


def edit(rng: random.Random, case: Original, files: Files) -> None:
    """Replace, remove or add something in a metadata document."""
    key = rng.choice([key for key in sorted(files) if key.endswith("zarr.json")] or [""])
    try:
        document = json.loads(files.get(key, b""))
    except (ValueError, RecursionError):  # it is hostile already
        return
    at = document
    if key == "zarr.json" and isinstance(document, dict) and rng.random() < 0.8:
        at = document.get("attributes", document)  # not the copy of the metadata of all arrays
    while isinstance(at, dict | list) and at:
        place = rng.choice(sorted(at) if isinstance(at, dict) else range(len(at)))
        inner = at[place]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
            at = inner
            continue
        what = rng.random()
        if what < 0.7:
            at[place] = rng.choice(HOSTILE)
        elif what < 0.85:
            del at[place]
        elif isinstance(at, dict):
            at[rng.choice(EXTRA)] = rng.choice(HOSTILE)
        else:
            at.append(rng.choice(HOSTILE))
        break
    text = json.dumps(document)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    if rng.random() < 0.1 and text.startswith("{"):
        text = '{"shape": [1], "attributes": {}, ' + text[1:]  # named twice
    files[key] = text.encode()


DAMAGE = (damaged, damaged, flip_checked, flip_checked, encode, removed, duplicate, swap, reindex)
DAMAGE += (edit, edit, edit)


def _chunk(rng: random.Random, files: Files) -> str:
    return rng.choice([key for key in sorted(files) if "/c/" in key] or ["q/c/0/0/0/0"])


def _sealed(data: bytes) -> bytes:
    return data + google_crc32c.value(data).to_bytes(4, "little")


def zipped(rng: random.Random, files: Files) -> bytes:
    """The files as a zip, mostly one as `pack` writes it, at times another one."""
    out = io.BytesIO()
    odd = rng.choice([None, "name", "twice", "mode", "deflate"])
    with zipfile.ZipFile(out, "w") as archive:
        for key in sorted(files):
            member = zipfile.ZipInfo(key)
            hit = rng.random() < 0.1
            if odd == "mode" and hit:
                member.external_attr = rng.choice([0o120777, 0o040755, 0o010644, 0o060644]) << 16
            if odd == "name" and hit:
                member.filename = rng.choice(
                    ["../a", "/a", "C:/a", "q\\c", "a\nb", f"./{key}", f"{key}/", key.upper(), "x"]
                )
            compressed = zipfile.ZIP_DEFLATED if odd == "deflate" and hit else zipfile.ZIP_STORED
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a name that is there already
                archive.writestr(member, files[key], compress_type=compressed)
                if odd == "twice" and hit:
                    archive.writestr(member, files[key])
    data = bytearray(out.getvalue())
    for _ in range(rng.choice((0, 0, 1, 4))):  # the table of contents is what is trusted
        data[-rng.randrange(1, min(len(data), 4000))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.05 else data)


def outcome(original: Original, path: Path) -> str:
    """What reading the damaged trace at `path` comes to; raises on a finding."""
    said, trace = "", None
    try:
        trace = open_trace(path)
    except TraceError as error:
        said = str(error)
    assert "\n" not in said, "a message of several lines"
    assert len(said) < 2000, "a message without an end"
    if trace is None:
        return "refused"
    json.dumps(describe(path))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert _status(["info", str(path)]) == 0, "no info of a trace that opens"
    report = verify(path)
    try:
        same = original.same(trace)
    except TraceError:
        same = False
    if report.ok:
        assert same, "another trace, which verify calls whole"
        return "harmless"
    return "reported"


def run_case(originals: list[Original], seed: int, folder: Path) -> str:
    """One case; gives its outcome, raises on a finding."""
    rng = random.Random(seed)  # noqa: S311  repeatable on purpose
    original = rng.choice(originals)
    files = dict(original.files)
    path = folder / f"case-{seed}"
    try:
        if original.packed and rng.random() < 0.3:
            data = bytearray(original.bytes)
            for _ in range(rng.choice((1, 2, 8))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        else:
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                if files:
                    rng.choice(DAMAGE)(rng, original, files)
            if rng.random() < 0.5:  # what lies behind the seal has to withstand it too
                with contextlib.suppress(TraceError, *UNREADABLE):
                    reseal(files)
            _write(original, rng, files, path)
        with watched():
            return outcome(original, path)
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)


def _write(original: Original, rng: random.Random, files: Files, path: Path) -> None:
    if original.packed:
        path.write_bytes(zipped(rng, files))
        return
    path.mkdir()
    for key, data in files.items():
        file = path / key
        with contextlib.suppress(OSError):  # a file where another one needs a folder
            file.parent.mkdir(parents=True, exist_ok=True)
            if data is original.files.get(key):
                file.hardlink_to(original.path / key)
            else:
                file.write_bytes(data)


if __name__ == "__main__":
    given = options(__doc__, 1000).parse_args()
    with tempfile.TemporaryDirectory() as name:
        originals = [Original(path) for path in make_traces(Path(name)).values()]
        limit_memory()
        campaign(lambda seed: run_case(originals, seed, Path(name)), given)
