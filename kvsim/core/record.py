"""The outcome of a replay: when each entry left, with policy and trace."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.merging import Merger
from kvsim.core.parameters import check_fields, integer
from kvsim.core.policy import Policy, Schedule
from kvsim.core.reading import Reads
from kvsim.core.storing import Quantizer, Spec
from kvsim.errors import PositionError, TraceError
from kvsim.schema import NEVER, schedule


@dataclass(frozen=True)
class Plans:
    """Decisions of one event on a block of layers, kept on request (`internals=True`).

    Attributes:
        row: the row after which the event fired.
        layers: indices in the trace, [L].
        pos: position of each entry, -1 on pads, [L, H, n].
        scores: NaN on pads, [L, H, n].
        budgets: of the layers, [L].
        quotas: entries that stay, [L, H], or [L, H, S] by group.
        groups: the group of each entry, [L, H, n].
        eligible: entries that may stay, if not all, [L, H, n].
        notes: arrays of the allocator by name, such as the mass of `ams`.
    """

    row: int
    layers: tuple[int, ...]
    pos: NDArray[np.int64]
    scores: NDArray[np.float64]
    budgets: NDArray[np.int64]
    quotas: NDArray[np.int64]
    groups: NDArray[np.int64] | None = None
    eligible: NDArray[np.bool_] | None = None
    notes: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def brief(self, names: Collection[str]) -> Plans:
        """Keep only the notes with these names: no entries (n is 0) and no quotas (S is 0)."""
        empty = np.empty((*self.pos.shape[:2], 0))
        return replace(
            self,
            pos=empty.astype(np.int64),
            scores=empty,
            quotas=empty.astype(np.int64),
            groups=None,
            eligible=None,
            notes={name: note for name, note in self.notes.items() if name in names},
        )


@dataclass(frozen=True)
class Selection:
    """Rows of one prompt that a policy drops between layers.

    dropped: layers after which rows were dropped, ascending. counts: rows of the prompt in each
    layer. restarted: these rows ran through all layers again, at new contiguous positions. notes:
    by name, one number per layer, or one for all.
    """

    dropped: tuple[int, ...]
    counts: tuple[int, ...]
    restarted: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> int | None:
        """The selection layer: the first after which rows were dropped."""
        return self.dropped[0] if self.dropped else None


@dataclass(frozen=True)
class Response:
    """Response of a running model under a policy, and with the full cache.

    Attributes:
        tokens: ids, end token included.
        text: without special tokens; None without a tokenizer.
        right: whether it has the right answer; None if the right answer is unknown.
        full_tokens, full_text, full_right: the same with the full cache, at most as many tokens.

    Raises:
        TraceError: values of other types, because run folders are untrusted input.
    """

    tokens: tuple[int, ...]
    text: str | None
    right: bool | None
    full_tokens: tuple[int, ...]
    full_text: str | None
    full_right: bool | None

    def __post_init__(self) -> None:
        check_fields(self, "response", TraceError)

    @property
    def same_tokens(self) -> int:
        """Tokens before the first that differs from the response with the full cache."""
        pairs = enumerate(zip(self.tokens, self.full_tokens, strict=False))
        shorter = min(len(self.tokens), len(self.full_tokens))
        return next((at for at, (a, b) in pairs if a != b), shorter)


@dataclass(frozen=True)
class Facts:
    """Facts about a record's policy and request.

    Attributes:
        looks_ahead: the policy reads facts that a cache cannot have: a bound, not deployable.
        bounds: as `bounds_of` returns; empty if the budget has no effect.
        access: "read" if rows read only some held entries, "stored" if entries are stored in
            another form.
        changed: names of the parameters that differ from their defaults; None if these are unknown,
            as for a user-defined policy.
        share: the budget as requested, such as "25%" or "64MiB", if not in entries.
        own_schedule: whether the events follow the policy's own schedule.
    """

    looks_ahead: bool = False
    bounds: tuple[str, ...] = ("held",)
    access: tuple[str, ...] = ()
    changed: tuple[str, ...] | None = None
    share: str | None = None
    own_schedule: bool = True


@dataclass(frozen=True, eq=False)
class Record:
    """When each entry of each head left the cache.

    Row r sees position p iff p <= r <= evicted_at[p].

    Attributes:
        evicted_at: int32 [layer, head, pos]; the int32 maximum for an entry that never leaves. In
            layers that row p of the prompt does not reach it is p - 1: no row sees it.
        policy, params: name of the policy, and its parameters by name.
        budget: entries per head.
        schedule: after which rows its events fired.
        prompt_len: tokens of the prompt.
        layers: the replayed layers of the trace, in order; layer_ids: their numbers in the model.
        trace, digest: name of the trace, and its fingerprint; empty in memory.
        positions: "slot" if keys are rotated to their slot in the cache, else "absolute".
        per_query_head: the head axis counts query heads.
        facts: about the policy and the request.
        remark: a caveat for numbers at this budget, or empty.
        selection: propagated rows of the prompt; None if all layers have all rows.
        closed: a live run, whose decisions depend on its own evictions.
        response: text of the live model, if it wrote one.
        reads: account of sparse attention; None if rows read all resident entries.
        storage: quantizer or merger of entries; None if stored as recorded.
        internals: decisions of the events, on request.
    """

    evicted_at: NDArray[np.int32]
    policy: str
    params: Mapping[str, Any]
    budget: int
    schedule: Schedule
    prompt_len: int
    layers: tuple[int, ...]
    layer_ids: tuple[int, ...]
    trace: str = "memory"
    digest: str = ""
    positions: str = "absolute"
    per_query_head: bool = False
    facts: Facts = Facts()
    remark: str = ""
    selection: Selection | None = None
    closed: bool = False
    response: Response | None = None
    reads: Reads | None = None
    storage: Quantizer | Merger | Spec | None = None
    internals: tuple[Plans, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        layers, heads, n_pos = self.evicted_at.shape
        share = "" if self.facts.share is None else f" ({self.facts.share})"
        after = schedule(**vars(self.schedule))
        return (
            f"Record({self.policy!r}, trace={self.trace!r}, "
            f"budget={self.budget}{share}, after {after!r}, layers={layers}, heads={heads}, "
            f"pos={n_pos}, events={len(self.events)})"
        )

    @property
    def n_pos(self) -> int:
        """Tokens of the trace."""
        return int(self.evicted_at.shape[-1])

    @cached_property
    def gone_after(self) -> NDArray[np.int32]:
        """`evicted_at`, but the last prompt row for entries that never entered a layer."""
        if self.selection is None:
            return self.evicted_at
        absent = self.evicted_at < np.arange(self.n_pos)
        out: NDArray[np.int32] = np.where(absent, self.prompt_len - 1, self.evicted_at)
        return out.astype(np.int32)

    @cached_property
    def events(self) -> list[int]:
        """Rows after which at least one entry left, ascending.

        Includes the last row of the prompt if some rows were not propagated to all layers.
        """
        rows = np.unique(self.gone_after)
        return [int(r) for r in rows[rows != NEVER]]

    def kept(self, row: int) -> NDArray[np.bool_]:
        """Return the entries visible to row `row`; bool [layer, head, pos]."""
        return self._leaving_after(row, -1)

    def retained(self, row: int) -> NDArray[np.bool_]:
        """Return the entries kept by the event after row `row`; bool [layer, head, pos]."""
        return self._leaving_after(row, 0)

    def _leaving_after(self, row: int, later: int) -> NDArray[np.bool_]:
        """Return the entries of rows up to `row` that leave after row `row + later`, or never."""
        number = integer(row)
        if number is None or not 0 <= number < self.n_pos:
            raise PositionError(f"row is {reprlib.repr(row)}; expected 0..{self.n_pos - 1}")
        return (self.evicted_at > number + later) & (np.arange(self.n_pos) <= number)


def bounds_of(policy: Policy) -> tuple[str, ...]:
    """Return what the budget bounds; empty if it has no effect.

    "heads": the entries of some heads. "held": the entries of all heads, or the rows that propagate
    to deeper layers. "read": the entries that a row reads.
    """
    reaching = policy.propagation is not None and policy.propagation.caches == "chosen"
    bounds = {
        "heads": policy.allocator.effect == "some",
        "held": policy.bounded or reaching,
        "read": policy.sparse is not None and policy.sparse.effect != "none",
    }
    return tuple(name for name, bound in bounds.items() if bound)


def binds(policy: Policy) -> bool:
    """Whether the budget bounds what heads hold, all of them or some."""
    return not {"heads", "held"}.isdisjoint(bounds_of(policy))


def facts_of(policy: Policy, schedule: Schedule) -> Facts:
    """Return the facts of a record of a policy under a schedule."""
    changed, access = None, {"read": policy.sparse is not None, "stored": policy.rounds}
    if policy.default is not None:
        default, params = policy.default.params, policy.params
        changed = tuple(name for name, value in params.items() if default.get(name, ...) != value)
    return Facts(
        looks_ahead=policy.reads.future,
        bounds=bounds_of(policy),
        access=tuple(name for name, applies in access.items() if applies),
        changed=changed,
        own_schedule=schedule == policy.schedule,
    )


def record_document(record: Record) -> dict[str, Any]:
    """Return the stored fields of a record other than `evicted_at`, ready for JSON."""
    attributes = vars(record) | vars(record.schedule) | vars(record.facts)
    document = {name: attributes[name] for name in _STORED} | {"params": dict(record.params)}
    for name in ("selection", "response"):
        if (part := getattr(record, name)) is not None:
            document[name] = asdict(part)
    if record.reads is not None:
        names = ("page", "heads", "first", "summary", "keys", "weighted")
        document["reads"] = {name: getattr(record.reads, name) for name in names}
        document["reads"]["reader"] = Spec.of(record.reads.sparse)._asdict()
    if record.storage is not None:
        document["codec"] = Spec.of(record.storage)._asdict()
    return document


def record_of(
    document: Mapping[str, Any],
    evicted_at: NDArray[np.int32],
    bits: NDArray[np.uint8] | None = None,
) -> Record:
    """Return the record of a `record_document`; bits: the account of reads, if there is one."""
    stored = _tupled({name: document[name] for name in _STORED if name in document})
    for name, part in _PARTS.items():
        known = [x.name for x in fields(part) if x.name in stored]
        stored[name] = part(**{key: stored.pop(key) for key in known})
    if "selection" in document:
        stored["selection"] = Selection(**_tupled(document["selection"]))
    if "response" in document:
        stored["response"] = Response(**_tupled(document["response"]))
    if "reads" in document and bits is not None:
        account = _tupled(document["reads"])
        account["sparse"] = Spec(**account.pop("reader"))
        stored["reads"] = Reads(bits, **account)
        stored["reads"].check(evicted_at)
    if "codec" in document:
        stored["storage"] = Spec(**document["codec"])
    return Record(evicted_at=evicted_at, **stored)


def _tupled(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in document.items()}


_PARTS: dict[str, Any] = {"schedule": Schedule, "facts": Facts}
_APART = "evicted_at", "internals", "selection", "response", "reads", "storage", *_PARTS
_STORED = tuple(
    f.name for kind in (Record, *_PARTS.values()) for f in fields(kind) if f.name not in _APART
)
