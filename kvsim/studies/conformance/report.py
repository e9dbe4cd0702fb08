"""`conform`: whether another implementation keeps the sets that a policy defines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsim.core.budgets import budgeted
from kvsim.core.policy import PolicyLike
from kvsim.engine.checks import DROPS, FUTURE, PART, QUERY_HEADS, ROUNDS, does, refuse
from kvsim.engine.layers import layers_to_replay
from kvsim.errors import DumpError
from kvsim.policies import as_policy
from kvsim.schema import first_of, numbered, plural
from kvsim.store.opening import TraceLike, as_trace
from kvsim.studies.conformance.accesses import Difference, accesses
from kvsim.studies.conformance.deviations import Deviation, explained
from kvsim.studies.conformance.dump import Dump, read_dump
from kvsim.studies.conformance.judging import DumpCase

#: Scores closer than this share of the layer's largest are tied: two libraries round differently.
TOLERANCE = 1e-5

_HIGHEST = Deviation("ties-high", "ties go to the higher position; by definition to the lower")
_RETURN = Deviation("evicted-return", "entries that have left are in the cache again")
_CHANCE = Deviation(
    "by-chance",
    "at the first event sets agree with the definition's as by chance: scores are all equal, as "
    "after a softmax over rows, or of other queries and keys (another head, layer or position)",
)
_KEEPS = Deviation("no-eviction", "at these events nothing leaves")
#: Deviations that follow from the differences; no definition is changed.
FOUND = _HIGHEST, _RETURN, _KEEPS, _CHANCE


#: So large a share of the entries that chance exchanges is as by chance.
_SHARE = 0.9


@dataclass(frozen=True)
class Conformance:
    """Outcome of the comparison of kept sets with a definition.

    compared: sets, of an event, a layer and a head each. differences: those that differ, ties
    included, by row, layer and head. deviations: each explains all that differ beyond ties.
    remarks: questions that the comparison leaves open. part: which layers of the trace are
    compared, if not all.
    """

    dump: str
    policy: str
    budget: int
    events: int
    compared: int
    differences: tuple[Difference, ...]
    deviations: tuple[Deviation, ...]
    remarks: tuple[str, ...]
    part: str = ""

    @property
    def equal(self) -> bool:
        """Whether all sets are equal, ties apart."""
        return not self.apart

    @property
    def apart(self) -> tuple[Difference, ...]:
        """Sets that differ beyond ties."""
        return tuple(each for each in self.differences if each.kind != "tie")

    @property
    def ties(self) -> tuple[Difference, ...]:
        """Sets that differ in entries tied at the cut alone."""
        return tuple(each for each in self.differences if each.kind == "tie")

    def __repr__(self) -> str:
        return f"Conformance({self.policy!r}, budget={self.budget}, {self.lines()[0]!r})"

    def lines(self) -> list[str]:
        """Return the report as text, a statement per line."""
        events = f" ({plural(self.events, 'event')})" * bool(self.events)
        sets = f"{self.compared} sets{events}"
        against = f"{self.policy} at budget {self.budget}"
        ties, apart = len(self.ties), self.apart
        if not apart:
            outside = f" outside ties: {ties} sets differ in entries tied at the cut" * bool(ties)
            text = [f"equal{outside}; {sets} compared with {against}{self.part}"]
        else:
            first = apart[0]
            text = [
                f"differs: {len(apart)} of {sets} are not those of {against}{self.part}",
                f"first after row {first.row}, layer {first.layer}, head {first.head}: "
                + _words(first),
            ]
            if ties:
                text.append(f"{ties} more differ in entries tied at the cut")
        text += [f"explained by {each.name}: {each.description}" for each in self.deviations]
        if apart and not self.deviations:
            text.append("no known deviation explains it, nor a pair of those that come near")
        return [*text, *self.remarks]

    def document(self) -> dict[str, Any]:
        """Return the report ready for JSON."""
        names = ("dump", "policy", "budget", "events", "compared", "part", "equal", "remarks")
        return {
            **{name: getattr(self, name) for name in names},
            "ties": len(self.ties),
            "deviations": [each._asdict() for each in self.deviations],
            "differences": [vars(each) for each in self.differences],
        }


def conform(
    dump: Dump | str | Path,
    policy: PolicyLike,
    budget: int | str | None = None,
    *,
    trace: TraceLike | None = None,
    interval: int | None = None,
    prefill: bool | None = None,
    tolerance: float = TOLERANCE,
    explain: bool = True,
) -> Conformance:
    """Compare the sets that an implementation kept with the sets that a policy defines.

    Each event is judged on the entries that the implementation holds by then, so that a difference
    does not cause the next.

    Args:
        dump: a Dump, or the path of a `.npz` file (docs/conform.md).
        policy: the definition.
        budget: as `kvsim.replay` takes it; by default the dump's.
        trace: q, k and v, if the dump has no arrays of its own.
        interval: rows between events; by default the dump's, or else the policy's.
        prefill: whether an event follows the prompt; by default as `interval`.
        tolerance: scores closer than this share of the layer's largest are tied.
        explain: look for deviations that explain the differences.

    Raises:
        DumpError: the dump is damaged, or lacks a budget or arrays.
        PolicyError: the policy drops rows, keeps sets per query head or reads later rows; otherwise
            as `kvsim.replay`.

    Example:
        >>> from kvsim.studies.conformance.dump import Dump
        >>> record = kvsim.replay("sample", "snapkv", 64, interval=32)
        >>> dump = Dump.of_record(record, kvsim.open_trace(kvsim.sample_trace()))
        >>> kvsim.conform(dump, "snapkv", 64, interval=32).equal
        True
    """
    dump = dump if isinstance(dump, Dump) else read_dump(dump)
    rule = as_policy(policy)
    source = dump.trace if trace is None else as_trace(trace)
    entries = dump.budget if budget is None else budget
    if entries is None and source is not None and not rule.bounded and not does(rule, PART):
        entries = source.n_pos
    if source is None or entries is None:
        lacking = "q, k and v: give the trace, --trace" if source is None else "budget: --budget N"
        raise DumpError(f"{dump.name} has no {lacking}")
    advice = "and a dump has a set for each KV head, by rows up to the event; take another policy"
    refuse(rule, DROPS, QUERY_HEADS, FUTURE, advice=advice)
    lines, dump = {*dump.layers}, dump.on(source)
    silent = [number for number in dump.layers if number not in lines]
    layers = tuple(source.layer_ids.index(number) for number in dump.layers)
    layers_to_replay(source, layers)
    rule, total = budgeted(rule, source, entries)
    schedule = (dump.schedule or rule.schedule).override(interval, prefill)
    has = {"pages that rows read": (dump.read, PART), "bits of entries": (dump.stored, ROUNDS)}
    for name, (table, rule_does) in has.items():
        if table is not None and not does(rule, rule_does):
            raise DumpError(f"{dump.name} has {name}; expected a policy that {rule_does}")
    if rule.bounded and not dump.kept:
        raise DumpError(f"{dump.name} has no kept sets; expected them, because {rule.name} evicts")
    events = tuple(schedule.rows(source.prompt_len, dump.last + 1, *source.extent[2:]))
    kept = dict(dump.kept)
    case = DumpCase(kept, layers, source, rule, total, schedule, events, tolerance, dump)
    differences = sorted(case.differences(), key=lambda each: (each.row, each.layer, each.head))
    rows = sorted({*case.events, *case.kept}) if kept else []
    later = (len(dump.layers) > 1 or dump.layers != (0,)) and len(dump.kept) > 1
    remarks = {
        f"no line of {numbered(silent)}: there nothing leaves or is rounded, and all pages are "
        "read; a dump of some layers says so: Dump(layers=[...])": bool(silent and differences),
        "pages have 1 entry in the dump; for more: Dump(page=N)": bool(differences)
        and (dump.read is not None and dump.page == 1),
        "states are those of the trace: exact in the first layer and at the first event; later the "
        "implementation continues from states that its evictions have changed": (
            trace is not None and later
        ),
        "entries that return are not followed: by definition eviction is final": any(
            each.returned for each in differences
        ),
    }
    return Conformance(
        dump=dump.name,
        policy=rule.name,
        budget=total,
        events=len(rows),
        compared=len(rows) * len(dump.layers) * source.n_heads + accesses(dump, rule, source),
        differences=tuple(differences),
        deviations=tuple(_deviations(case, differences)) if explain else (),
        remarks=tuple(remark for remark, holds in remarks.items() if holds),
        part=f"; only {numbered(sorted(dump.layers))} of {numbered(source.layer_ids)}"
        * ({*dump.layers} != {*source.layer_ids}),
    )


def _deviations(case: DumpCase, differences: Sequence[Difference]) -> list[Deviation]:
    kinds = {each.kind for each in differences}
    if kinds == {"tie"}:
        return [_HIGHEST] * all(each.highest for each in differences)
    if not kinds - {"tie"}:
        return []
    deviations = explained(case, differences)
    if "return" in kinds:
        deviations.append(_RETURN)
    elif kinds - {"tie"} == {"no eviction"} and not deviations:
        deviations.append(_KEEPS)
    elif not deviations and kinds <= {"tie", "choice"} and _by_chance(case, differences):
        deviations.append(_CHANCE)
    return deviations


def _by_chance(case: DumpCase, differences: Sequence[Difference]) -> bool:
    """Whether the first sets are as large as by definition, and agree with them as by chance."""
    row = min(case.kept, default=-1)
    first = [each for each in differences if each.row == row]
    if not case.kept or any(len(each.extra) != len(each.missing) for each in first):
        return False
    protected = case.policy.protection(case.budget).size(row + 1)
    n, sets = row + 1 - protected, case.kept[row][..., 0].size
    free = case.kept[row].sum() / sets - protected
    exchanged = sum(len(each.extra) for each in first) / sets
    return bool(free > 0 and exchanged > _SHARE * free * (1 - free / max(n, free)))


#: What the implementation does, and what it does not, with each kind of set.
_VERBS = {
    "entries": ("keeps", "evicts"),
    "pages": ("reads pages", "leaves pages"),
    "keys": ("rounds keys of", "leaves exact keys of"),
    "values": ("rounds values of", "leaves exact values of"),
}


def _words(difference: Difference) -> str:
    extra, missing = _VERBS[difference.of]
    sets = {extra: difference.extra, missing: difference.missing, "has": difference.returned}
    parts = [f"{verb} {first_of([*map(str, at)], 6)}" for verb, at in sets.items() if at]
    if difference.returned:
        parts[-1] += " again"
    if difference.kind == "no event":
        parts.append("by definition there is no event")
    elif difference.kind == "no eviction":
        parts.append("by definition entries leave")
    elif difference.bits is not None:
        theirs, ours = (f"{x:g}" for x in difference.bits)
        parts.append(f"{difference.of} have {theirs} bits; by definition {ours}")
    elif difference.gap is not None:
        parts.append(f"score gap {difference.gap:.2g} of the layer's largest, no tie")
    if difference.cut is not None:
        best, worst = difference.cut
        left, stays = missing.split()[0], extra.split()[0]
        parts.append(f"what it {left} scores up to {best:.5g}, what it {stays} {worst:.5g}")
    return "; ".join(parts)
