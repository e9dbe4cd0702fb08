"""Double Sparsity (Yang et al. 2024, arXiv 2408.07092): reads entries by a few key channels."""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor
from kvsim.core.parameters import Above, AtLeast, AtMost
from kvsim.core.pieces import Inputs, Run
from kvsim.core.reading import Heads, Pages, SparseAttention
from kvsim.errors import PolicyError
from kvsim.policies.calibration import Sourced

#: Bits of the smallest number of a label and of the distance between two steps.
_SCALES = 32


class DoubleSparsity(Sourced, SparseAttention):
    """Each row reads the entries with the largest products over a few channels of their keys.

    A few channels make most of a logit, nearly the same ones for all texts. A calibration text
    determines them (the paper's offline calibration): the channels with the largest mean |q_c k_c|
    of a token's own query and key. Next to each key a label is stored: these channels, rounded to a
    few bits. A row multiplies the labels with its query's and reads the entries with the largest
    products (Algorithm 1).

    `calibration`: the rows from which channels are chosen. `channels`: the share of a key's
    channels that its label has. `bits`: bits of each number of a label; 16 leaves the key's numbers
    unrounded.
    `share`: the part of the budget that a row reads.

    The defaults are those of the authors' first release (evaluation/perplexity_eval.py of August
    2024: group_factor 4, q_bits 4, channel "qk"; the first two layers read everything). Since March
    2025 they are 2, 2 and "q". The code rounds a label, and the query's label, to steps between its
    smallest and its largest number. Deviation: channels are chosen for each KV head, from all query
    heads of its group, so that a key has one label; the code chooses them for each query head.
    """

    channels: Annotated[float, Above(0), AtMost(1)] = 0.25
    bits: Annotated[int, AtLeast(1), AtMost(16)] = 4
    share: Annotated[float, Above(0), AtMost(1)] = 1.0
    heads: Heads = "query"
    dense_layers: Annotated[int, AtLeast(0)] = 2

    @property
    def reads(self) -> Inputs:
        """Rows of the trace, unless the calibration rows come from another trace."""
        return Inputs(trace=self.source.trace is None, future=self.source == "oracle")

    def check(self, run: Run) -> None:
        """Check that calibration rows come from the same model, before the first row that reads."""
        super().check(run)
        trace = run.trace
        if (self.source.rows or 0) > trace.prompt_len:
            raise PolicyError(
                f"{self.label}: calibration is {self.source}, and the prompt has "
                f"{trace.prompt_len} tokens; expected no more rows than the prompt has"
            )

    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """Products of labels [H, G, w, n]."""
        at = pages.once("heavy", lambda: self._heavy(pages), of_layer=True)
        labels = pages.once("labels", lambda: self._label(pages.keys.flatten(1, 2), at))
        return self._label(queries, at) @ labels.unsqueeze(1).mT

    def _label(self, x: Tensor, at: Tensor) -> Tensor:
        """The channels at [H, c] of x [H, ..., d], rounded."""
        index = at.view(len(at), *[1] * (x.ndim - 2), -1).expand(*x.shape[:-1], -1)
        label = x.gather(-1, index)
        if self.bits == 16:
            return label
        low, high = label.aminmax(dim=-1, keepdim=True)
        step = (high - low) / (2**self.bits - 1)
        step = step.where(step > 0, 1.0)
        out: Tensor = ((label - low) / step).round() * step + low
        return out

    def _heavy(self, pages: Pages) -> Tensor:
        """The channels of each head's labels [H, c]."""
        trace, rows = self.source.trace or pages.trace, slice(0, self.source.rows)
        only = slice(pages.layer, pages.layer + 1)
        q, k = (trace.read(name, only, rows)[0].to(pages.keys) for name in ("q", "k"))
        size = (q.unflatten(0, (len(k), -1)) * k.unsqueeze(1)).abs().mean((1, 2))  # [H, d]
        heavy: Tensor = size.argsort(dim=-1, descending=True, stable=True)
        return heavy[:, : self._count(k.shape[-1])]

    def _count(self, dim: int) -> int:
        return max(1, int(self.channels * dim))

    def summary_bits(self, dim: int) -> tuple[float, float]:
        """A label, with its scale, all of which a row reads."""
        scales = _SCALES if self.bits < 16 else 0
        size = float(self._count(dim) * self.bits + scales)
        return size, size
