"""Sensitivity of the response to an error of each layer, by perturbed rows.

The first rows after the prompt go through the model again, once for each layer, which then sees
only a random part of the prompt. All layers run together, as parts of one sequence, after the
capture's rows.

Shape letters: C copies of the rows, w rows, H KV heads, n entries, d dimension of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.attention import Formula, sees
from kvsim.recorder.forward import device_of, evaluating, last_logits, run_model
from kvsim.recorder.head import check_logits
from kvsim.recorder.hooks import KERNELS, Attention, KernelCall, intercepting, kernel_mask
from kvsim.recorder.modules import attention_modules, kernel_name
from kvsim.recorder.positions import scales_by_cache, steady_length

#: Rows after the prompt, the share of the prompt that they see, and its first entries, all seen.
ROWS, SEEN, SINK = 16, 0.25, 4

#: Logits that are computed at once.
LOGITS = 1 << 26


class LayerEntries(NamedTuple):
    """Keys and values [H, n, d] of a layer, formula, and gate [qhead, w, d] of the first rows."""

    keys: Tensor
    values: Tensor
    formula: Formula
    gate: Tensor | None = None

    @classmethod
    def note(
        cls,
        entries: dict[int, LayerEntries],
        call: KernelCall,
        prompt_len: int,
        n_pos: int | None,
    ) -> None:
        """Add to the gates of the call's layer; keep only keys and values of all n_pos."""
        gate, before = call.gate, entries.get(call.layer)
        if gate is not None:
            gate = gate[:, max(0, prompt_len - call.start) :][:, :ROWS]
            if before is not None and before.gate is not None:
                gate = torch.cat([before.gate, gate], 1)[:, :ROWS]
        whole, none = call.k.shape[1] == n_pos, call.k.new_empty(0)
        keys, values = (call.k, call.v) if whole else (none, none)
        entries[call.layer] = cls(keys, values, call.formula, gate)


def layer_sensitivity(
    model: PreTrainedModel,
    tokens: Sequence[int],
    prompt_len: int,
    entries: Mapping[int, LayerEntries],
    projections: Mapping[int, Tensor],
) -> list[float] | None:
    """Return the KL that each layer's error causes over the square of that error.

    KL is in nats, of the predictions of the first `ROWS` rows after the prompt, relative to the
    full cache. The error of a row is the norm of the change in the layer's addition to the residual
    stream. Both are summed over the rows.

    Args:
        model: the model.
        tokens: of the whole sequence.
        prompt_len: tokens of the prompt.
        entries: of the layers that were recorded, at the end of the capture.
        projections: their output projections [qhead, d, hidden], as far as there are any.

    Returns:
        For each layer, nats over the square of the stream's unit, 0 where the layer has no error;
        None where some layers, projections or a response of two tokens are missing, where the masks
        of the model's kernel are of an unknown kind, where its RoPE has other frequencies for so
        many tokens, or where queries depend on the length of the cache.

    Raises:
        CaptureError: logits that are not finite, a model that cannot run the rows together.
    """
    count = min(ROWS, len(tokens) - prompt_len - 1)  # the last row predicts no recorded token
    limit = steady_length(model) or len(tokens)
    steady = len(tokens) <= limit and not scales_by_cache(model, len(tokens))
    whole = attention_modules(model).keys() == entries.keys() == projections.keys()
    if count < 1 or kernel_name(model) not in KERNELS or not steady or not whole:
        return None
    layers = sorted(entries)
    rows = tokens[prompt_len : prompt_len + count]
    size = max(1, LOGITS // (count * model.config.get_text_config().vocab_size) - 1)
    out: list[float] = []
    for some in (layers[i : i + size] for i in range(0, len(layers), size)):
        out += _of_layers(model, some, rows, prompt_len, entries, projections)
    return out


def _of_layers(
    model: PreTrainedModel,
    layers: Sequence[int],
    tokens: Sequence[int],
    start: int,
    entries: Mapping[int, LayerEntries],
    projections: Mapping[int, Tensor],
) -> list[float]:
    """Run copies of rows from `start` on: one with all entries, and one for each of layers."""
    count, copies, squared = len(tokens), len(layers) + 1, dict[int, float]()
    added = kernel_name(model) == "eager"  # masks are added to logits

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, run: Attention) -> Tensor:
        of, at = entries[layer], torch.arange(start + count)
        seen = sees(at[start:], at, of.formula).to(query.device).expand(query.shape[1], -1, -1)
        shared = [x[None, :, :start].to(key) for x in (of.keys, of.values)]
        parts = [x.split(count, 2) for x in (query, key, value)]
        mask = kernel_mask(seen[None], query, added=added)

        def computed(copy: int, mask: Tensor) -> Tensor:
            q, *new = (x[copy] for x in parts)
            keys, values = (torch.cat(both, dim=2) for both in zip(shared, new, strict=True))
            return run(q, keys, values, mask)

        outputs = [computed(0, mask)]
        for copy, perturbed in enumerate(layers, start=1):
            if perturbed > layer:  # nothing has changed yet
                outputs.append(outputs[0])
            elif perturbed < layer:
                outputs.append(computed(copy, mask))
            else:
                kept = _kept(len(of.keys), start, count).to(seen.device)
                kept = kept.repeat_interleave(len(seen) // len(kept), 0)[:, None]
                outputs.append(computed(0, kernel_mask((seen & kept)[None], query, added=added)))
                moved = (outputs[-1] - outputs[0])[0].float()  # [w, qhead, d]
                if of.gate is not None:
                    moved = moved * of.gate[:, :count].transpose(0, 1).to(moved)
                change = moved.flatten(1) @ projections[layer].flatten(0, 1).to(moved)
                squared[layer] = float(change.double().square().sum())
        return torch.cat(outputs, dim=1)

    device = device_of(model)
    with (
        torch.inference_mode(),
        evaluating(model),
        intercepting(model, lambda _: None, attending=attend),
    ):
        logits: Tensor = run_model(
            model,
            torch.tensor([[*tokens] * copies], device=device),
            position_ids=torch.arange(start, start + count, device=device).repeat(copies)[None],
            # a mask of four axes is taken as it is, so that none is made
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            use_cache=False,
            **last_logits(model, copies * count),
        ).logits[0]
    full, *others = check_logits(logits, start).split(count)
    expected, out = full.double().log_softmax(-1), []
    for layer, of_layer in zip(layers, others, strict=True):
        gap = expected - of_layer.double().log_softmax(-1)
        kl = float((expected.exp() * gap).sum(-1).clamp(min=0).sum())
        out.append(kl / squared[layer] if squared[layer] else 0.0)
    return out


def _kept(heads: int, start: int, count: int) -> Tensor:
    """Which entries heads of a perturbed layer keep [H, n]: of the prompt a random part."""
    draw = torch.rand(heads, start, generator=torch.Generator().manual_seed(0))
    draw[:, :SINK] = 1.0
    size = min(start, max(SINK, int(SEEN * start)))
    kept = torch.zeros_like(draw, dtype=torch.bool)
    kept.scatter_(1, draw.topk(size, dim=-1).indices, value=True)
    return torch.cat([kept, torch.ones(heads, count, dtype=torch.bool)], dim=1)
