"""Shared names and constants: axes, dtypes, the format version."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

#: `evicted_at` of an entry that never leaves: the int32 maximum.
NEVER = 2**31 - 1

#: Parts after which the prompt, and later turns, have an event (`Schedule.compress`).
Compress = Literal["prompt", "context", "both", "questions", "context+questions"]

#: (start, stop) of parts of a sequence, in tokens.
Spans = Sequence[tuple[int, int]]

#: The page on policies of one's own, which errors of scorers name.
GUIDE = "docs/add-a-policy.md"

#: Version of the trace format (docs/trace-format.md); readers refuse every other one.
FORMAT_VERSION = 6

#: Tokens per chunk of every stored array; the unit in which a trace is appended and read.
CHUNK = 256

#: Reserved axis names, the same in memory, in zarr `dimension_names`, in tables and in figures.
AXES = {
    "q": ("layer", "qhead", "pos", "dim"),
    "k": ("layer", "head", "pos", "dim"),
    "v": ("layer", "head", "pos", "dim"),
    "attn_out": ("layer", "qhead", "pos", "dim"),
    "gate": ("layer", "qhead", "pos", "dim"),
    "lse": ("layer", "qhead", "pos"),
    "o_proj": ("layer", "qhead", "dim", "hidden"),
    "residual": ("layer", "pos", "hidden"),
    "residual_norm": ("layer", "pos"),
    "probe_q": ("layer", "qhead", "probe", "dim"),
    "probe_k": ("layer", "head", "probe", "dim"),
    "received": ("layer", "qhead", "before"),
    "moments": ("layer", "qhead", "moment", "dim"),
    "tokens": ("pos",),
    "evicted_at": ("layer", "head", "pos"),
}

#: Arrays whose axis `dim` is that of values; it is stored as `value_dim`.
OF_VALUES = ("v", "attn_out", "gate", "o_proj")

#: Arrays of which a trace may leave out rows; their positions are then `row`.
OF_ROWS = ("q", "attn_out", "lse", "gate")

#: Arrays of rows that repeat the context.
REPETITION = ("probe_q", "probe_k")

#: Axes along which arrays of layers are stored in blocks of `CHUNK`.
BLOCKED = ("pos", "probe")

#: How to record arrays that a trace may lack.
ON_REQUEST = {
    "o_proj": "--o-proj (o_proj=True)",
    "gate": "--o-proj (o_proj=True), if its model has one",
    "residual": "--residual (residual=True)",
    "residual_norm": "this version, which stores it",
    "layer_sensitivity": "--o-proj and --sensitivity, all layers and a response",
    "received": "all rows (without --rows)",
    "moments": "all rows (without --rows)",
    "probe_q": "--probe repeat (probe='repeat')",
    "probe_k": "--probe repeat (probe='repeat')",
}

#: Arrays of sums over such rows.
SUMS = ("received", "moments")

#: Entries of `meta` for each token of a response (docs/trace-format.md).
LOGPROBS = ("response_logprobs", "mean_logprobs")

#: Labels of a prompt; they become columns of tables.
LABELS = ("task", "domain", "level", "length", "depth")

#: How far a result can be trusted (docs/concepts.md).
FIDELITY = ("exact", "open", "judged", "closed")

#: Meaning of each level of fidelity, for pages.
FIDELITY_MEANING = {
    "exact": "a live run that is fed the same tokens would show it; of a layer replayed alone, one "
    "in which this layer alone evicts",
    "open": "open loop: computed from recorded queries, keys and values; in a live run errors "
    "also add up from layer to layer",
    "judged": "measured on the model as it ran with the kept sets of the replay (`--judge`): "
    "effects are real, decisions those made on what was recorded",
    "closed": "measured in a live run",
}


def axes_of(name: str, *, rows: bool = False) -> tuple[str, ...]:
    """Return the axes of a stored array of a trace; rows: whether the trace leaves out rows."""
    names = {"dim": "value_dim"} if name in OF_VALUES else {}
    names |= {"pos": "row"} if rows and name in OF_ROWS else {}
    return tuple(names.get(axis, axis) for axis in AXES[name])


#: Names of folders of output projections.
PROJECTIONS = re.compile("projections-[0-9a-f]{16}")


def projections_folder(digest: str) -> str:
    """The folder, next to its traces, of the output projections with a digest."""
    return f"projections-{digest.removeprefix('sha256:')[:16]}"


def object_at(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object at a key; empty for another type, as by another writer."""
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def is_url(path: object) -> bool:
    """Whether a path is a URL, such as ``s3://bucket/run.zarr``."""
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path) is not None


def visible(text: str) -> str:
    """Escape control and similar characters that terminals or browsers act on; keep lines."""
    return "\n".join(
        line
        if line.isprintable()
        else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
        for line in text.split("\n")
    )


def merged(remarks: Iterable[str]) -> list[str]:
    """Return remarks once, a line for those that differ only in the name before a colon or budget.

    remarks: each may have several lines.
    """
    groups: dict[tuple[str, str], tuple[list[str], list[int]]] = {}
    for line in dict.fromkeys(line for each in remarks for line in each.split("\n") if line):
        name, colon, text = line.partition(": ")
        before, *found = re.split(r"\bbudget (\d+)\b", text if colon else line, maxsplit=1)
        names, budgets = groups.setdefault((before, "".join(found[1:])), ([], []))
        names += [name] if colon and name not in names else []
        budgets += map(int, found[:1])
    out = []
    for (before, after), (names, budgets) in groups.items():
        ends = sorted({*budgets})
        at = " to ".join(map(str, ends[:: len(ends) - 1 or 1]))
        text = f"{before}budget{'s' * (len(ends) > 1)} {at}{after}" if ends else before
        out.append(f"{first_of(names)}: {text}" if names else text)
    return out


def rounded(value: float, form: str) -> str:
    """Format a number; significant digits have no power of ten from 0.0001 up to a million.

    Three decimals that would show a millionth or more as zero give way to two significant digits.
    """
    small = form.endswith(".3f") and 1e-6 <= abs(value) < 5e-4
    text = format(value, form.replace(".3f", ".2g") if small else form)
    short = form.endswith("g") and re.search(r"e\+0[1-5]$", text)
    return format(float(text), f"{form.partition('.')[0]}.0f") if short else text


def plural(n: int, what: str) -> str:
    """A number and what it counts: `1 layer`, `2 layers`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def first_of(names: Sequence[str], most: int = 3) -> str:
    """The first of many names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def numbered(layers: Sequence[int]) -> str:
    """Ascending numbers of layers in words: `layer 3`, `layers 0, 4-7`."""
    return f"{'layer' if len(layers) == 1 else 'layers'} {ranges(layers, ', ')}"


def ranges(numbers: Sequence[int], separator: str = ",") -> str:
    """Ascending numbers in the form of `--layers`: 0,4-7."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    spans = (str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return separator.join(spans)


#: Further options of a schedule; results have them among their parameters.
PREFILL = ("compress", "prefill_chunk")


def schedule(
    interval: int | None,
    *,
    prefill: bool,
    compress: str = "prompt",
    prefill_chunk: int | None = None,
) -> str:
    """After which rows a policy evicts, in a few words."""
    ends = {"both": "the context, the prompt", "questions": "each question"}
    ends["context+questions"] = "the context, each question"
    first = ends.get(compress, f"the {compress}")
    if prefill_chunk is not None:
        first = f"every {prefill_chunk} rows of the prompt, {first}"
    later = "later questions" if compress.endswith("questions") else ""
    prompt = first if prefill else later
    every = "" if interval is None else "each row" if interval == 1 else f"every {interval} rows"
    return ", ".join(part for part in (prompt, every) if part) or "never"


_UNITS = {"": 1, **{f"{p}B": 1000**n for n, p in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{p}IB": 1024**n for n, p in enumerate(("K", "M", "G", "T"), start=1)}


def size_in_bytes(text: str) -> int | None:
    """Return the bytes of 500MB, 2GB, 1GiB or 4096; None for another text."""
    size = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = None if size is None else _UNITS.get(size[2].upper())
    if size is None or unit is None or not float(size[1]):
        return None
    return int(float(size[1]) * unit)
