"""A Record as the attention mask that training under eviction needs, for each layer and KV head.

Row r sees position p iff p <= r <= evicted_at[p]: the same pairs as with the entries evicted, for
keys that stay at their positions (G-KV, section on training). One number for each position says
all of it, where a dense mask has a row of bits.

    from kvsim.studies.interop.masks import Masks, masking

    masks = Masks.of(record)
    with masking(model, masks):  # each layer of a model of transformers has its own mask
        loss = model(ids, labels=ids).loss
    blocks = create_block_mask(masks.mask_mod(layer, group), None, heads, n, n)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsim.core.record import Record, record_document
from kvsim.errors import OutputError, PolicyError, error_line, local_path
from kvsim.files import write_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Masks:
    """Which entries each row sees, for the layers and heads of a record.

    last_row: int32 [layer, head, pos], the last row that sees a position; the int32 maximum where
    all later rows do. layers: their numbers in the model. labels: where the record comes from.
    """

    last_row: Tensor
    layers: tuple[int, ...]
    labels: dict[str, Any]

    @classmethod
    def of(cls, record: Record) -> Masks:
        """Return the masks of a record.

        Raises PolicyError for a record without an exact mask: keys rotated to their slots or
        quantized, rows of the prompt dropped between layers, sparse attention.
        """
        apart = (record.selection, record.reads, record.storage)
        if record.positions != "absolute" or any(each is not None for each in apart):
            raise PolicyError(
                f"{record.policy}: its keys are rotated to their slots or rounded, rows of the "
                "prompt are dropped between layers, or rows read a part of what is resident; "
                "expected a policy that leaves these as they are, as a mask does"
            )
        names = ("trace", "digest", "policy", "params", "budget", "interval", "prefill")
        document = record_document(record)
        labels = {name: document[name] for name in (*names, "prompt_len", "per_query_head")}
        return cls(torch.from_numpy(record.evicted_at.copy()), record.layer_ids, labels)

    @property
    def n_pos(self) -> int:
        """Tokens of the sequence."""
        return self.last_row.shape[-1]

    def dense(self, layer: int, rows: slice = slice(None)) -> Tensor:
        """Return visible entries of rows of a layer, bool [head, row, pos]; layer: in `layers`."""
        pos = torch.arange(self.n_pos, device=self.last_row.device)
        row = pos[rows, None]
        return (pos <= row) & (row <= self.last_row[layer].unsqueeze(-2))

    def mask_mod(
        self, layer: int, group: int = 1
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the function that `create_block_mask` takes; group: query heads per KV head."""
        last = self.last_row[layer]
        group = 1 if self.labels.get("per_query_head") else group

        def visible(_batch: Tensor, head: Tensor, row: Tensor, pos: Tensor) -> Tensor:
            return (pos <= row) & (row <= last[head // group, pos])

        return visible


@contextmanager
def masking(model: PreTrainedModel, masks: Masks) -> Iterator[None]:
    """Let each layer of a model of transformers attend by its mask, with gradients if enabled.

    For one sequence in one forward without a cache. Layers that the masks do not have, and sliding
    windows, keep the model's own. Raises CaptureError for a model that cannot be recorded,
    PolicyError for other tokens than those of the masks, and for layers that the model lacks.
    """
    from kvsim.recorder import hooks, modules  # noqa: PLC0415  transformers

    added, trace = modules.kernel_name(model) == "eager", masks.labels.get("trace")
    missing = {*masks.layers} - {*modules.attention_modules(model)}
    if missing:
        raise PolicyError(
            f"{type(model).__name__} has no layer {min(missing)}; expected the model of {trace}, "
            f"whose masks are of layers {list(masks.layers)}"
        )
    held = replace(masks, last_row=masks.last_row.to(model.device))

    def mask(layer: int, query: Tensor, given: Tensor | None) -> Tensor | None:
        if layer not in masks.layers:
            return given
        if query.shape[::2] != (1, masks.n_pos):
            raise PolicyError(
                f"{len(query)} x {query.shape[2]} tokens run under masks of 1 x {masks.n_pos}; "
                f"expected the tokens of {trace}, all in one forward without a cache"
            )
        visible = held.dense(masks.layers.index(layer))
        visible = visible.repeat_interleave(query.shape[1] // len(visible), 0)[None]
        if given is not None:
            visible = visible & (given if given.dtype == torch.bool else given == 0)
        return hooks.kernel_mask(visible, query, added=added)

    with hooks.intercepting(model, None, masking=mask):
        yield


def write_masks(path: str | Path, masks: Sequence[Masks], *, overwrite: bool = False) -> Path:
    """Write masks to a `.safetensors` file: a tensor `last_row.I` each, `labels` in its metadata.

    Raises OutputError for another ending, or a path that cannot be written.
    """
    from safetensors.torch import save  # noqa: PLC0415  of an extra

    target = local_path(path, OutputError)
    if target.suffix != ".safetensors":
        raise OutputError(f"the path is {target}; expected one that ends in .safetensors")
    tensors = {f"last_row.{i}": each.last_row.contiguous() for i, each in enumerate(masks)}
    # one text: safetensors writes several in an order that varies
    labels = json.dumps([{**each.labels, "layers": each.layers} for each in masks], default=str)
    write_file(target, save(tensors, {"labels": labels}), overwrite=overwrite)
    return target


def read_masks(path: str | Path) -> list[Masks]:
    """Read the file of `write_masks`. Raises OutputError for another or a damaged file."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  of an extra

    target = local_path(path, OutputError)
    try:
        with safe_open(target, "pt") as file:
            labels = json.loads((file.metadata() or {})["labels"])
            return [
                Masks(file.get_tensor(f"last_row.{i}"), tuple(map(int, each.pop("layers"))), each)
                for i, each in enumerate(labels)
            ]
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise OutputError(
            f"{target} has no masks ({error_line(error)}); expected a file of `kvsim study masks`"
        ) from error
