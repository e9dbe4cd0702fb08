"""Architecture and structured initialisation of the tiny model.

A Qwen2 decoder with as many layers as the ledger needs retrieval steps: look back, find the
successor or the colour, find the digit of that colour.
From a random start these heads take far longer to appear than the whole training run, so they are
written into the weights at the start, roughly; every weight stays trainable.

The residual stream is divided among what the heads exchange (at the start only)::

    EMBED     [0, 64)     the word at this position
    PREVIOUS  [64, 96)    the word one position back, written by layer 0
    EARLIER   [96, 128)   words two to six positions back, written by layer 0
    FOUND     [128, 160)  what layer 1 retrieved, read by the queries of layer 2

Shape letters: h hidden size, d head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvsim.tiny.vocabulary import BOS, EOS, ID, PAD, VOCAB

EMBED, PREVIOUS, EARLIER, FOUND = slice(0, 64), slice(64, 96), slice(96, 128), slice(128, 160)
HIDDEN, HEAD_DIM = 160, 32
MAX_TOKENS = 4096  # what the configuration allows; training stays below 1,200

# With a slow base more RoPE pairs hold still over a few hundred tokens, and a match on content
# needs pairs that hold still: here 9 of the 16 turn by less than a radian in 400 tokens, and only 5
# would with the usual 10,000.
ROPE_THETA = 1e6
PAIRS = HEAD_DIM // 2
FAST_PAIRS = 5  # pairs 0 to 4 tell neighbouring positions apart
SLOW_PAIRS = 7  # pairs 7 to 15 carry content

# Tokens that each query head of layer 0 looks back; the last head is left free.
# The first three serve the retrievals of layer 1, so they stand in one group and are written
# loudest: one back (the word before a match), two back, and five back, which at the `;` of a line
# is the line's node.
LOOK_BACK = (1, 2, 5, 3, 4, 6, 1, None)
LOUDNESS = (1.0, 1.0, 1.0, 0.3, 0.3, 0.3, 0.3, 0.3)

BIAS = 6.0  # length of each pair of the look-back bias: nearly all attention on one token
MATCH = 4.0  # scale of the content match in queries and keys
NOISE = 0.03  # keeps heads with the same start from staying equal


def config() -> Qwen2Config:
    """The architecture: 3 layers, 8 query and 2 KV heads of 32 dimensions, tied embeddings."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=math.ceil(len(VOCAB) / 16) * 16,
        hidden_size=HIDDEN,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.07,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=ID[BOS],
        eos_token_id=ID[EOS],
        pad_token_id=ID[PAD],
    )


def build(seed: int = 0) -> Qwen2ForCausalLM:
    """An untrained model with the structured initialisation, the same for the same seed."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config())
    _initialise(model, torch.Generator().manual_seed(seed))
    return model


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """[rows, columns] with orthonormal rows (or columns, whichever are fewer)."""
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator)
    basis: Tensor = torch.linalg.qr(tall).Q
    return basis if rows >= columns else basis.T


def _reader(generator: torch.Generator) -> Tensor:
    """[d, h] projection that reads the word at this position and nothing else."""
    reader = torch.zeros(HEAD_DIM, HIDDEN)
    reader[:, EMBED] = _orthonormal(HEAD_DIM, 64, generator)
    return reader


def _writer(subspace: slice, block: Tensor) -> Tensor:
    """[h, d] projection that writes a head's output into one subspace."""
    writer = torch.zeros(HIDDEN, HEAD_DIM)
    writer[subspace] = block
    return writer


def _turn(vector: Tensor, positions: float) -> Tensor:
    """[d] ``vector`` after RoPE at a position; dimension i pairs with i + d/2."""
    angle = positions * ROPE_THETA ** (-torch.arange(PAIRS) / PAIRS)
    first, second = vector[:PAIRS], vector[PAIRS:]
    return torch.cat(
        [
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ]
    )


def _heads(index: int) -> slice:
    return slice(index * HEAD_DIM, (index + 1) * HEAD_DIM)


@torch.no_grad()
def _initialise(model: Qwen2ForCausalLM, generator: torch.Generator) -> None:
    """Write the look-back and retrieval heads into a freshly initialised ``model``."""
    embedding = model.model.embed_tokens.weight  # [vocabulary, h]
    words = torch.randn(embedding.shape[0], 64, generator=generator)
    embedding.zero_()
    embedding[:, EMBED] = 0.8 * words / words.norm(dim=-1, keepdim=True)

    layers: list[Any] = list(model.model.layers)
    for layer in layers:
        # Quiet the rest, so that what the heads write is not drowned at the start.
        layer.mlp.down_proj.weight.mul_(0.25)
        layer.self_attn.o_proj.weight.mul_(0.3)
        layer.self_attn.q_proj.weight.mul_(0.5)
        layer.self_attn.k_proj.weight.mul_(0.5)

    reader, writers = _look_back(layers[0].self_attn, generator)
    _retrieve(layers[1].self_attn, reader, writers, generator, hop=1)
    _retrieve(layers[2].self_attn, reader, writers, generator, hop=2)


def _look_back(attention: Any, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """Layer 0: heads that copy the word a fixed number of positions back.

    Every key carries the same vector u in its bias, and the query bias is u turned back by the
    offset, so the logit peaks exactly there, whatever the words are.

    Returns:
        What the heads of KV head 0 read from a word [d, h], and what each query head writes
        [h, d], unscaled: the next layers match one against the other.
    """
    attention.q_proj.weight.mul_(0.2)
    attention.k_proj.weight.mul_(0.2)
    readers: list[Tensor] = []
    writers: list[Tensor] = []
    group = len(LOOK_BACK) // 2
    for head, offset in enumerate(LOOK_BACK):
        kv_head = head // group
        if head % group == 0:
            phase = torch.rand(FAST_PAIRS, generator=generator) * math.tau
            key = torch.zeros(HEAD_DIM)
            key[:FAST_PAIRS] = BIAS * phase.cos()
            key[PAIRS : PAIRS + FAST_PAIRS] = BIAS * phase.sin()
            attention.k_proj.bias[_heads(kv_head)] = key
            readers.append(_reader(generator))
            attention.v_proj.weight[_heads(kv_head)] = readers[-1]
        attention.q_proj.bias[_heads(head)] = 0.0 if offset is None else _turn(key, -offset)
        if head == 0:
            writer = _writer(PREVIOUS, torch.eye(HEAD_DIM))
        else:
            block = LOUDNESS[head] * _orthonormal(HEAD_DIM, HEAD_DIM, generator)
            writer = _writer(EARLIER, block)
        attention.o_proj.weight[:, _heads(head)] = 0.2 * writer
        writers.append(writer)
    return readers[0], writers


def _retrieve(
    attention: Any, reader: Tensor, writers: list[Tensor], generator: torch.Generator, hop: int
) -> None:
    """Layers 1 and 2: heads that find a word by a word before it, and copy it.

    Keys read what layer 0 wrote: the previous word, or for the second group of hop 1 the word two
    back. In hop 1 two query heads of each group look for the word at this position; head 0 writes
    what it finds into FOUND as well, through the same projection, so that hop 2 can look for it
    in turn. The third head of a group looks for the previous word. The fourth looks for the word
    two back, or in the second group of hop 1 five back: at the end of a line that finds the item
    that follows the line's node in the list of `get`, with a comma between them.
    """
    content = torch.zeros(HEAD_DIM, 1)
    content[SLOW_PAIRS:PAIRS] = content[PAIRS + SLOW_PAIRS :] = MATCH
    found = _writer(FOUND, torch.eye(HEAD_DIM))
    target = reader if hop == 1 else found.T
    group = len(LOOK_BACK) // 2

    def noise() -> Tensor:
        return NOISE * torch.randn(HEAD_DIM, HIDDEN, generator=generator)

    for kv_head in range(2):
        source = writers[kv_head if hop == 1 else 0]
        attention.k_proj.weight[_heads(kv_head)] = content * source.T + noise()
        value = reader if hop == 1 and kv_head == 0 else _reader(generator)
        attention.v_proj.weight[_heads(kv_head)] = value
        last = writers[2 if hop == 1 and kv_head == 1 else 1]  # writers[2]: five back
        sought = (target, target, writers[0].T, last.T)
        for member in range(group):
            head = kv_head * group + member
            attention.q_proj.weight[_heads(head)] = content * sought[member] + noise()
            attention.o_proj.weight[:, _heads(head)] = 0.25 * value.T
    if hop == 1:
        attention.o_proj.weight[:, _heads(0)] += 0.8 * found
