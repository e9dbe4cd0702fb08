"""Probes of a shipped model: the loss without a layer or a head, and the attention of each head.

Everything here is teacher-forced: the input is the prompt and the right response. A chain is exact
if and only if greedy generation would generate it, apart from rounding, because up to the first
wrong word the input is the same.

Shape letters: B sequences, T positions, H query heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from apps.tiny.curriculum import collate
from kvsim.studies.language.tasks import Sample
from kvsim.tiny.vocabulary import DIGITS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 10  # sequences in a batch
FIRST, LAST = 4, 32  # positions that count as sinks, and as local


# --- what words need ---


class Need(NamedTuple):
    """One word that a retrieval reads.

    Attributes:
        name: the retrieval's purpose; for two words to read, 1 or 2 is added; for a correction,
            kind or digit; and "chain" for a word of the response.
        row: position after which the looked-up word is due.
        pos: position to read.
    """

    name: str
    row: int
    pos: int


#: All names of needs, in the order of tables and figures.
NEEDS = (
    *("item", "branch", "successor", "join 1", "join 2"),
    *("digit 1", "digit 2", "digit 2, chain", "lines", "recheck 1", "recheck 2, chain"),
    *("correction kind", "correction digit", "report", "report, chain"),
)


def needs(sample: Sample) -> list[Need]:
    """Return the needs of the response of ``sample``; ``<bos>`` is position 0."""
    result = []
    words = sample.prompt.split()
    for purpose, at, path in sample.retrievals:
        for hop, index in enumerate(path, 1):
            name = f"{purpose} {hop}" if len(path) > 1 else str(purpose)
            if purpose == "correction":
                name += " digit" if words[index] in DIGITS else " kind"
            chain = index >= sample.prompt_words
            result.append(Need(name + ", chain" * chain, 1 + at, 1 + index))
    return result


# --- removing parts ---


def _projection(model: PreTrainedModel, layer: int) -> Any:
    """Return the output projection of a layer; its input is [B, T, H * d]."""
    return model.get_submodule(f"model.layers.{layer}.self_attn.o_proj")


@contextmanager
def replaced(
    model: PreTrainedModel, layer: int, columns: slice, value: float | Tensor
) -> Iterator[None]:
    """Replace columns of the heads' outputs in a layer by ``value`` inside the ``with``."""

    def put(_module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = inputs[0].clone()
        outputs[..., columns] = value
        return (outputs, *inputs[1:])

    handle = _projection(model, layer).register_forward_pre_hook(put)
    try:
        yield
    finally:
        handle.remove()


def _batches(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    ordered = sorted(samples, key=lambda sample: sample.tokens)
    return [ordered[first : first + BATCH] for first in range(0, len(ordered), BATCH)]


@dataclass
class Score:
    """Counts of right chains and words.

    Attributes:
        samples: the number of samples.
        exact: the number of samples with an exact chain.
        words: right words and all words, in the whole response.
        by_purpose: the same for words with a retrieval, by its purpose.
    """

    samples: int = 0
    exact: int = 0
    words: list[int] = field(default_factory=lambda: [0, 0])
    by_purpose: dict[str, list[int]] = field(default_factory=dict)

    def add(self, sample: Sample, right: Tensor) -> None:
        """Count one sample; ``right`` [word] covers the words of prompt and response."""
        response = right[sample.prompt_words :].tolist()
        self.samples += 1
        self.exact += all(response[: sample.chain_words])
        _count(self.words, response)
        for retrieval in sample.retrievals:
            at = retrieval.at + 1 - sample.prompt_words
            _count(self.by_purpose.setdefault(retrieval.purpose, [0, 0]), [response[at]])


def _count(pair: list[int], hits: Sequence[bool]) -> None:
    pair[0] += sum(hits)
    pair[1] += len(hits)


@torch.no_grad()
def score(model: PreTrainedModel, samples: Sequence[Sample]) -> Score:
    """Score the next word of ``model`` after each word of the right response."""
    total = Score()
    for batch in _batches(samples):
        tokens = collate(batch).tokens
        right = model(input_ids=tokens).logits[:, :-1].argmax(-1) == tokens[:, 1:]
        for sample, row in zip(batch, right, strict=True):
            total.add(sample, row[: sample.tokens - 2])
    return total


@torch.no_grad()
def means(model: PreTrainedModel, samples: Sequence[Sample]) -> list[Tensor]:
    """Return the mean output of the heads of each layer over the responses, [H * d] each."""
    layers = model.config.num_hidden_layers
    sums = [torch.zeros(()) for _ in range(layers)]
    outputs: list[Tensor] = []
    handles = [
        _projection(model, layer).register_forward_pre_hook(lambda _, x: outputs.append(x[0]))
        for layer in range(layers)
    ]
    rows = 0
    try:
        for batch in _batches(samples):
            outputs.clear()
            model(input_ids=collate(batch).tokens)
            for at, sample in enumerate(batch):
                response = slice(sample.prompt_words, sample.tokens - 1)
                rows += sample.tokens - 1 - sample.prompt_words
                sums = [
                    total + output[at, response].sum(0)
                    for total, output in zip(sums, outputs, strict=True)
                ]
    finally:
        for handle in handles:
            handle.remove()
    return [total / rows for total in sums]


def ablation(model: PreTrainedModel, samples: Sequence[Sample]) -> dict[str, Any]:
    """Score the whole model, and the model without the attention of a layer or a KV head.

    The output of the part is set to zero; for layers also to its mean over the responses.
    """
    config = model.config
    group = _projection(model, 0).in_features // config.num_key_value_heads
    average = means(model, samples)
    parts: dict[str, tuple[int, slice, float | Tensor]] = {}
    for layer, mean in enumerate(average):
        parts[f"layer {layer}"] = (layer, slice(None), 0.0)
        parts[f"layer {layer}, mean"] = (layer, slice(None), mean)
        for head in range(config.num_key_value_heads):
            parts[f"head {layer}.{head}"] = (layer, slice(head * group, (head + 1) * group), 0.0)
    scores = {"nothing": score(model, samples)}
    for name, part in parts.items():
        with replaced(model, *part):
            scores[name] = score(model, samples)
    return {
        "removed": {
            name: {
                "exact": each.exact,
                "right": round(each.words[0] / each.words[1], 5),
                "by_purpose": each.by_purpose,
            }
            for name, each in scores.items()
        }
    }


# --- attention ---


@contextmanager
def _returning_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use the eager kernel, which returns attention, inside the ``with``."""
    before = model.config._attn_implementation  # noqa: SLF001 - there is no public name
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def attention_maps(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Return the attention over one sample, [layer, H, T, T] (query head, row, pos)."""
    with _returning_attention(model):
        output = model(input_ids=collate([sample]).tokens, output_attentions=True)
    return torch.stack([attention[0] for attention in output.attentions])


def _figures(maps: Tensor, sample: Sample) -> Tensor:
    """Compute `FIGURES` of each head for each row that predicts a word of the response.

    Args:
        maps: attention, [layer, H, T, T].
        sample: the input.

    Returns:
        [layer, H, row, figure].
    """
    start = 1 + sample.prompt_words
    rows = maps[:, :, start - 1 : -1]
    row = torch.arange(start - 1, maps.shape[-1] - 1)[:, None]
    pos = torch.arange(maps.shape[-1])
    mark = torch.zeros_like(pos, dtype=torch.bool)
    mark[1:start] = torch.tensor([word in PUNCTUATION for word in sample.prompt.split()])
    recent = pos > row - LAST
    first = pos < FIRST
    figures = [
        rows[..., :FIRST].sum(-1),
        (rows * (mark & ~recent & ~first)).sum(-1),
        (rows * recent).sum(-1),
        (rows * (~recent & (pos >= start))).sum(-1),
        torch.special.entr(rows).sum(-1).exp(),
    ]
    return torch.stack(figures, dim=-1)


#: Words that no retrieval reads.
PUNCTUATION = frozenset(".,:;")
#: Mass on the first 4 positions; on punctuation of the prompt outside the first 4 and the last 32;
#: on the last 32; on earlier words of the response; and effective tokens, the exponential of the
#: entropy in nats.
FIGURES = ("first", "marks", "last", "chain", "effective")


def structure(model: PreTrainedModel, samples: Sequence[Sample]) -> dict[str, Any]:
    """Measure the attention of each head in rows of the response.

    Returns:
        ``rows`` of responses; ``met``, the number of needs by name; and ``heads``, for each layer
        and query head the mean of `FIGURES` over rows, and ``mass``, by name of the need the mean
        attention to the needed position.
    """
    figures: list[Tensor] = []
    masses: dict[str, list[Tensor]] = {}
    for sample in samples:
        maps = attention_maps(model, sample)
        figures.append(_figures(maps, sample))
        due = needs(sample)
        for name in {need.name for need in due}:
            rows, places = zip(*(need[1:] for need in due if need.name == name), strict=True)
            masses.setdefault(name, []).append(maps[:, :, rows, places])  # [layer, H, need]
    figure = torch.cat(figures, dim=2)
    mass = {name: torch.cat(masses[name], dim=2) for name in NEEDS if name in masses}
    return {
        "rows": figure.shape[2],
        "met": {name: shares.shape[2] for name, shares in mass.items()},
        "heads": [
            {
                "layer": layer,
                "head": head,
                **{
                    name: round(float(mean), 4)
                    for name, mean in zip(FIGURES, figure[layer, head].mean(0), strict=True)
                },
                "mass": {
                    name: round(float(shares[layer, head].mean()), 4)
                    for name, shares in mass.items()
                },
            }
            for layer in range(figure.shape[0])
            for head in range(figure.shape[1])
        ],
    }
