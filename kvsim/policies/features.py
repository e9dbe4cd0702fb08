"""Features of an entry in a View, which a learned scorer reads.

Features come in groups, so that what each kind of information is worth can be measured by leaving
it out. All depend on the head alone, on nothing that is evicted and, but for `future`, on no later
row.

* position: log(1 + age), age / rows so far, log(1 + position), whether one of the first four
* attention: logarithms of the mean attention by those of the last 1, 8, 32 and 128 rows that see
  the entry, of the largest weight among them, and of the mean over its lifetime
* keys: logarithm of the norm beside the head's mean of that, cosine with the head's mean direction,
  logit of the mean query of the last 32 rows beside the head's mean of that
* values: norm and cosine, as of keys
* projections: products of the key and of the value with one vector each, which was learned for the
  layer and the head, less the head's mean of that
* future: the logarithm of the mean attention by the next `ahead` rows with the full cache; it looks
  ahead, and is there to measure what that is worth
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvsim.core.lazy import Tensor, torch
from kvsim.core.view import View

#: Rows whose attention is read, and the parts of them that have a mean of their own.
WINDOW = 128
PARTS = (1, 8, 32, 128)

# Rows whose mean query stands for the next one.
_QUERIES = 32
# First positions, to which many models attend whatever they hold.
_FIRST = 4
# Added to attention and norms before logarithms: less is noise.
_LEAST = 1e-6


def position(view: View) -> list[Tensor]:
    """Age and place in the text; 4 x [L, H, n]."""
    age = (view.row + 1 - view.pos).to(view.keys.dtype)
    first = view.pos < _FIRST
    return [age.log1p(), age / (view.row + 1), view.pos.clamp(min=0).log1p(), first.to(age.dtype)]


def attention(view: View, total: Tensor) -> list[Tensor]:
    """Attention received; total [L, H, n] that of a lifetime, summed over the group; 6 x [L, H, n].

    A mean is over the rows that see the entry.
    """
    weights = view.attn(WINDOW)  # [L, H, G, w, n]
    group = weights.shape[2]
    age = view.row + 1 - view.pos
    recent = weights.sum(2)  # [L, H, w, n]
    means = [recent[:, :, -part:].sum(2) / (group * age.clamp(min=1, max=part)) for part in PARTS]
    largest = weights.amax((2, 3))
    lifetime = total / (group * age.clamp(min=1))
    return [(x + _LEAST).log() for x in (*means, largest, lifetime)]


def keys(view: View) -> list[Tensor]:
    """Norm, direction, and the logit of the mean query; 3 x [L, H, n]."""
    query = view.queries(_QUERIES).mean((2, 3))  # [L, H, d]
    logit = (view.keys @ query.unsqueeze(-1)).squeeze(-1) * view.scale
    return [*_shape(view, view.keys), _centred(view, logit)]


def values(view: View) -> list[Tensor]:
    """Norm and direction; 2 x [L, H, n]."""
    return _shape(view, view.values)


def projections(view: View, vectors: Tensor) -> list[Tensor]:
    """Products with vectors [layer, head, 2, d] of the model's heads; 2 x [L, H, n]."""
    of_key, of_value = vectors[view.layers.cpu()].to(view.keys).unbind(2)
    pairs = (view.keys, of_key), (view.values, of_value)
    return [_centred(view, (x @ vector.unsqueeze(-1)).squeeze(-1)) for x, vector in pairs]


def future(view: View, ahead: int) -> list[Tensor]:
    """Mean attention by the next `ahead` rows with the full cache; [L, H, n]. It looks ahead."""
    start, stop = view.row + 1, min(view.row + 1 + ahead, view.n_rows)
    if start == stop:
        return [view.keys.new_full(view.keys.shape[:3], _LEAST).log()]
    q = view.span(start, stop).flatten(2, 3)  # [L, H, G * w, d]
    _, lse = (x.flatten(2, 3) for x in view.full(start, stop))
    z = view.formula.capped((q @ view.keys.mT).mul_(view.scale))
    mean = z.sub_(lse.unsqueeze(-1)).exp_().clamp_(max=1.0).mean(2)
    return [(mean + _LEAST).log()]


#: Number of features of each group.
SIZES = {
    "position": 4,
    "attention": 2 + len(PARTS),
    "keys": 3,
    "values": 2,
    "projections": 2,
    "future": 1,
}
_PLAIN: dict[str, Callable[[View], list[Tensor]]] = {
    "position": position,
    "keys": keys,
    "values": values,
}


def features(
    view: View, groups: Sequence[str], total: Tensor, ahead: int, vectors: Tensor | None = None
) -> Tensor:
    """The features of the groups, in their order; [L, H, n, F], 0 on pads.

    total: of `attention`. ahead: of `future`. vectors: of `projections`.
    """
    columns: list[Tensor] = []
    for group in groups:
        if group == "attention":
            columns += attention(view, total)
        elif group == "future":
            columns += future(view, ahead)
        elif vectors is not None and group == "projections":
            columns += projections(view, vectors)
        else:
            columns += _PLAIN[group](view)
    return torch.stack(columns, dim=-1).masked_fill_(~view.live.unsqueeze(-1), 0.0)


def _shape(view: View, x: Tensor) -> list[Tensor]:
    """Norm and direction of keys or values x [L, H, n, d] beside those of their head."""
    unit = torch.nn.functional.normalize(x, dim=-1, eps=_LEAST)
    direction = torch.nn.functional.normalize(unit.sum(2), dim=-1, eps=_LEAST)
    cosine = (unit @ direction.unsqueeze(-1)).squeeze(-1)
    return [_centred(view, (x.norm(dim=-1) + _LEAST).log()), cosine]


def _centred(view: View, x: Tensor) -> Tensor:
    """x [L, H, n] less its mean over the live entries of the head."""
    live = x.masked_fill(~view.live, 0.0)
    return live - (live.sum(-1) / view.count.clamp(min=1)).unsqueeze(-1)
