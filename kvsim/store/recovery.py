"""Recovery of interrupted captures: finding drafts and making traces of them."""

from __future__ import annotations

import errno
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.digest import CHECKSUMMED, ContentDigest
from kvsim.core.header import Header
from kvsim.core.probe import ARRAYS as PROBE
from kvsim.core.probe import KEY as PROBE_KEY
from kvsim.errors import TraceError, TraceExistsError, TraceNotFoundError, local_path
from kvsim.files import Kind, unbroken
from kvsim.schema import CHUNK, LOGPROBS, object_at
from kvsim.store.draft import (
    PARTIAL,
    TOKENS,
    Group,
    TokenFile,
    belongs_to,
    is_locked,
    read_tokens,
    recover_command,
)
from kvsim.store.layout import DIMENSIONS, block_axis, cut_shape, require_arrays
from kvsim.store.metadata import (
    attributes_of,
    check_format,
    group_attributes,
    read_header,
)
from kvsim.store.place import Folder, damaged
from kvsim.store.projections import KEY, copy_projections, find_projections
from kvsim.store.publication import check_target, complete, put, remove_trace, require_chunks
from kvsim.store.reader import StoredTrace
from kvsim.store.verification import Progress, verify
from kvsim.store.writer import LATE

#: `generation.stopped` of a recovered trace.
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Draft:
    """A hidden folder that a writer has left behind or is still writing.

    Attributes:
        path: the folder.
        target: the path of its trace.
        kind: ``tmp`` a trace that was being written, ``old`` one that was being replaced.
        tokens: number of tokens that can be recovered.
        complete: whether it only has to be renamed.
        writing: whether a process is writing it; False where the system has no file locks.
    """

    path: Path
    target: Path
    kind: Kind
    tokens: int
    complete: bool
    writing: bool

    def __str__(self) -> str:
        if self.writing:
            state = "is being written"
        elif self.kind == "old":
            state = "was to be replaced"
        elif self.complete:
            state = f"complete, {self.tokens} tokens"
        else:
            state = f"{self.tokens} tokens"
        return f"{self.path} ({state})"


def find_drafts(folder: str | Path) -> list[Draft]:
    """Return the drafts in a folder by name; folders below it are not searched."""
    drafts = []
    for path in sorted(Path(folder).iterdir()):
        owner = belongs_to(path)
        if owner is not None and path.is_dir() and not path.is_symlink():
            drafts.append(_draft(path, *owner))
    return drafts


def recover(
    path: str | Path,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Make a trace of the draft of an interrupted capture and return its path.

    The trace has the committed tokens, exactly as they were recorded. A complete draft is published
    as it is; a trace that was set aside to be replaced is moved back. Every chunk is read before.
    The draft stays until the trace is published, so an interrupted recovery can be repeated.

    Args:
        path: the intended path of the trace, or the hidden folder of the draft.
        out: where to write the trace, on the same file system; its intended path by default.
        overwrite: replace a trace at that path.
        progress: called with (layers done, total layers).

    Raises:
        TraceNotFoundError: there is no such draft.
        TraceError: there are several drafts, the draft is being written, is damaged or has no
            committed tokens, or the file system refuses.
        TraceExistsError: something is at the path of the trace.
    """
    draft = _find(local_path(path, TraceError))
    target = draft.target if out is None else local_path(out, TraceError)
    try:
        if draft.kind == "old":
            _restore(draft.path, target, progress)
        else:
            if not overwrite:
                _check_free(draft, target)
            check_target(target, overwrite=overwrite)
            target.parent.mkdir(parents=True, exist_ok=True)
            with _locked(draft.path) as file:
                group = _group(draft.path)
                if group.attributes.get("complete") is True:
                    _verify(draft.path, progress)
                else:
                    _finish(group, progress or (lambda *_: None))
                    StoredTrace(draft.path)  # nothing is published that does not open
                with unbroken():
                    put(group, target, file=file, overwrite=overwrite)
        meta = StoredTrace(target).header.meta
        copy_projections(find_projections(draft.path, meta, str(target)), target.parent)
    except TraceError:
        raise
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise TraceError(
                f"{target} is on another file system than {draft.path}, expected the same; "
                "recover it there and copy it"
            ) from error
        raise TraceError(
            f"{target} cannot be written ({error.strerror or error}), the draft {draft.path} is "
            f"kept; free some space and run `{recover_command(draft.path)}` again"
        ) from error
    return target


def discard(path: str | Path) -> Draft:
    """Remove a draft and return its description.

    Args:
        path: the hidden folder, or the intended path of its trace.

    Raises:
        TraceNotFoundError: there is no such draft.
        TraceError: there are several drafts, the draft is being written, or the file system
            refuses.
    """
    draft = _find(local_path(path, TraceError))
    try:
        with _locked(draft.path):
            remove_trace(draft.path)
    except OSError as error:
        raise TraceError(
            f"{draft.path} cannot be removed ({error.strerror or error}), part of it may be left"
        ) from error
    return draft


@contextmanager
def _locked(folder: Path) -> Iterator[TokenFile | None]:
    """The locked file of tokens of a draft; None if the draft has none."""
    with ExitStack() as stack:
        file = None
        if (folder / TOKENS).exists():
            file = stack.enter_context(closing(TokenFile(folder, wait=False)))
        if is_locked(folder) if file is None else not file.locked:
            raise TraceError(
                f"{folder} is being written or recovered; expected one that was interrupted, wait "
                "for the command or end it"
            )
        yield file


def _check_free(draft: Draft, target: Path) -> None:
    """Raise TraceExistsError if a trace is at `target`; the message compares the lengths."""
    try:
        n_tokens = StoredTrace(target).shapes["q"][2]
    except TraceError:
        return
    raise TraceExistsError(
        f"{target} exists, expected a free path: --overwrite (overwrite=True) would replace its "
        f"{n_tokens} tokens by the {draft.tokens} of {draft.path}; give another path (--out), or "
        f"`{_removal(draft.path)}`"
    )


def _find(path: Path) -> Draft:
    """Return the draft at `path`, or the only draft of the trace at `path`."""
    owner = belongs_to(path)
    if owner is not None:
        if not path.is_dir():
            raise TraceNotFoundError(f"{path} does not exist, expected the folder of a draft")
        return _draft(path, *owner)
    siblings = find_drafts(path.parent) if path.parent.is_dir() else []
    drafts = [draft for draft in siblings if draft.target == path]
    if not drafts:
        inside = find_drafts(path) if path.is_dir() else []
        hint = f"; it contains {', '.join(map(str, inside))}, name one of them" if inside else ""
        raise TraceNotFoundError(
            f"nothing to recover for {path}, expected a hidden folder .{path.name}.tmp-* "
            f"next to it{hint}"
        )
    if len(drafts) > 1:
        raise TraceError(
            f"{path} has several drafts, {', '.join(map(str, drafts))}; name one of them"
        )
    return drafts[0]


def _draft(path: Path, target: Path, kind: Kind) -> Draft:
    try:
        attributes = group_attributes(Folder(path))
    except TraceError:  # only just created, or partly removed
        attributes = {}
    return Draft(
        path=path,
        target=target,
        kind=kind,
        tokens=_committed(attributes),
        complete=attributes.get("complete") is True,
        writing=is_locked(path),
    )


def _committed(attributes: Mapping[str, Any]) -> int:
    tokens = attributes.get("committed_tokens")
    return max(tokens, 0) if isinstance(tokens, int) else 0


def _verify(folder: Path, progress: Progress | None) -> None:
    problems = verify(folder, progress=progress).problems
    if problems:
        raise TraceError(f"{problems[0]}; nothing was published")


def _restore(folder: Path, target: Path, progress: Progress | None) -> None:
    """Move a trace that was set aside back, never over another one."""
    try:
        _verify(folder, progress)
    except TraceError as error:
        raise TraceError(
            f"{folder} is the rest of a trace that was replaced ({error}); "
            f"remove it with `{_removal(folder)}`"
        ) from error
    if target.exists() or target.is_symlink():
        raise TraceExistsError(
            f"{target} exists, expected a free path for {folder}, which was set aside for another "
            f"trace; give another path (--out), or `{_removal(folder)}`"
        )
    folder.rename(target)


def _group(folder: Path) -> Group:
    """Open the group of a locked draft, without the partial files that kills leave behind."""
    if not _draft(folder, folder, "tmp").tokens:
        raise TraceError(
            f"{folder} has no committed tokens, so there is nothing to recover; "
            f"remove it with `{_removal(folder)}`"
        )
    # partly written files, and arrays that were partly removed
    for stray in folder.rglob("*" + PARTIAL):
        stray.unlink()
    for part in folder.iterdir():
        if part.is_dir() and not (part / "zarr.json").exists():
            shutil.rmtree(part)
    return Group.open(folder)


def _removal(folder: Path) -> str:
    return f"kvsim trace discard {shlex.quote(str(folder))}"


def _finish(group: Group, progress: Progress) -> None:
    """Complete a draft with its committed tokens; each step can be repeated by the next attempt."""
    where, committed = str(group.folder), _committed(group.attributes)
    check_format(group.attributes, where)
    require_arrays(group.arrays, where)
    lost = _lost(group)
    if gone := [name for name in lost if name not in LATE]:
        raise TraceError(
            f"{where}: no array {', '.join(gone)}, which the capture had begun; nothing was "
            f"published, remove it with `{_removal(group.folder)}`"
        )
    n_pos, left_out = group.arrays["k"].shape[2], group.left_out
    if left_out is not None and committed <= left_out[1]:
        raise TraceError(
            f"{where}: rows {left_out[0]} to {left_out[1] - 1} are left out (--rows), and only "
            f"{committed} tokens are on disk, so that no row behind them can be recovered; nothing "
            f"was published, remove it with `{_removal(group.folder)}`"
        )
    dropped = [
        name
        for name in LATE
        if name in lost or (name in group.arrays and not _usable(group, name, committed))
    ]
    ids, texts = read_tokens(group.folder)
    tokens = np.array(ids[:committed]) if len(ids) >= committed else None
    texts = None if tokens is None or texts is None else texts[:committed]
    header = read_header(group.attributes, group.arrays, group.place)
    header = replace(header, meta={k: x for k, x in header.meta.items() if k != PROBE_KEY})
    if n_pos != committed or "stopped" not in object_at(header.meta, "generation"):
        header = _cut(header, committed, n_pos, texts)
    notes = [f"recovered without {name}, which was not complete" for name in dropped]
    if tokens is None:
        notes.insert(0, "recovered without token ids, which were not on disk")
    header = _noted(header, *notes)
    # the header comes first, so that notes on dropped arrays survive an attempt that ends below
    group.set(**attributes_of(header, group.version))
    for name in (*dropped, "tokens", "token_text"):  # the last two are written at the end
        group.remove(name)
    for name, array in list(group.arrays.items()):
        shape = cut_shape(name, array.shape, committed, left_out)  # ends a chunk or the array
        if shape != array.shape:
            group.resize(name, shape)
        require_chunks(group, name, where, "record the trace again")
    digest, n_layers = ContentDigest(), len(header.layer_ids)
    for layer in range(n_layers):
        for name in group.arrays:
            if "layer" in DIMENSIONS[name][:-1]:
                for block in _blocks(group, name, layer):  # raises for a damaged chunk
                    if name in CHECKSUMMED:
                        digest.update(name, layer, block)
        progress(layer + 1, n_layers)
    complete(group, header, digest, tokens, texts, where)


def _lost(group: Group) -> list[str]:
    """Return the arrays that were begun and are missing."""
    begun = group.attributes.get("arrays")
    if not isinstance(begun, list):
        raise damaged(f"{group.folder}: no list of the arrays that the capture had begun")
    present = {*group.arrays, *(["o_proj"] if KEY in object_at(group.attributes, "meta") else [])}
    return [name for name in DIMENSIONS if name in begun and name not in present]


def _usable(group: Group, name: str, committed: int) -> bool:
    """Return whether an array that is not appended with the positions is complete."""
    array = group.arrays[name]
    if name in PROBE:  # written when all else is there, in a moment
        return False
    whole = "pos" not in DIMENSIONS[name] or group.arrays["k"].shape[2] == committed
    return whole and group.written(name) == array.nchunks


def _blocks(group: Group, name: str, layer: int) -> Iterator[NDArray[Any]]:
    """Yield one layer of an array, in blocks of positions if it has any."""
    axis = block_axis(name)
    part = [slice(layer, layer + 1), *[slice(None)] * ((axis or 1) - 1)]
    for start in range(0, group.arrays[name].shape[axis] if axis else 1, CHUNK):
        block = [slice(start, start + CHUNK)] if axis else []
        yield group.read(name, [*part, *block])[0]


def _cut(header: Header, committed: int, n_pos: int, texts: list[str] | None) -> Header:
    """Return the header of the first `committed` tokens of at most `n_pos`."""
    prompt_len = min(header.prompt_len, committed)
    notes = [f"recovered: {committed} of at most {n_pos} tokens"]
    if prompt_len < header.prompt_len:
        notes.append(
            f"the prompt had {header.prompt_len} tokens, of which {prompt_len} were recovered"
        )
    context_len = header.context_len
    if context_len is not None and context_len > prompt_len:
        notes.append(f"the context of {context_len} tokens does not end in what was recovered")
        context_len = None
    spans = {
        name: [[start, end] for start, end in each if end <= prompt_len]
        for name, each in header.spans.items()
    }
    if spans != {name: [*map(list, each)] for name, each in header.spans.items()}:
        notes.append("spans behind the recovered prompt were left out")
    questions = tuple(each for each in header.questions if each[1] < committed)
    rows = committed - prompt_len
    known = {key: header.meta[key][:rows] for key in LOGPROBS if rows and key in header.meta}
    generation = {"new_tokens": rows, "stopped": INTERRUPTED}
    response = None if texts is None else "".join(texts[prompt_len:])
    meta = {
        **{key: fact for key, fact in header.meta.items() if key not in LOGPROBS},
        "text": {**object_at(header.meta, "text"), "response": response},
        "generation": {**object_at(header.meta, "generation"), **generation},
        **({"spans": spans} if spans else {}),
        **known,
    }
    return _noted(
        replace(
            header.within(committed),
            prompt_len=prompt_len,
            context_len=context_len,
            questions=questions,
            meta=meta,
        ),
        *notes,
    )


def _noted(header: Header, *notes: str) -> Header:
    recorded = header.meta.get("notes")
    before = recorded if isinstance(recorded, list) else []
    new = [note for note in notes if note not in before]
    return replace(header, meta={**header.meta, "notes": [*before, *new]}) if new else header
