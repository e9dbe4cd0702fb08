"""Which policies a running model can follow."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.core.policy import Policy
from kvsim.errors import PolicyError


def check_live(policy: Policy, *, paged: bool = False) -> None:
    """Raise PolicyError for a policy that a running model cannot follow.

    paged: with a cache in blocks (`kvsim.runner.paged`).
    """
    reasons = {
        "reads rows of the future": policy.scorer.reads.future,
        "keeps sets per query head, which a grouped cache cannot hold": policy.per_query_head,
        "chooses what it reads by rows of the trace": policy.reads.trace,
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    if reason is not None:
        raise PolicyError(
            f"{policy.name}: {reason}; a running model cannot follow it: replay it, or take another"
        )
    if paged and (policy.reader or policy.storage):
        raise PolicyError(
            f"{policy.name}: reads a part of the cache, or changes it, and attention through block "
            "tables reads all of it as it is; run it without --paged"
        )


def check_layers(policy: Policy, layers: Sequence[int], n_layers: int, *, states: bool) -> None:
    """Raise PolicyError for a policy of the whole model, where some layers evict, or pass a state.

    layers: those that evict. states: layers pass a state from row to row.
    """
    if policy.propagation is not None and states:
        raise PolicyError(
            f"{policy.name}: drops rows of the prompt, and layers of the model pass a state from "
            "row to row; expected attention alone; take a policy that cuts each layer by itself, "
            "such as snapkv"
        )
    together = policy.positions == "slot" or policy.propagation is not None
    if together and tuple(layers) != tuple(range(n_layers)):
        raise PolicyError(
            f"{policy.name}: rotates keys to their slot or drops rows for all layers, and layers "
            f"{list(layers)} of {n_layers} evict; expected all; replay single layers"
        )
