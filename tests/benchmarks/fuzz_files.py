"""Damages GGUF files, the cache of one, and dumps at random, and looks at what reading them does.

    python tests/benchmarks/fuzz_files.py --cases 10000 --seed 0

A damaged file is refused in one line, or read: neither format has checksums, so another number may
be another model or another set. A damaged cache is built again: whatever happened to it, weights,
configuration and tokenizer are those of the GGUF file. Anything else is a finding, printed with the
seed of its case: another exception, more than five seconds, or more than a gigabyte. Case i of a
run has the seed `--seed` + i.
"""

import io
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))
from campaign import campaign, limit_memory, options, watched
from kvsim.errors import CaptureError, DumpError
from kvsim.recorder import gguf
from kvsim.recorder.gguf import GgufFile, dequantised
from kvsim.studies.referee.dump import COLUMNS, read_dump
from tests.small_gguf import write

#: Numbers that stand where a count, a size or a place does.
NUMBERS = [0, 1, 2, 7, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**60]
NUMBERS += [2**63, 2**64 - 1]


class Originals:
    """A GGUF file, the files of its cache, and dumps, whole."""

    def __init__(self, folder: Path) -> None:
        self.gguf = folder / "small.gguf"
        write(self.gguf)
        with dequantised(GgufFile("small", self.gguf)) as (cache, _):
            self.cache = {path.name: path.read_bytes() for path in cache.iterdir()}
            self.folder = cache
        row = np.repeat(np.arange(30, 40), 20)
        table = dict(zip(COLUMNS, (0 * row, 0 * row, row, np.tile(np.arange(20), 10)), strict=True))
        self.dumps = []
        for save in (np.savez, np.savez_compressed):
            data = io.BytesIO()
            save(data, **table)
            self.dumps.append((".npz", data.getvalue()))
        from polars import DataFrame

        data = io.BytesIO()
        DataFrame(table).write_parquet(data)
        self.dumps.append((".parquet", data.getvalue()))


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with flipped bits, other numbers, a cut, or parts in other places."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(min(len(content), rng.choice((64, 4096, 1 << 30))) or 1)
        what = rng.random()
        if what < 0.4 and content:
            content[at] ^= 1 << rng.randrange(8)
        elif what < 0.8:
            form = rng.choice("BIQ")
            number = rng.choice(NUMBERS) % (1 << 8 * struct.calcsize(form))
            content[at : at + struct.calcsize(form)] = struct.pack(f"<{form}", number)
        elif what < 0.9:
            del content[at : at + rng.choice((1, 8, 1 << 30))]
        else:
            begin = rng.randrange(len(content) or 1)
            content[at:at] = content[begin : begin + rng.choice((1, 8, 500))]
    return bytes(content)


def forge(rng: random.Random, originals: Originals) -> None:
    """Change a file of the cache, with checksums that fit at times, or put a link there."""
    folder = originals.folder
    name = rng.choice(sorted(originals.cache))
    what = rng.random()
    if what < 0.1:
        (folder / name).rename(folder.with_name("elsewhere"))
        (folder / name).symlink_to(folder.with_name("elsewhere"))
    elif what < 0.2:
        (folder / name).unlink()
    elif what < 0.3:
        shutil.copy(folder / name, folder / "more.safetensors")
    elif what < 0.7:
        (folder / name).write_bytes(damaged(rng, originals.cache[name]))
    else:  # all rows of a weight, and the checksum of the weights
        data = bytearray(originals.cache["model.safetensors"])
        size = struct.unpack_from("<Q", data)[0]
        index = json.loads(data[8 : 8 + size])
        place = rng.choice([each for key, each in index.items() if key != "__metadata__"])
        begin, end = (8 + size + at for at in place["data_offsets"])
        data[begin:end] = bytes(end - begin) if rng.random() < 0.5 else rng.randbytes(end - begin)
        (folder / "model.safetensors").write_bytes(data)
        manifest = gguf._manifest(folder, folder.name)
        (folder / "kvsim.json").write_text(json.dumps(manifest) + "\n")


def run_case(originals: Originals, seed: int, folder: Path) -> str:
    """One case; gives its outcome, raises on a finding."""
    rng = random.Random(seed)  # noqa: S311  repeatable on purpose
    kind = rng.choice(("gguf", "cache", "dump"))
    error: Exception | None = None
    path = folder / f"case-{seed}"
    try:
        with watched():
            if kind == "cache":
                forge(rng, originals)
                with dequantised(GgufFile("small", originals.gguf)) as (cache, _):
                    now = {each.name: each.read_bytes() for each in cache.iterdir()}
                    assert not any(each.is_symlink() for each in (cache, *cache.iterdir()))
                assert now == originals.cache, "another model, under the checksum of the file"
                return "cache as it was"
            if kind == "gguf":
                path.write_bytes(damaged(rng, originals.gguf.read_bytes()))
                with dequantised(GgufFile("case", path)) as (cache, _):
                    shutil.rmtree(cache) if cache != originals.folder else None
            else:
                ending, data = rng.choice(originals.dumps)
                if ending == ".npz" and rng.random() < 0.5:  # behind the checksums of the zip
                    data = _resealed(rng, data)
                path = path.with_suffix(ending)
                path.write_bytes(damaged(rng, data) if rng.random() < 0.7 else data)
                read_dump(path)
    except (CaptureError, DumpError) as refusal:
        error = refusal
    finally:
        path.unlink(missing_ok=True)
    if error is None:
        return f"{kind} read"
    assert "\n" not in str(error), "a message of several lines"
    assert len(str(error)) < 2000, "a message without an end"
    return f"{kind} refused"


def _resealed(rng: random.Random, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        hit = rng.choice(old.namelist())
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, damaged(rng, content) if name == hit else content)
    return out.getvalue()


if __name__ == "__main__":
    given = options(__doc__, 1000).parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        originals = Originals(Path(name))
        limit_memory()
        campaign(lambda seed: run_case(originals, seed, Path(name)), given)
