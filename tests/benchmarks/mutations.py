"""Changes stored traces as an edit, a careless script or a forger would, and judges the reader.

    python tests/benchmarks/mutations.py --cases 5000 --seed 0

Fields of the header change one by one; chunks are exchanged within and between arrays, layers and
recordings, or encoded again with other values; files are cut, removed and copied; checksums are
exchanged, or renewed in part or all. A case is noticed if one line refuses the trace when it is
opened or read, or if the trace has another digest. Otherwise all its arrays and facts must be
those of the original. Whatever 16 policies and all their metrics read is among these: that is
recorded at the start, so that the same entries are kept and all metrics are the same. Where the
list of chunks and the seal were renewed too, `verify` must find the change, or only what the digest
leaves out by definition may differ. Anything else is a finding, printed with the seed of its case;
case i of a run has the seed `--seed` + i.
"""

import contextlib
import json
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvsim
from campaign import campaign, options
from kvsim.core.attention import Formula
from kvsim.core.digest import ContentDigest, content_digest
from kvsim.core.trace import Trace
from kvsim.errors import KvsimError
from kvsim.store.binding import sealed
from kvsim.store.chunks import encode_chunk, read_chunk
from kvsim.store.layout import DIMENSIONS, StoredArray, parse_array, pos_axis
from kvsim.store.metadata import read_header
from kvsim.store.place import Folder
from kvsim.store.verification import verify

Files = dict[str, bytes]

#: The policies whose kept sets and metrics must not change unnoticed.
POLICIES = (
    *("random", "oracle", "streaming_llm", "h2o", "tova", "snapkv", "dropkv", "pyramidkv"),
    *("keydiff", "lagkv", "expected_attention", "gkv", "rkv", "morphkv", "cake", "ams"),
)

BUDGET, POSITIONS = 48, 300

#: Facts of the header that are compared; the name and `meta` are labels.
COMPARED = {
    *("prompt_len", "context_len", "formulas", "ropes", "layer_ids", "labels", "source_dtypes"),
    *("spans", "name", "meta", "layer_sensitivity", "owners", "latent", "other_layers"),
    *("sizes", "left_out", "questions"),
    *("readers", "whole"),  # of the owners, of `meta` and the layers
}


def read_files(path: Path) -> Files:
    """Return the files of a trace in a folder by their keys."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def write_files(path: Path, files: Files) -> None:
    """Write the files of a trace to a new folder."""
    for key, data in files.items():
        (path / key).parent.mkdir(parents=True, exist_ok=True)
        (path / key).write_bytes(data)


def arrays_of(files: Files) -> dict[str, StoredArray]:
    """Return the arrays that the metadata documents describe."""
    keys = {name: f"{name}/zarr.json" for name in DIMENSIONS}
    version = json.loads(files["zarr.json"])["attributes"].get("kvsim_format")
    return {
        name: parse_array(name, json.loads(files[key]), "files", version)
        for name, key in keys.items()
        if key in files
    }


def chunk_of(array: StoredArray, index: tuple[int, ...], files: Files) -> bytes:
    """Return a chunk as it is stored, wherever the index of its shard says that it is."""
    data = files.get(array.key(index), b"")
    if not array.sharded or len(data) < array.index_size:
        return data
    table = np.frombuffer(data[-array.index_size : -4], "<u8").reshape(-1, 2)
    start, size = map(int, table[array.rank(index) % array.per_shard])
    return data[start : start + size]


def reseal(files: Files) -> None:
    """List the checksums that chunks end with and seal the header again, as a forger would."""
    root = json.loads(files["zarr.json"])
    arrays = arrays_of(files)
    chunks = {
        name: b"".join(
            chunk_of(array, index, files)[-4:].rjust(4, b"\0") for index in array.indices()
        )
        for name, array in arrays.items()
    }
    root["attributes"] = sealed(root["attributes"], arrays, chunks)
    files["zarr.json"] = json.dumps(root).encode()


def reseal_folder(path: Path) -> None:
    """Reseal the trace in a folder."""
    files = read_files(path)
    reseal(files)
    (path / "zarr.json").write_bytes(files["zarr.json"])


def renew_digest(path: Path) -> None:
    """Write the digest that the header and the checksums of a trace in a folder give."""
    document = json.loads((path / "zarr.json").read_bytes())
    attributes, arrays = document["attributes"], arrays_of(read_files(path))
    header = read_header(attributes, arrays, Folder(path))
    shapes = {name: array.shape for name, array in arrays.items()}
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    attributes["digest"] = content_digest(header, shapes, dtypes, attributes["checksums"])
    (path / "zarr.json").write_text(json.dumps(document))


def renew_checksums(path: Path) -> None:
    """Write the SHA-256 of what the arrays of a trace in a folder hold now."""
    document = json.loads((path / "zarr.json").read_bytes())
    place, digest = Folder(path), ContentDigest()
    for name, array in arrays_of(read_files(path)).items():
        if name not in document["attributes"]["checksums"] or name == "token_text":
            continue
        values = np.full(array.shape, 0, array.dtype)
        for index in array.indices():
            part = tuple(
                slice(at * size, (at + 1) * size)
                for at, size in zip(index, array.chunks, strict=True)
            )
            chunk = read_chunk(array, index, place)
            values[part] = chunk[tuple(slice(n) for n in values[part].shape)]
        for layer, layer_values in enumerate(values if array.shape[0] != POSITIONS else [values]):
            if "pos" in DIMENSIONS[name]:
                axis = pos_axis(name) if "layer" in DIMENSIONS[name] else 0
                digest.update_all(name, layer, layer_values, axis)
            else:
                digest.update(name, layer, layer_values)
    document["attributes"]["checksums"].update(digest.checksums())
    (path / "zarr.json").write_text(json.dumps(document))


def make(seed: int, *, mixed: bool) -> Trace:
    """Return a trace of two layers and two blocks with every array that `save` stores."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = np.arange(POSITIONS) % 5
    ropes = [kvsim.Rope.default(8), kvsim.Rope((0.5, 0.1), 1.1, layout="interleaved")]
    formulas = [
        Formula(0.4, window=260, sinks=(0.5, 0.0, -1.0, 2.0)),
        Formula(0.3, softcap=5.0),
    ]
    facts: dict[str, Any] = {
        "prompt_len": 200,
        "context_len": 150 if mixed else None,
        "rope": ropes if mixed else ropes[0],
        "formulas": formulas if mixed else None,
        "tokens": tokens,
        "token_text": [f"t{i % 7}" for i in range(POSITIONS)],
        "o_proj": draw(2, 4, 8, 6),
        "residual": torch.stack([draw(5, 6)[tokens], draw(POSITIONS, 6)]),
    }
    q, k, v = draw(2, 4, POSITIONS, 8), draw(2, 2, POSITIONS, 8), draw(2, 2, POSITIONS, 8)
    trace = Trace.from_arrays(q, k, v, **facts)
    return Trace.from_arrays(q, k, v, attn_out=trace.attn_out, lse=trace.lse, **facts)


class Original:
    """A stored trace, another recording of the same shape, and what replays of it give."""

    def __init__(self, folder: Path, *, mixed: bool) -> None:
        self.path = Path(make(0, mixed=mixed).save(folder / f"{mixed}.zarr"))
        other = Path(make(1, mixed=mixed).save(folder / f"{mixed}-other.zarr"))
        self.files, self.other = read_files(self.path), read_files(other)
        self.chunks = sorted(key for key in self.files if "/c/" in key)
        trace = kvsim.open_trace(self.path)
        self.digest, self.content = trace.digest, content(trace)


def content(trace: Trace) -> dict[str, Any]:
    """Return every array and fact of a trace that a policy or a metric can use."""
    source = trace.source
    arrays = {
        name: source.read(name, slice(None), slice(None)).numpy().tobytes()
        for name in source.shapes
    }
    header = trace.header
    facts = [header.prompt_len, header.formulas, header.ropes, header.layer_ids]
    facts += [header.labels, header.spans, header.context_len, header.layer_sensitivity]
    facts += [header.owners, header.latent, header.other_layers, header.sizes, header.left_out]
    facts += [header.questions]
    return {**arrays, "facts": facts, "sources": header.source_dtypes, "text": trace.token_text}


class RecordedReads:
    """A source, or a header, that notes what is read of it."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.names = inner, set[str]()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if callable(value) and name == "read":
            return self._read
        self.names.add(name)
        return value

    def _read(self, name: str, layers: slice, pos: slice) -> torch.Tensor:
        self.names.add(name)
        array: torch.Tensor = self._inner.read(name, layers, pos)
        return array


def check_reads(path: Path, compared: dict[str, Any]) -> None:
    """Replay all policies with all metrics, and check that `content` has all that they read."""
    trace = kvsim.open_trace(path)
    source, header = RecordedReads(trace.source), RecordedReads(trace.header)
    trace = Trace(source, header, dtype=trace.dtype, token_text=trace.token_text)  # type: ignore[arg-type]
    for name in POLICIES:
        record = kvsim.replay(trace, kvsim.policy(name), budget=BUDGET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ratios of nothing
            kvsim.measure(trace, record)
    unnoticed = source.names - compared.keys() - {"shapes", "positions"}  # those of the arrays
    assert not unnoticed, f"replays read {sorted(unnoticed)}, which is not compared"
    unnoticed = header.names - COMPARED
    assert not unnoticed, f"replays read {sorted(unnoticed)} of the header, not compared"


def header_field(rng: random.Random, case: Original, files: Files) -> None:
    """Change, remove, add or exchange one value of the group's attributes."""
    root = json.loads(files["zarr.json"])
    _change(rng, root["attributes"])
    files["zarr.json"] = json.dumps(root).encode()


def array_field(rng: random.Random, case: Original, files: Files) -> None:
    """Change one value of the metadata of an array."""
    key = rng.choice([key for key in sorted(files) if key.endswith("/zarr.json")])
    document = json.loads(files[key])
    _change(rng, document)
    files[key] = json.dumps(document).encode()


def exchange(rng: random.Random, case: Original, files: Files) -> None:
    """Let two chunks take each other's place, within an array, a layer or anywhere."""
    first = rng.choice(case.chunks)
    alike = [key for key in case.chunks if key != first and rng.random() < 0.5] or case.chunks
    same = [key for key in alike if key.partition("/")[0] == first.partition("/")[0]]
    second = rng.choice(same if same and rng.random() < 0.5 else alike)
    files[first], files[second] = files[second], files[first]


def copied(rng: random.Random, case: Original, files: Files) -> None:
    """Write a chunk over another one."""
    files[rng.choice(case.chunks)] = files[rng.choice(case.chunks)]


def older_run(rng: random.Random, case: Original, files: Files) -> None:
    """Put chunks of another recording of the same shape in the place of one, or of an array."""
    key = rng.choice(case.chunks)
    name = key.partition("/")[0] if rng.random() < 0.3 else key
    for each in case.chunks:
        if each == key or each.startswith(f"{name}/"):
            files[each] = case.other[each]


def re_encoded(rng: random.Random, case: Original, files: Files) -> None:
    """Change a number and encode its chunk again, with a checksum that fits."""
    arrays = arrays_of(case.files)
    array = arrays[rng.choice([name for name in sorted(arrays) if name != "token_text"])]
    index = rng.choice(list(array.indices()))
    values = read_chunk(array, index, Folder(case.path)).copy()
    inside = tuple(
        rng.randrange(min(size, n - at * size))
        for at, size, n in zip(index, array.chunks, array.shape, strict=True)
    )
    values[inside] = values[inside] * 2 + 1
    files[array.key(index)] = b"".join(encode_chunk(array, values))


def damaged(rng: random.Random, case: Original, files: Files) -> None:
    """Cut, empty, lengthen or flip a bit of a file."""
    key = rng.choice(sorted(files))
    data = bytearray(files[key])
    how = rng.randrange(3)
    if how == 0:
        del data[rng.randrange(len(data) + 1) :]
    elif how == 1:
        data += rng.randbytes(4)
    elif data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    files[key] = bytes(data)


def removed(rng: random.Random, case: Original, files: Files) -> None:
    """Remove a file, or a whole array."""
    key = rng.choice(sorted(files))
    whole = rng.random() < 0.5
    prefix = key.partition("/")[0] + "/"
    for each in sorted(files):
        if each == key or (whole and each.startswith(prefix)):
            del files[each]


def checksums(rng: random.Random, case: Original, files: Files) -> None:
    """Exchange or replace checksums, digest, seal and list, by those of the other recording too."""
    root, other = json.loads(files["zarr.json"]), json.loads(case.other["zarr.json"])
    attributes = root["attributes"]
    key = rng.choice(["checksums", "digest", *[x for x in ("chunks", "seal") if x in attributes]])
    if rng.random() < 0.4 or not isinstance(attributes[key], dict):
        attributes[key] = other["attributes"][key]
    else:
        a, b = rng.choice(sorted(attributes[key])), rng.choice(sorted(attributes[key]))
        attributes[key][a], attributes[key][b] = attributes[key][b], attributes[key][a]
    files["zarr.json"] = json.dumps(root).encode()


def _change(rng: random.Random, document: Any) -> None:
    """Change one value of a JSON document in place."""
    while True:
        places = sorted(document) if isinstance(document, dict) else range(len(document))
        place = rng.choice(list(places))
        inner = document[place]
        if not (isinstance(inner, dict | list) and inner and rng.random() < 0.85):
            break
        document = inner
    how = rng.random()
    if how < 0.15:
        del document[place]
    elif how < 0.3 and isinstance(document, dict):
        document[rng.choice(["bias", "window", "softcap", "mask", "scale", "offset"])] = 2
    elif how < 0.45 and len(document) > 1:
        other = rng.choice(list(places))
        document[place], document[other] = document[other], document[place]
    else:
        document[place] = _another(rng, inner)


def _another(rng: random.Random, value: Any) -> Any:
    """Return another value, mostly of the same kind."""
    if isinstance(value, bool) or rng.random() < 0.1:
        return rng.choice([None, True, False, "x", [], {}, 1.5])
    if isinstance(value, int):
        return value + rng.choice([-100, -1, 1, 7])
    if isinstance(value, float):
        return value * rng.choice([0.5, 1.0000001, 2.0, -1.0])
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice("0123456789abcdef") + value[at + 1 :]
    return rng.choice([None, 1, "x"])


HEADERS = (header_field, header_field, checksums)
MUTATIONS: tuple[Callable[[random.Random, Original, Files], None], ...] = (
    *HEADERS,
    *(array_field, exchange, exchange, copied, older_run, re_encoded, re_encoded, damaged, removed),
)

#: What a script renews afterwards; with the seal it renews the list of chunks.
RENEWED = (
    *("nothing", "nothing", "nothing", "checksums", "digest", "checksums, digest"),
    *("seal", "seal", "digest, seal", "checksums, digest, seal"),
)

#: What the digest leaves out by definition (docs/trace-format.md, section 5).
OUTSIDE = {"o_proj", "residual", "sources", "text"}


def run_case(originals: list[Original], seed: int, folder: Path) -> str:
    """Run one case and return its outcome; AssertionError for a finding."""
    rng = random.Random(seed)  # noqa: S311  repeatable on purpose
    case = rng.choice(originals)
    files = dict(case.files)
    for _ in range(rng.choice((1, 1, 1, 2))):
        mutate = rng.choice(MUTATIONS)
        # an earlier one may have left nothing to change
        with contextlib.suppress(ValueError, KeyError, IndexError):
            mutate(rng, case, files)
    path = folder / f"case-{seed}"
    renewed = rng.choice(RENEWED)
    try:
        write_files(path, files)
        resealed = _renew(path, renewed)
        return _outcome(rng, case, path, resealed=resealed)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _renew(path: Path, renewed: str) -> bool:
    """Renew what a script would; return whether that was everything but SHA-256."""
    # a script fails where it cannot read what it renews
    errors = (KvsimError, ValueError, KeyError, TypeError, AttributeError, IndexError, OSError)
    with contextlib.suppress(*errors):
        if "checksums" in renewed:
            renew_checksums(path)
        if "digest" in renewed:
            renew_digest(path)
        if "seal" in renewed:
            reseal_folder(path)
            return True
    return False


def _outcome(rng: random.Random, case: Original, path: Path, *, resealed: bool) -> str:
    message = ""
    try:
        trace = kvsim.open_trace(path)
        if trace.digest != case.digest:
            return "another digest"
        now, before = content(trace), case.content
        changed = {name for name in now | before if now.get(name) != before.get(name)}
        if not changed:
            return "identical"
    except KvsimError as error:
        message = str(error)
    if message:
        assert "\n" not in message, "a message of several lines"
        return "refused"
    assert resealed, f"{sorted(changed)} changed, with the same digest"
    if not verify(path).ok:
        return "reported by verify"
    assert changed <= OUTSIDE, f"{sorted(changed)} changed, which verify calls undamaged"
    return "forged outside the digest"


def originals_in(folder: Path) -> Iterator[Original]:
    """Yield the traces that are changed: of layers that are alike, and of layers that differ."""
    for mixed in (False, True):
        yield Original(folder, mixed=mixed)


def main() -> None:
    """Run cases and print their outcomes."""
    given = options(__doc__, 300).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        originals = list(originals_in(folder))
        for original in originals:
            check_reads(original.path, original.content)
        campaign(lambda seed: run_case(originals, seed, folder), given)


if __name__ == "__main__":
    main()
