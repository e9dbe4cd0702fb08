"""What policies do that not every run can follow: one table, and one refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvsim.core.policy import Policy
from kvsim.errors import PolicyError

_DOES: dict[str, Callable[[Policy], object]] = {
    "reads rows of the future": lambda policy: policy.scorer.reads.future,
    "chooses what it reads by rows of the trace": lambda policy: policy.reads.trace,
    "keeps sets per query head": lambda policy: policy.per_query_head,
    "rotates keys to their slots": lambda policy: policy.positions == "slot",
    "drops rows of the prompt": lambda policy: policy.propagation is not None,
    "reads a part of the cache": lambda policy: policy.sparse is not None,
    "rounds entries": lambda policy: policy.rounds,
    "merges entries": lambda policy: policy.storage is not None and not policy.rounds,
    "reads the context again": lambda policy: policy.reads.context_again,
}
FUTURE, TRACE, QUERY_HEADS, SLOTS, DROPS, PART, ROUNDS, MERGES, REPEATS = _DOES


def does(policy: Policy, *which: str) -> str:
    """Return the first of these that a policy does, in words; empty for none."""
    return next((each for each in which if _DOES[each](policy)), "")


def refuse(policy: Policy, *which: str, advice: str) -> None:
    """Raise PolicyError for a policy that does one of these. advice: why not, and what to do."""
    if words := does(policy, *which):
        raise PolicyError(f"{policy.name}: {words}, {advice}")


def check_live(policy: Policy, *, paged: bool = False) -> None:
    """Raise PolicyError for a policy that a running model cannot follow.

    paged: with a cache in blocks (`kvsim.runner.paged`).
    """
    advice = "which a running model cannot follow; replay it, or take another"
    refuse(policy, FUTURE, QUERY_HEADS, TRACE, advice=advice)
    if paged:
        advice = "and block tables are read whole, as they are; run it without --paged"
        refuse(policy, PART, ROUNDS, MERGES, advice=advice)


def check_layers(policy: Policy, layers: Sequence[int], n_layers: int, *, states: bool) -> None:
    """Raise PolicyError for a policy of the whole model, where some layers evict, or pass a state.

    layers: those that evict. states: layers pass a state from row to row.
    """
    if states:
        advice = (
            "and layers of the model pass a state from row to row; take a policy that cuts each "
            "layer by itself, such as snapkv"
        )
        refuse(policy, DROPS, advice=advice)
    if tuple(layers) != tuple(range(n_layers)):
        advice = f"and layers {list(layers)} of {n_layers} evict; expected all: replay these alone"
        refuse(policy, SLOTS, DROPS, advice=advice)
