"""Invariants of every policy: a small function for each, and their registry.

An invariant replays a `Trial`, and variations of it, and raises `Broken` with what it objects to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kvsim.testing.invariants import access, independence, results
from kvsim.testing.invariants.trial import Trial

Invariant = Callable[[Trial], None]

#: Every invariant by name, in the order in which they are tried.
INVARIANTS: Mapping[str, Invariant] = {
    invariant.__name__: invariant
    for invariant in (
        independence.input_unchanged,
        results.exact_size,
        results.nothing_returns,
        results.protected_survive,
        results.full_budget,
        results.finite,
        results.declared_sign,
        results.tie_rule,
        independence.causality,
        independence.same_events,
        independence.unknown_question,
        independence.chunked_prompt,
        independence.later_questions,
        independence.absent_rows,
        independence.isolation,
        independence.rows_equal_events,
        independence.layer_blocks,
        independence.ragged,
        independence.head_permutation,
        results.round_trip,
        access.reads_what_is_resident,
        access.reading_is_causal,
        access.reading_everything,
        access.quantizer_is_a_function,
        access.heads_merge_apart,
        independence.naive_replay,
    )
}

#: What policies of kvsim are exempt from by definition; a name stands for any part of a name.
EXEMPT: Mapping[str, Collection[str]] = {
    "random": {"head_permutation"},  # the head's number is part of the draw
    "tova": {"ragged"},  # one ranking for all heads is defined while they hold the same entries
    "rpc": {"ragged"},  # the same
    "union": {"ragged"},  # one set for all heads is defined while they hold the same entries
    "d2o@release": {"ragged", "heads_merge_apart"},  # its heads share a threshold
    "openvino": {"ragged"},  # the same
    "h2o@sparse_vllm": {"ragged"},  # the same
    "snapkv@sparse_vllm": {"ragged"},  # the same
    "rkv@sparse_vllm": {"ragged"},  # the same
    "lacache": {"ragged"},  # it starts over where the even budget says so
    "criticalkv": {"ragged"},  # its first stage is a share of the even budget
    # a fixed number of rows reaches deeper layers even if the prompt just fills the budget
    "fastkv": {"full_budget"},
}
