"""Architecture and structured initialisation of the shipped models.

A Qwen2 decoder with as many layers as the ledger needs retrieval steps: look back, find the
successor or the kind, find the digit of that kind; and a deeper, narrower one.
From a random start these heads take far longer to appear than the whole training run, so they are
written into the weights at the start, roughly; every weight stays trainable.

The initialisation divides the residual stream into the subspaces that heads read and write::

    EMBED     [0, 64)     the word at this position
    PREVIOUS  [64, 96)    the word one position back, written by layer 0
    EARLIER   [96, 128)   words two and five positions back, written by layer 0
    FARTHER   [128, 160)  words three and four back, and the verb, written by layer 0
    FOUND     [160, 192)  the word that layer 1 retrieved, read by the queries of layer 2

Shape letters: h hidden size, d head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvsim.tiny.vocabulary import BOS, EOS, ID, PAD, VERBS, VOCAB

EMBED, PREVIOUS, EARLIER = slice(0, 64), slice(64, 96), slice(96, 128)
FARTHER, FOUND = slice(128, 160), slice(160, 192)
VOCAB_SIZE = math.ceil(len(VOCAB) / 16) * 16
HIDDEN, HEAD_DIM = 192, 32
GROUP = 2  # query heads that share a KV head
MAX_TOKENS = 4096  # what the configuration allows; training rarely passes 1,600

# With a larger base more RoPE pairs rotate little over a few hundred tokens, and a match on content
# needs such pairs: here 9 of the 16 rotate by less than a radian in 400 tokens, and only 5 would
# with the usual 10,000.
ROPE_THETA = 1e6
PAIRS = HEAD_DIM // 2
FAST_PAIRS = 5  # pairs 0 to 4 distinguish neighbouring positions
SLOW_PAIRS = 7  # pairs 7 to 15 carry content
STILL_PAIRS = 11  # pairs 11 to 15 rotate by less than a tenth of a radian in 1,300 tokens

VERB = "verb"  # the target of a head that reads the verb of the question
FIND = -1  # the result of the first of two retrievals
#: A head that copies an earlier word: its distance in tokens (or `VERB`), the subspace that it
#: writes, and the scale.
LookBack = tuple[int | str, slice, float]
#: A head that retrieves a word: the distance before it that its keys read, and the word that its
#: queries match there, in tokens back (0 is the word at this position). None is left to training.
Retrieve = tuple[int, int] | None

ONE_BACK: LookBack = (1, PREVIOUS, 1.0)
TWO_BACK: LookBack = (2, EARLIER, 1.0)
FIVE_BACK: LookBack = (5, EARLIER, 1.0)  # at the `;` of a line: the line's node
THREE_BACK: LookBack = (3, FARTHER, 1.0)
FOUR_BACK: LookBack = (4, FARTHER, 1.0)
QUIET: tuple[LookBack, LookBack] = ((1, EARLIER, 0.3), (6, FARTHER, 0.3))
READ_VERB: LookBack = (VERB, FARTHER, 1.0)

# The last head of hop one finds, at the kind of a correction, the digit that the agenda has for it;
# the one before it the item after the line's node in a list, with a comma between.
FIRST_HOP: tuple[Retrieve, ...] = ((1, 0), (1, 0), (1, 2), (1, 4), (1, 3), None, (2, 5), (2, 4))
SECOND_HOP: tuple[Retrieve, ...] = (
    *((1, FIND), (1, FIND), (1, 0), (1, 2), (1, FIND), None, (2, 5), None),
)


@dataclass(frozen=True)
class Shape:
    """An architecture, and the initial role of its heads.

    Attributes:
        layers: number of decoder layers.
        heads: query heads of each layer; two share a KV head.
        mlp: width of the MLPs.
        look_back: layers whose heads copy words at fixed distances, with a role for each head.
        retrieve: layers whose heads retrieve words, with a role for each head.
        first: the layer whose head 0 makes the first of two retrievals.
        learning_rate: peak of training; above it the last MLPs of a deep model outgrow the rest.
        stored: type of the weights in the file; computing is in float32.
        guided: layer and head that training guides, for each of `curriculum.GUIDED`; the head of
            the second of two retrievals is in a layer after `first`.
    """

    layers: int
    heads: int
    mlp: int
    look_back: dict[int, tuple[LookBack, ...]]
    retrieve: dict[int, tuple[Retrieve, ...]]
    first: int
    guided: dict[str, tuple[int, int]]
    learning_rate: float = 1.5e-3
    stored: torch.dtype = torch.float32

    def free(self, layer: int) -> bool:
        """Return whether a layer starts without a role."""
        return layer not in self.look_back and layer not in self.retrieve


SHAPES: dict[str, Shape] = {
    # as many layers as a line needs steps, so that none can be missed
    "tiny": Shape(
        layers=3,
        heads=8,
        mlp=384,
        look_back={
            0: (ONE_BACK, TWO_BACK, FIVE_BACK, THREE_BACK, FOUR_BACK, *QUIET, READ_VERB),
        },
        retrieve={1: FIRST_HOP, 2: SECOND_HOP},
        first=1,
        guided={"second": (2, 0), "item": (1, 6), "kind": (1, 4), "digit": (1, 7)},
    ),
    # the same heads spread over depth, between layers that are left to training
    "tiny-deep": Shape(
        layers=12,
        heads=4,
        mlp=80,
        look_back={
            0: (ONE_BACK, TWO_BACK, FIVE_BACK, THREE_BACK),
            1: (FOUR_BACK, *QUIET, READ_VERB),
        },
        retrieve={4: FIRST_HOP[:4], 5: FIRST_HOP[4:], 8: SECOND_HOP[:4], 9: SECOND_HOP[4:]},
        first=4,
        guided={"second": (8, 0), "item": (5, 2), "kind": (5, 0), "digit": (5, 3)},
        learning_rate=7e-4,
        stored=torch.bfloat16,  # so that both models together stay below 8 MB
    ),
}

BIAS = 6.0  # length of each pair of the look-back bias: nearly all attention on one token
VERB_MATCH = 2.0  # the same for the head that reads the verb
MATCH = 4.0  # scale of the content match in queries and keys
SINK = 1.2  # the same for `<bos>`: less than a matching word, more than most others
WRITE = 0.15  # scale of layer 0's output, so that it does not drown the word itself
NOISE = 0.03  # lets heads with the same start become different


def config(shape: Shape) -> Qwen2Config:
    """Return the configuration of a shape: heads of 32 dimensions, tied embeddings."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // GROUP,
        head_dim=HEAD_DIM,  # type: ignore[call-arg]  # configurations take any attribute
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.07,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=ID[BOS],
        eos_token_id=ID[EOS],
        pad_token_id=ID[PAD],
    )


def build(seed: int = 0, shape: str = "tiny") -> Qwen2ForCausalLM:
    """Build an untrained model with the structured initialisation, equal for equal seeds.

    Args:
        seed: seed of everything random.
        shape: one of `SHAPES`.
    """
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config(SHAPES[shape]))
    _initialise(model, SHAPES[shape], torch.Generator().manual_seed(seed))
    return model


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return a matrix [rows, columns] with orthonormal rows, or columns if these are fewer."""
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator)
    basis: Tensor = torch.linalg.qr(tall).Q
    return basis if rows >= columns else basis.T


def _reader(generator: torch.Generator) -> Tensor:
    """Return a projection [d, h] that reads only the word at this position."""
    reader = torch.zeros(HEAD_DIM, HIDDEN)
    reader[:, EMBED] = _orthonormal(HEAD_DIM, 64, generator)
    return reader


def _writer(subspace: slice, block: Tensor) -> Tensor:
    """Return a projection [h, d] that writes a head's output into one subspace."""
    writer = torch.zeros(HIDDEN, HEAD_DIM)
    writer[subspace] = block
    return writer


def _rotate(vector: Tensor, positions: float) -> Tensor:
    """Return ``vector`` [d] after RoPE at a position; dimension i pairs with i + d/2."""
    angle = positions * ROPE_THETA ** (-torch.arange(PAIRS) / PAIRS)
    first, second = vector[:PAIRS], vector[PAIRS:]
    return torch.cat(
        [
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ]
    )


def head_rows(index: int) -> slice:
    """Return the rows of a projection that belong to one head."""
    return slice(index * HEAD_DIM, (index + 1) * HEAD_DIM)


@torch.no_grad()
def _initialise(model: Qwen2ForCausalLM, shape: Shape, generator: torch.Generator) -> None:
    """Write the look-back and retrieval heads into a freshly initialised ``model``."""
    embedding = model.model.embed_tokens.weight  # [vocabulary, h]
    words = torch.randn(embedding.shape[0], 64, generator=generator)
    # One direction is for the verbs alone, half of their length, so that a head can find them;
    # `<bos>` is another direction and nothing else, so that attending to it copies no word.
    words[:, :2] = 0.0
    verbs = [ID[verb] for verb in VERBS]
    words[verbs, 0] = words[verbs].norm(dim=-1)
    words[ID[BOS]] = 0.0
    words[ID[BOS], 1] = 1.0
    embedding.zero_()
    embedding[:, EMBED] = 0.8 * words / words.norm(dim=-1, keepdim=True)

    layers: list[Any] = list(model.model.layers)
    for index, layer in enumerate(layers):
        # Scale the rest down, so that it does not drown the heads' output at the start.
        scale = 0.1 if shape.free(index) else 1.0
        layer.mlp.down_proj.weight.mul_(0.05 * scale)
        layer.self_attn.o_proj.weight.mul_(0.3 * scale)
        layer.self_attn.q_proj.weight.mul_(0.5)
        layer.self_attn.k_proj.weight.mul_(0.5)

    reader = _reader(generator)
    writers: dict[int, Tensor] = {}
    for index, copied in shape.look_back.items():
        _look_back(layers[index].self_attn, copied, reader, writers, generator)
    for index, roles in shape.retrieve.items():
        _retrieve(layers[index].self_attn, roles, reader, writers, generator)
    # The result of the first retrieval goes where the queries of the second retrieval read.
    writer = _writer(FOUND, torch.eye(HEAD_DIM))
    layers[shape.first].self_attn.o_proj.weight[:, head_rows(0)] += 0.8 * writer


def _slow(value: float, first: int = SLOW_PAIRS) -> Tensor:
    """Return a vector [d] with ``value`` on the pairs from ``first`` on, which rotate slowest."""
    content = torch.zeros(HEAD_DIM)
    content[first:PAIRS] = content[PAIRS + first :] = value
    return content


def _look_back(
    attention: Any,
    heads: Sequence[LookBack],
    reader: Tensor,
    writers: dict[int, Tensor],
    generator: torch.Generator,
) -> None:
    """Initialise heads that copy the word a fixed number of positions back, or the verb.

    Every key has the same vector u in its bias, and the query bias is u rotated back by the offset,
    so the logit peaks exactly there, whatever the words are. The keys of the last KV head also mark
    the verbs, on pairs that rotate slowest, and the head that reads the verb queries only that.

    Adds to ``writers`` for each offset the unscaled projection [h, d] that writes the word as
    ``reader`` [d, h] reads it: later layers match one with the other.
    """
    attention.q_proj.weight.mul_(0.2)
    attention.k_proj.weight.mul_(0.2)
    for head, (offset, subspace, scale) in enumerate(heads):
        kv_head = head // GROUP
        if head % GROUP == 0:
            phase = torch.rand(FAST_PAIRS, generator=generator) * math.tau
            key = torch.zeros(HEAD_DIM)
            key[:FAST_PAIRS] = BIAS * phase.cos()
            key[PAIRS : PAIRS + FAST_PAIRS] = BIAS * phase.sin()
            attention.k_proj.bias[head_rows(kv_head)] = key
            attention.v_proj.weight[head_rows(kv_head)] = reader
        block = _orthonormal(HEAD_DIM, HEAD_DIM, generator)
        if offset == 1 and subspace == PREVIOUS:
            block = torch.eye(HEAD_DIM)
        writer = _writer(subspace, scale * block)
        attention.o_proj.weight[:, head_rows(head)] = WRITE * writer
        if isinstance(offset, str):
            attention.q_proj.bias[head_rows(head)] = _slow(VERB_MATCH)
            attention.k_proj.weight[head_rows(kv_head), 0] = _slow(VERB_MATCH / 8)
        else:
            attention.q_proj.bias[head_rows(head)] = _rotate(key, -offset)
            writers.setdefault(offset, writer)


def _retrieve(
    attention: Any,
    heads: Sequence[tuple[int, int] | None],
    reader: Tensor,
    writers: dict[int, Tensor],
    generator: torch.Generator,
) -> None:
    """Initialise heads that find a word by a word one or two before it, and copy it.

    Keys read the earlier words that layer 0 wrote; queries read the word at this position, an
    earlier word, or the result of the first of two retrievals. A head without a match attends
    mostly to `<bos>`, a sink.
    """
    content = _slow(MATCH)[:, None]
    sink = _slow(SINK, STILL_PAIRS)
    read = {0: reader, FIND: _writer(FOUND, torch.eye(HEAD_DIM)).T}
    read |= {offset: writer.T for offset, writer in writers.items()}

    def noise() -> Tensor:
        return NOISE * torch.randn(HEAD_DIM, HIDDEN, generator=generator)

    for head, roles in enumerate(heads):
        if roles is None:
            continue
        before, sought = roles
        kv_head = head // GROUP
        if head % GROUP == 0:
            attention.k_proj.weight[head_rows(kv_head)] = content * read[before] + noise()
            attention.k_proj.weight[head_rows(kv_head), 1] = sink
            value = reader if kv_head == 0 else _reader(generator)
            attention.v_proj.weight[head_rows(kv_head)] = value
        attention.q_proj.weight[head_rows(head)] = content * read[sought] + noise()
        attention.q_proj.bias[head_rows(head)] = sink
        attention.o_proj.weight[:, head_rows(head)] = 0.25 * value.T
