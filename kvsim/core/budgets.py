"""User budgets: entries, shares of the final or the current length, bytes."""

from __future__ import annotations

import re
from dataclasses import replace

from kvsim.core.arguments import resolve_budget
from kvsim.core.policy import Policy
from kvsim.core.trace import Trace
from kvsim.errors import BudgetError
from kvsim.schema import size_in_bytes

#: Bytes of a number by the dtypes that a budget in bytes may state.
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}

SO_FAR = "so-far"

#: A budget of a replay or a live run.
EXPECTED = f"entries (128), a share (25%, 25%{SO_FAR}) or bytes (64MiB, 64MiB@float32)"


def budget_at(policy: Policy, tokens: int, budget: int) -> int:
    """Return a policy's budget at an event after n tokens."""
    return budget if policy.so_far is None else max(1, int(tokens * policy.so_far + 1e-9))


def sharing(trace: Trace) -> int:
    """Number of layers with their own entries and no window, which share a budget; at least 1."""
    return max(1, len({*trace.owners} - {*trace.windowed}))


def budgeted(policy: Policy, trace: Trace, budget: int | str) -> tuple[Policy, int]:
    """Return the entries per KV head of a budget on a trace, and the policy under that budget.

    Args:
        policy: of a share of the tokens so far it gets `Policy.so_far`.
        trace: the layers that are not windowed share a budget in bytes.
        budget: entries; ``25%`` of the final length; ``25%so-far``, of which the entries are those
            at the final length; or bytes of all layers and heads, such as ``64MiB``, with 16 bits
            for a number as in `bytes_held`, or those of ``64MiB@float32``.

    Raises:
        BudgetError: anything else, or fewer bytes than an entry of each head has.
        PolicyError: a policy that has no rule for a budget that grows.
    """
    text = str(budget).strip()
    if text.endswith(f"%{SO_FAR}"):
        share = text.removesuffix(SO_FAR)
        entries = resolve_budget(share, trace.n_pos)
        return replace(policy, so_far=float(share[:-1]) / 100), entries
    size, _, dtype = text.partition("@")
    count, number = size_in_bytes(size), _BYTES.get(dtype or "float16")
    if not re.fullmatch(r".*[bB](@\w+)?", text) or count is None or number is None:
        return policy, resolve_budget(budget, trace.n_pos, EXPECTED)
    trace = trace.part()
    layers = sharing(trace)
    heads = trace.n_qheads if policy.per_query_head else trace.n_heads
    entry = layers * heads * trace.entry_size * number
    if count < entry:
        raise BudgetError(
            f"budget is {text}, and an entry of each head takes {entry} bytes in "
            f"{layers} layers; expected at least as many"
        )
    return policy, count // entry
