# ruff: noqa: INP001 - beside the script that it belongs to
"""Kept sets after the prompt whose layers lose least: search by exchange, and a proven bound.

After one event, a row r of the response sees what a head kept of the prompt, and the response so
far. The output of query head q moves by

    z_q(r) = sum_j a_qr(j) W_q (v_j - o_qr) / sum_j a_qr(j),  j over what the row sees

with the full cache's attention a and output o, and the head's output projection W_q. The layer's
error is the square of sum_q z_q(r), mean over rows: `layer_error` squared. `searched` lowers it.

What can be proven? Keep the same share of each entry, and only the response weighs too much:
relaxed to numbers from 0 to 1 the problem has errors far below those of any set, so a bound needs
that they are 0 or 1. And heads may cancel each other, with denominators of their own. So `bound` is
of each query head alone, sum_q |z_q|^2, whose denominator is at most 1 less the smallest masses
that can be dropped. As the sum over all entries is 0, z is that over the dropped ones x, and the
error is quadratic, x^T Q x; x_j^2 = x_j moves any diagonal D from Q to a linear term. With Q - D
positive semidefinite the minimum over 0 <= x <= 1 is convex, and the gap of Frank-Wolfe's algorithm
proves how far its last point is from it. D is the best for weights x - x^2 (Newton steps; Shor's
relaxation).

Shape letters: H KV heads, G query heads of a group, R rows of the response, P tokens of the prompt,
d dimension of a head, D of the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvsim.core.trace import Trace

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: Kept entries that are tried at each exchange before a head counts as done.
TRIES = 4


@dataclass(frozen=True, eq=False)
class Heads:
    """A layer, in float64.

    Attention to the prompt a [H, G, R, P] and, in all, to the response [H, G, R]; values v
    [H, P, d] and what the response adds to the output [H, G, R, d]; outputs o [H, G, R, d],
    projections w [H, G, d, D].
    """

    a: Floats
    later: Floats
    v: Floats
    added: Floats
    o: Floats
    w: Floats

    @classmethod
    def of(cls, trace: Trace, layer: int) -> Heads:
        """Read a layer of a trace that has output projections."""
        heads, prompt, only = trace.n_heads, trace.prompt_len, slice(layer, layer + 1)
        every = (
            trace.attention(layer, range(prompt, trace.n_pos)).double().unflatten(0, (heads, -1))
        )
        v = trace.read("v", only)[0].double()
        o = trace.full(only, slice(prompt, None))[0][0].double().unflatten(0, (heads, -1))
        w = trace.read("o_proj", only)[0].double().unflatten(0, (heads, -1))
        later = every[..., prompt:]
        added = later @ v[:, None, prompt:]
        each = (every[..., :prompt], later.sum(-1), v[:, :prompt], added, o, w)
        return cls(*(x.numpy() for x in each))

    def sums(self, head: int, kept: Bools) -> tuple[Floats, Floats]:
        """Sums over what rows see: a (v - o), [G, R, d], and a, [G, R]; kept [P]."""
        a, o = self.a[head][..., kept], self.o[head]
        mass = self.later[head] + a.sum(-1)
        return self.added[head] + a @ self.v[head][kept] - mass[..., None] * o, mass

    @cached_property
    def products(self) -> Floats:
        """Products of W_g (v_j - o_g) and W_f (v_j - o_f), [H, G, G, R, P]."""
        w2 = np.einsum("hgde,hfce->hgfdc", self.w, self.w)
        uu = np.einsum("hpd,hgfdc,hpc->hgfp", self.v, w2, self.v, optimize=True)
        ou = np.einsum("hgrd,hgfdc,hpc->hgfrp", self.o, w2, self.v, optimize=True)
        oo = np.einsum("hgrd,hgfdc,hfrc->hgfr", self.o, w2, self.o, optimize=True)
        return uu[:, :, :, None] - ou - ou.swapaxes(1, 2) + oo[..., None]

    def moved(self, head: int, kept: Bools) -> Floats:
        """z of the query heads of a KV head, [G, R, D]; kept [P]."""
        y, mass = self.sums(head, kept)
        return (y / mass[..., None]) @ self.w[head]

    def error(self, kept: Bools) -> float:
        """The error of the layer; kept [H, P]."""
        z = sum(self.moved(head, x).sum(0) for head, x in enumerate(kept))
        return float(np.square(z).sum(-1).mean())

    def alone(self, head: int, kept: Bools) -> float:
        """The sum of the errors of the query heads of a KV head, each alone; kept [P]."""
        return float(np.square(self.moved(head, kept)).sum(-1).sum(0).mean())

    def after(self, head: int, kept: Bools, rest: Floats | None, sign: int) -> Floats:
        """The error after each entry [P] is kept too (sign 1), or dropped (-1).

        rest: what the other KV heads move [R, D], or None for the sum of query heads alone.
        """
        a, v, o, w = self.a[head], self.v[head], self.o[head], self.w[head]
        y, mass = self.sums(head, kept)
        s = 1 / (mass[..., None] + sign * a).clip(1e-12)  # [G, R, P]
        w2 = np.einsum("gde,fce->gfdc", w, w)
        total = np.zeros(a.shape[1:])
        for g in range(len(a)):
            for f in range(len(a)) if rest is not None else [g]:
                if f < g:
                    continue
                t, back = y[g] @ w2[g, f], y[f] @ w2[f, g]
                cross = (t * y[f]).sum(-1)[:, None]
                one = t @ v.T - (t * o[f]).sum(-1)[:, None]
                two = back @ v.T - (back * o[g]).sum(-1)[:, None]
                part = cross + sign * (a[f] * one + a[g] * two)
                part += a[g] * a[f] * self.products[head, g, f]
                total += part * s[g] * s[f] * (1 if f == g else 2)
            if rest is not None:
                e = rest @ w[g].T
                part = (e * y[g]).sum(-1)[:, None]
                part = part + sign * a[g] * (e @ v.T - (e * o[g]).sum(-1)[:, None])
                total += 2 * s[g] * part
        if rest is not None:
            total += np.square(rest).sum(-1)[:, None]
        return total.mean(0)

    def exchanged(self, head: int, kept: Bools, rest: Floats | None, most: int = 400) -> Bools:
        """Exchange a kept entry for another one as long as that lowers the error; kept [P]."""

        def error(kept: Bools) -> float:  # exact, where `after` has small differences of large sums
            moved = self.moved(head, kept)
            every = moved if rest is None else (moved.sum(0) + rest)[None]
            return float(np.square(every).sum(-1).sum(0).mean())

        kept, now = kept.copy(), error(kept)
        if kept.all():
            return kept
        for _ in range(most):
            leave = np.where(kept, self.after(head, kept, rest, -1), np.inf)
            for entry in np.argsort(leave)[: min(TRIES, kept.sum())]:
                changed = kept.copy()
                changed[entry] = False
                back = np.where(changed, np.inf, self.after(head, changed, rest, 1))
                changed[back.argmin()] = True
                if (then := error(changed)) < now * (1 - 1e-9):
                    kept, now = changed, then
                    break
            else:
                break
        return kept


def searched(layer: Heads, starts: Sequence[Bools], rounds: int = 3) -> Bools:
    """The best of some kept sets [H, P] of a layer, improved by exchange head by head."""
    kept = min(starts, key=layer.error).copy()
    for _ in range(rounds):
        before = layer.error(kept)
        for head in range(len(kept)):
            others = [layer.moved(h, x).sum(0) for h, x in enumerate(kept) if h != head]
            rest = sum(others, np.zeros((layer.a.shape[2], layer.w.shape[-1])))
            kept[head] = layer.exchanged(head, kept[head], rest)
        if layer.error(kept) > 0.999 * before:
            break
    return kept


def searched_alone(layer: Heads, head: int, starts: Sequence[Bools]) -> Bools:
    """The same [P] of the query heads of a KV head, each alone."""
    start = min(starts, key=lambda x: layer.alone(head, x))
    return layer.exchanged(head, start, None)


def bound(layer: Heads, head: int, places: int, rounds: int = 4) -> float:
    """What no `places` kept entries go below: errors of query heads of a KV head, each alone."""
    a, rows, size = layer.a[head], layer.a.shape[2], layer.a.shape[3]
    count = size - places
    if count <= 0:
        return 0.0
    most = 1 - np.sort(a, -1)[..., :count].sum(-1)  # denominators, at most
    q = np.zeros((size, size))
    for g, w in enumerate(layer.w[head]):
        b = a[g][..., None] * (layer.v[head] - layer.o[head, g][:, None])  # [R, P, d]
        b = (b / most[g][:, None, None]) @ np.linalg.cholesky(w @ w.T + 1e-12 * np.eye(len(w)))
        flat = b.transpose(0, 2, 1).reshape(-1, size)
        q += flat.T @ flat / rows
    share = count / size
    scale = q.diagonal().mean()
    # the number that is dropped is known: its square may be added
    curved = q / scale + np.ones_like(q)
    best, weight = 0.0, np.full(size, share * (1 - share))
    for _ in range(rounds):
        shift = _shift(curved, weight)
        x, low = _least(curved - np.diag(shift), shift, count)
        best = max(best, (low - count**2) * scale)
        weight = (x * (1 - x)).clip(1e-3)
    return best


def _shift(q: Floats, weight: Floats) -> Floats:
    """The diagonal D of most weight with q - D positive semidefinite, nearly; [P]."""
    size = len(q)
    eigen = np.linalg.eigvalsh(q)[0]
    d = np.full(size, eigen - 1e-3 * abs(eigen) - 1e-6)
    barrier = weight.sum() * q.diagonal().mean() / size
    for _ in range(24):
        for _ in range(3):
            inverse = np.linalg.inv(q - np.diag(d))
            gradient = weight - barrier * inverse.diagonal()
            step = np.linalg.solve(barrier * inverse**2 + 1e-12 * np.eye(size), gradient)
            length = 1.0
            while length > 1e-6:
                try:
                    np.linalg.cholesky(q - np.diag(d + length * step))
                    break
                except np.linalg.LinAlgError:
                    length /= 2
            else:
                break
            d = d + 0.9 * length * step
        barrier /= 2
    return d - max(0.0, -np.linalg.eigvalsh(q - np.diag(d))[0]) - 1e-9


def _least(q: Floats, linear: Floats, count: int, steps: int = 400) -> tuple[Floats, float]:
    """A point near the minimum of x^T q x + linear x over 0 <= x <= 1, sum count; a lower bound."""
    x, low = np.full(len(q), count / len(q)), -np.inf
    for _ in range(steps):
        qx = q @ x
        gradient = 2 * qx + linear
        corner = np.zeros(len(q))
        corner[np.argpartition(gradient, count - 1)[:count]] = 1
        way = corner - x
        gap = -gradient @ way
        low = max(low, x @ qx + linear @ x - gap)
        curve = way @ q @ way
        x = x + way * (1.0 if curve <= 0 else min(1.0, gap / (2 * curve)))
    return x, low
