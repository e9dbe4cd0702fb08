"""G-KV: a score that accumulates attention of earlier windows.

Liao et al., "G-KV: Decoding-Time KV Cache Eviction with Global Attention", arXiv 2512.00504. The
local score S of an entry is its attention from the `window` most recent rows: in each row the
largest of the group, then the mean over the rows. Each head divides S by its maximum and combines
the quotient with the global score F that the entry carries from earlier events (`fusion`). A new
entry has no F and starts with S / max S:

    max:  F = max(decay F, S / max S)          sum:  F = decay F + S / max S
    mean: F = decay F + (1 - decay) S / max S

`gkv` ranks by mix_lambda F - (1 - mix_lambda) R'. R' is the redundancy of a key: the softmax of the
mean cosine similarity of each key to the others, divided by its maximum. `global_max`,
`global_mean` and `global_sum` rank only by F, each with its `fusion`. The wrapper `global+SCORER`
takes the scores of any scorer as S. Two baselines of the paper rank by the local score: pooled in
`snapkv@gkv` (SnapKV, arXiv 2404.14469, extended to decoding), not pooled in `morphkv@gkv` (MorphKV,
arXiv 2503.00979).

Deviations. As in the released code, the maxima are over the candidates (the entries before the
window), and in each row of the similarity matrix the last value above `threshold` is set to 0, so
the last of several similar keys counts as less redundant (kvsim/policies/redundancy.py). The code
has two versions of this: the kernel that it runs (`cosine="kernel"`), and one from R-KV
(`cosine="raw"`), which sets the first value to 0 in a row where no value is above the threshold.
Scores are divided by their maximum at the first event, too. `mix_lambda` is 0.7 by default and in
`gkv@r1_qwen_7b` (the paper's best value for R1-Distill-Qwen-7B), 0.9 in `gkv@r1_llama_8b`
(R1-Distill-Llama-8B), and 0.5 in `gkv@release` (the released scripts).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Annotated, ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Between, Odd
from kvsim.core.pieces import Scorer, Scores, Wrapper, protected_by
from kvsim.core.view import View
from kvsim.errors import PolicyError, ScoreError
from kvsim.policies.redundancy import mean_similarity
from kvsim.policies.window import Pooling, Windowed, before_window, smooth
from kvsim.schema import GUIDE

Fusion = Literal["max", "mean", "sum"]


def local_score(view: View, window: int) -> Tensor:
    """S_j = mean over the window of the group's largest a_r(j), 0 off candidates; [L, H, n]."""
    vote = view.attn(window, group="max").mean(2)
    return vote.masked_fill_(~before_window(view, window), 0.0)


def normalise(scores: Tensor, among: Tensor, *, signed: bool = False) -> Tensor:
    """S / max S over the entries marked in `among`, or (S - min S) / (max S - min S) where signed.

    0 elsewhere, and where the denominator is 0.
    """
    size = scores.masked_fill(~among, -torch.inf).amax(-1, keepdim=True)
    if signed:
        least = scores.masked_fill(~among, torch.inf).amin(-1, keepdim=True)
        scores, size = scores - least, size - least
    return (scores / size).where(among & (size > 0), 0.0)


def fuse(old: Tensor, new: Tensor, fusion: Fusion, decay: float) -> Tensor:
    """F from the history `old`, NaN for none, and the normalised score `new`."""
    kept = decay * old
    if fusion == "max":
        both = torch.maximum(kept, new)
    else:
        both = kept + (new if fusion == "sum" else (1 - decay) * new)
    return new.where(old.isnan(), both)


def check_sign(name: str, scorer: Scorer, scores: Tensor, among: Tensor) -> None:
    """Raise ScoreError where a scorer inside `name` returns undeclared negative scores."""
    if scorer.scale == "positive" and bool(((scores < 0) & among).any()):
        raise ScoreError(
            f"{name}: {type(scorer).__name__} gives a negative score and does not say that it can; "
            f'expected `scale = "signed"`, see {GUIDE}'
        )


class Local(Windowed):
    """The local score, with optional pooling over neighbouring entries."""

    window: Annotated[int, AtLeast(1)] = 16
    pool: Pooling = None
    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 5

    def score(self, view: View) -> Tensor:
        """pool_j(S_j); [L, H, n]."""
        score = smooth(local_score(view, self.window), self.pool, self.pool_kernel)
        return score.where(before_window(view, self.window), 0.0)


class GKV(Windowed):
    """The global score of window attention, less the redundancy of keys."""

    window: Annotated[int, AtLeast(1)] = 16
    fusion: Fusion = "max"
    decay: Annotated[float, Between(0, 1)] = 0.8
    redundancy: bool = True
    mix_lambda: Annotated[float, Between(0, 1)] = 0.7
    threshold: Annotated[float, Between(0, 1)] = 0.5
    cosine: Literal["kernel", "raw"] = "kernel"
    pool: Pooling = None
    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 5

    columns: ClassVar[Mapping[str, float]] = {"global": nan}

    copies = 4

    @property
    def scale(self) -> Literal["positive", "signed"]:
        """Whether redundancy is subtracted."""
        return "signed" if self.redundancy and self.mix_lambda < 1 else "positive"

    def score(self, view: View) -> Scores:
        """mix_lambda pool_j(F_j) - (1 - mix_lambda) R'_j; [L, H, n]. The column carries F."""
        older = before_window(view, self.window)
        share = normalise(local_score(view, self.window), older)
        fused = fuse(view["global"], share, self.fusion, self.decay).where(older, 0.0)
        values = smooth(fused, self.pool, self.pool_kernel)
        if self.scale == "signed":
            raw = self.cosine == "raw"
            alike = mean_similarity(
                view.keys,
                view.live,
                threshold=self.threshold,
                epsilon=1e-8 if raw else 1e-6,
                else_first=raw,
                view=view,
            ).masked_fill_(~older, -torch.inf)
            most = alike.amax(-1, keepdim=True)
            repeated = (alike - most).exp_()  # R' = R / max R, where R is a softmax
            values = self.mix_lambda * values - (1 - self.mix_lambda) * repeated
        return Scores(values.where(older, 0.0), {"global": fused.masked_fill(~older, nan)})


class Global(Wrapper):
    """The global score of any scorer."""

    fusion: Fusion = "max"
    decay: Annotated[float, Between(0, 1)] = 0.8

    label: ClassVar[str] = "global"
    adds: ClassVar[Mapping[str, float]] = {"fused": nan}

    def __post_init__(self) -> None:
        super().__post_init__()
        if "fused" in self.scorer.columns:
            raise PolicyError("global: what is inside is a global score already; expected it once")

    def score(self, view: View) -> Scores:
        """F_j, 0 for entries that the scorer protects; [L, H, n]."""
        inner = self.inner(view)
        among = view.live & ~protected_by(self.scorer.protection, view)
        check_sign("global", self.scorer, inner.values, among)
        share = normalise(inner.values, among, signed=self.scorer.scale == "signed")
        fused = fuse(view["fused"], share, self.fusion, self.decay)
        column = fused.masked_fill(~among, nan)
        return Scores(fused.where(among, 0.0), {**inner.columns, "fused": column})
