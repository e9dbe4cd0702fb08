"""Expected Attention: keeps entries for future queries, assumed to be distributed like past ones.

Devoto, Jeblick and Jegou, "Expected Attention: KV Cache Compression by Estimating Attention from
Future Queries Distribution", arXiv 2510.00636. Queries before the rotary embedding are assumed to
be normally distributed, with the mean mu and the covariance S of the queries seen so far. At each
of the next `n_future` positions a query q becomes R q, with R the rotation of this position. With
R' the mean of R over these positions and s the scale of the logits, the expected weight of a key is
exp(x), where

    x = s (R' mu).k + s^2/2 k.(R' S R'^T) k,    a = softmax of x over the entries.

Each query head has its own a; the score takes their mean over the group: (a + epsilon) ||v||.
`covariance=False` leaves the second term of x out. kvsim rotates the key back by R'^T, once per KV
head, instead of rotating mu and S forward; the result is the same.

Deviations. Sinks are left out of mu, S and the softmax, and are protected. The paper does not
mention this; its code (kvpress) does it. At events in decoding, mu and S come from the queries of
the last `query_buffer` rows at their own positions, and the future begins after the event's row.
The default epsilon of 0.01 is that of most experiments of the paper; kvpress's class has 0. The
weights of a head sum to 1, so at most 1/epsilon entries can weigh more than epsilon; the others are
ranked almost only by ||v||. `value_norm="wo_v"` is the formula of the paper: the norm of the value
after the output projection, averaged over the group. "v" is the choice of the paper's experiments;
"none" ranks by a. By default the rotation is averaged over the positions; `rope="mixture"` averages
exp(x) over them instead, at n_future times the cost.

`expected_attention@kvpress` has epsilon 0. At events in decoding it counts positions from the start
of kvpress's query buffer (`origin="buffer"`). The buffer holds the rows since the last event
without the first `sink` of them, and the future begins at the number of rows that it holds. With
epsilon 0, weights underflow to 0 in heads with sharp attention. `log=True` ranks by the logarithm
of the score instead; AMS does so if epsilon is 0.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from kvsim.core.attention import Rope
from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Finite
from kvsim.core.pieces import Inputs, Run, Scorer
from kvsim.core.view import LOGIT_BYTES, View
from kvsim.errors import PolicyError


class ExpectedAttention(Scorer):
    """Expected attention of the next `n_future` queries, times the size of the value."""

    n_future: Annotated[int, AtLeast(1)] = 512
    sink: Annotated[int, AtLeast(0)] = 4
    epsilon: Annotated[float, AtLeast(0), Finite()] = 0.01
    covariance: bool = True
    value_norm: Literal["none", "v", "wo_v"] = "v"
    query_buffer: Annotated[int, AtLeast(2)] = 256
    rope: Literal["mean", "mixture"] = "mean"
    origin: Literal["next", "buffer"] = "next"
    log: bool = False

    @property
    def reads(self) -> Inputs:
        """Queries of the buffer, two of them after the sinks; for "wo_v" the output projection."""
        arrays = frozenset({"o_proj"} if self.value_norm == "wo_v" else ())
        return Inputs(last=self.query_buffer + 1, least=self.sink + 2, arrays=arrays)

    def check(self, run: Run) -> None:
        """Check that a buffer since the last event holds two samples after its first rows."""
        schedule, trace = run.schedule, run.trace
        rows = min(schedule.interval or 0, self.query_buffer + 1)
        decodes = schedule.rows(*trace.extent)[-1:] >= [trace.prompt_len]
        if self.origin == "buffer" and decodes and rows < self.sink + 2:
            raise PolicyError(
                f"expected_attention: interval is {schedule.interval}, query_buffer is "
                f"{self.query_buffer}, and the first {self.sink} rows (sink) since the last event "
                f"are left out; expected at least {self.sink + 2} rows"
            )

    def score(self, view: View) -> Tensor:
        """(mean over the group of a_j + epsilon) ||v_j||, or its logarithm; [L, H, n]."""
        start, stop, future = self._samples(view)
        _, mu, sigma = view.moments(range(start, stop), covariance=self.covariance)
        scale, count = view.formula.scale, self.n_future
        if self.rope == "mixture":
            logits = mixture_logits(view.keys, mu, sigma, scale, view.rope, future, count)
        else:  # the transpose of the mean rotation is the mean over the opposite positions
            back = view.rope.rotate_mean(view.keys, 1 - future - count, count)
            logits = expected_logits(back, mu, sigma, scale)
        scored = (view.live & (view.pos >= self.sink)).unsqueeze(2)  # at least the row's own entry
        logits.masked_fill_(~scored, -torch.inf)
        if self.log:
            return self._logarithm(view, logits)
        expected = logits.softmax(-1).mean(2)  # [L, H, n]
        if self.value_norm == "none":
            return expected
        return (expected + self.epsilon) * self._size(view)

    def _samples(self, view: View) -> tuple[int, int, int]:
        """Sample rows start..stop-1, and the first future position."""
        stop, future = view.row + 1, int(view.positions[-1]) + 1
        if view.is_prompt:
            return self.sink, stop, future
        if self.origin == "next":
            return max(self.sink, stop - self.query_buffer), stop, future
        buffered = min(view.setting.interval or stop, self.query_buffer + 1, stop)
        return stop - buffered + self.sink, stop, buffered

    def _logarithm(self, view: View, logits: Tensor) -> Tensor:
        mean = logits.double().log_softmax(-1).logsumexp(2) - math.log(logits.shape[2])
        if self.value_norm == "none":
            return mean
        epsilon = mean.new_tensor(self.epsilon).log()
        return mean.logaddexp(epsilon) + self._size(view).double().log()

    def _size(self, view: View) -> Tensor:
        if self.value_norm == "v":
            length: Tensor = torch.linalg.vector_norm(view.values, dim=-1)
            return length
        # ||W v||^2 = v.(W W^T) v, which needs no vector of the hidden size
        gram = (o_proj := view.array("o_proj")) @ o_proj.mT  # [L, H, G, d, d]
        return quadratic(view.values, gram).clamp_(min=0).sqrt_().mean(2)


def expected_logits(keys: Tensor, mu: Tensor, sigma: Tensor | None, scale: float) -> Tensor:
    """Log of the mean of exp(scale q.k) over normal q: scale mu.k + scale^2/2 k.sigma k.

    keys [L, H, n, d], in the same rotation as the queries; mu [L, H, G, d]; sigma [L, H, G, d, d],
    or None for no covariance. Returns [L, H, G, n].
    """
    out = (mu @ keys.mT) * scale
    return out if sigma is None else out.add_(quadratic(keys, sigma), alpha=scale**2 / 2)


def mixture_logits(
    keys: Tensor, mu: Tensor, sigma: Tensor | None, scale: float, rope: Rope, start: int, count: int
) -> Tensor:
    """Log of the mean over positions of the expected exponentials, in blocks of positions."""
    layers, heads, n, dim = keys.shape
    size = layers * heads * mu.shape[2] * n * dim * keys.element_size()
    total = keys.new_full((layers, heads, mu.shape[2], n), -torch.inf)
    for at in torch.arange(start, start + count).split(max(1, LOGIT_BYTES // size)):
        # the rotation by -p is the transpose of the rotation by p
        back = rope.rotate(keys.unsqueeze(2), -at.to(keys.device).unsqueeze(-1))
        each = expected_logits(back.flatten(2, 3), mu, sigma, scale)
        total = torch.logaddexp(total, each.unflatten(-1, (len(at), n)).logsumexp(-2))
    return total - math.log(count)


def quadratic(x: Tensor, matrix: Tensor) -> Tensor:
    """x_j . matrix x_j [L, H, G, n] for x [L, H, n, d], matrix [L, H, G, d, d], in blocks."""
    layers, heads, groups, dim = matrix.shape[:4]
    wide = matrix.transpose(2, 3).flatten(3)  # [L, H, d, G * d]
    step = max(1, LOGIT_BYTES // (layers * heads * groups * dim * x.element_size()))
    parts = []
    for part in x.split(step, dim=2):
        product = (part @ wide).unflatten(-1, (groups, dim))  # [L, H, block, G, d]
        parts.append(product.mul_(part.unsqueeze(3)).sum(-1).mT)
    return torch.cat(parts, dim=-1)
