"""FLOPs of scoring: those that the pieces of a policy give, added up (`kvsim.core.flops`).

A piece that gives none, such as many of a user's own, is unknown; nobody guesses what it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvsim.core.flops import Event, Flops
from kvsim.core.pieces import Piece
from kvsim.core.policy import Policy
from kvsim.cost.model import Model
from kvsim.errors import PolicyError


def event_pieces(policy: Policy) -> list[Piece]:
    """The pieces that compute at an event; scorers from the outside in."""
    return [*policy.scorers, policy.allocator, policy.layer_budgets]


def unknown(policy: Policy, event: Event) -> list[str]:
    """Names of the pieces that give no FLOPs of such an event."""
    pieces = event_pieces(policy)
    if policy.propagation is not None:
        pieces.append(policy.propagation)
    return [type(piece).__name__ for piece in pieces if piece.flops(event) is None]


def event_flops(policy: Policy, event: Event) -> Flops:
    """FLOPs of one event in one layer. Raises PolicyError where those of a piece are unknown."""
    if policy.per_query_head:
        event = replace(event, model=event.model.per_query_head())
    return _total(policy, event_pieces(policy), event)


def propagation_flops(
    policy: Policy, model: Model, *, prompt: int, budget: int, rows: Sequence[int], layer: int
) -> Flops:
    """FLOPs of choosing rows during a prefill, over all layers; as `event_flops`.

    rows: of each layer in the first pass. layer: the selection layer, the last one for none.
    """
    piece = policy.propagation
    if piece is None or piece.keeps_whole(budget, prompt):
        return Flops()
    events = (
        Event(model, rows[at], prompt, prompt, budget, prompt=True)
        for at in piece.scored_layers(rows, layer)
    )
    return sum((_total(policy, [piece], event) for event in events), Flops())


def _total(policy: Policy, pieces: Iterable[Piece], event: Event) -> Flops:
    total = Flops()
    for piece in pieces:
        flops = piece.flops(event)
        if flops is None:
            raise PolicyError(
                f"{policy.name}: the FLOPs of {type(piece).__name__} are unknown; expected a "
                "method flops(event) that returns kvsim.core.flops.Flops"
            )
        total += flops
    return total
