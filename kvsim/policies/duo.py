"""DuoAttention: some heads hold everything, the others the sinks and the most recent entries.

Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming
Heads", ICLR 2025, arXiv 2410.10819. A plan gives each KV head of a model a score. The `share` of
all heads with the highest scores are retrieval heads and hold everything; each of the others, a
streaming head, holds the first `sink` and the most recent entries, together the budget, after every
row. The policy is called `duo:FILE`, after the file of its plan.

`kvsim heads` builds a plan from traces. The score of a head is the error of its attention output if
only this head streams, `|o_full - o_seen| / |o_full|`, averaged over the rows after the prompt, the
query heads of its group, and the traces. A plan is JSON: the version, `scores` [layer, KV head],
and their provenance. A file FILE.tsv is a plan as the authors publish them: a line of numbers for
each layer.

Deviations. The paper learns a gate for each head by gradient descent: all gates together, so that
the final hidden states of the model stay close to those of full attention on prompts with passkeys.
The score here is measured head by head on the given traces, without training, and ignores how later
layers change an error. With `stream` a budget binds. Streaming heads hold that many entries; the
retrieval heads of a layer share the rest of its budget. They keep the sinks and the entries that
the last row attends to most (TOVA of each KV head). A streaming head holds more than `stream` where
its layer has room: in a layer without retrieval heads it streams at the whole budget, and it gets
the budget that retrieval heads do not use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Between, integer, is_finite
from kvsim.core.pieces import Allocator, Effect, Plan, Run, Shared
from kvsim.core.select import apportion, select
from kvsim.core.view import View
from kvsim.errors import PolicyError, error_line
from kvsim.files import read_input
from kvsim.policies.model import described, differ, is_model, model_of
from kvsim.store.inputs import decode_array

#: Version of the file; others are refused.
VERSION = 1


@dataclass(frozen=True)
class HeadPlan:
    """Numbers of KV heads, in nested lists.

    scores: [layer][head], higher for heads that lose more by streaming; for `lukv` [per
    cent][layer][head], the evicted share of its entries.
    training: provenance of the scores, as JSON.
    """

    scores: Sequence[Sequence[Any]]
    training: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, label: str = "duo", percents: int = 0) -> HeadPlan:
        """Read a file. Raises PolicyError for another kind, version or shape."""
        try:
            return cls(*_content(path, percents))
        except (OSError, ValueError, RecursionError) as error:
            raise PolicyError(
                f"{label}: {path}: {error_line(error)}; give a plan that `kvsim heads` has written"
            ) from error

    def text(self) -> str:
        """Return the content of the file."""
        facts = {"version": VERSION, "scores": self.scores, "training": dict(self.training)}
        return json.dumps(facts, indent=1, sort_keys=True) + "\n"

    @property
    def shape(self) -> tuple[int, ...]:
        """Layers and KV heads."""
        return np.shape(self.scores)[-2:]

    @property
    def digest(self) -> str:
        """SHA-256 of the scores."""
        return hashlib.sha256(json.dumps([[*row] for row in self.scores]).encode()).hexdigest()


class Planned(Allocator):
    """An allocator by the numbers of a plan.

    digest: of the plan; by default of the file.
    """

    file: str
    digest: str = ""

    #: per cents for which there are shares; 0 for one score per head
    percents: ClassVar[int] = 0
    shared: ClassVar[Shared] = "heads"

    def __post_init__(self) -> None:
        super().__post_init__()
        found = self._plan.digest
        if self.digest not in ("", found):
            raise PolicyError(
                f"{self.label}: {self.file} has the digest {found}; expected {self.digest}"
            )
        object.__setattr__(self, "digest", found)

    def check(self, run: Run) -> None:
        """Check that the plan was measured on the same model, if it names one."""
        trace = run.trace
        model, other = self._plan.training.get("model"), model_of(trace)
        known, found = described(model) if model else "a model", described(other)
        shape = self._plan.shape
        if shape != (trace.n_layers, trace.n_heads) or (model and differ(model, other)):
            raise PolicyError(
                f"{self.label}: {self.file} is a plan of {known}, {shape[0]} layers of {shape[1]} "
                f"KV heads, and {trace.name} is of {found}; give a plan of the same model"
            )

    def _shared(self, view: View, weight: Tensor, floor: Tensor) -> Plan:
        """`floor` plus a share of the rest by weight [L, H]; layers x heads x budget in all."""
        count = view.count
        total = view.budget.expand_as(count).sum().minimum(count.sum())
        flat = (x.flatten() for x in (weight, floor.minimum(count), count))
        return Plan(apportion(total, *flat).view_as(count))

    @cached_property
    def _plan(self) -> HeadPlan:
        return HeadPlan.open(Path(self.file), self.label, self.percents)


class Duo(Planned):
    """Retrieval heads keep everything, the others sinks and recent entries."""

    share: Annotated[float, Between(0, 1)] = 0.5
    stream: Annotated[int, AtLeast(1)] | None = None
    sink: Annotated[int, AtLeast(0)] = 4

    @property
    def effect(self) -> Effect:
        """Exact where streaming heads have a size of their own; else retrieval heads grow."""
        return "some" if self.stream is None else "exact"

    @cached_property
    def retrieval(self) -> Tensor:
        """The round(share x heads) heads with the highest scores, ties in order; bool [L, H]."""
        scores = torch.tensor(self._plan.scores, dtype=torch.float64)
        order = scores.flatten().argsort(descending=True, stable=True)
        chosen = torch.zeros(scores.numel(), dtype=torch.bool)
        chosen[order[: round(self.share * scores.numel())]] = True
        return chosen.view_as(scores)

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Quotas [L, H], and the eligible entries of streaming heads."""
        heads = view.count.shape[1]
        retrieves = self.retrieval.to(view.pos.device)[view.layers]
        count, always = view.count, protected.sum(-1)
        if self.stream is None:
            streaming = torch.minimum(count, view.budget).maximum(always)
            quotas = count.where(retrieves, streaming)
        else:
            least = view.budget.clamp(max=self.stream).expand_as(count)
            floor = torch.where(retrieves, 0, least).maximum(always).minimum(count)
            total = (view.budget[:, 0] * heads).minimum(count.sum(-1))
            quotas = apportion(total, retrieves.double(), floor, count)
        streams = select(view.pos.double(), quotas, protected, view.live)
        return Plan(quotas, eligible=streams | retrieves.unsqueeze(-1))


def _content(path: Path, percents: int) -> tuple[list[Any], dict[str, Any]]:
    """Scores and training of a file, the authors' format included. Raises ValueError for others."""
    facts: Any = {"version": VERSION}
    data = read_input(path)
    if path.suffix == ".npy":
        facts["scores"] = decode_array(data, "it")
    elif path.suffix == ".tsv":
        facts["scores"] = [[float(x) for x in line.split()] for line in data.decode().splitlines()]
    else:
        facts = json.loads(data)
    known = isinstance(facts, dict) and integer(facts.get("version")) == VERSION
    scores = np.array(facts.get("scores") if known else None, dtype=object)
    training: Any = facts.get("training", {}) if known else None
    valid = isinstance(training, dict) and is_model(training.get("model", {}))
    if percents:
        valid &= scores.ndim == 3 and len(scores) == percents
        valid &= all(is_finite(x) and 0 <= x <= 1 for x in scores.flat)
        expected = f"shares from 0 to 1 [{percents}, layers, KV heads]"
    else:
        valid &= scores.ndim == 2 and all(map(is_finite, scores.flat))
        expected = "finite numbers [layers, KV heads]"
    if not valid or not scores.size:
        raise ValueError(
            f"its scores have the shape {[*scores.shape]}; expected {expected}, version {VERSION} "
            "and facts on the training"
        )
    return scores.astype(np.float64).tolist(), training
