"""A model of transformers that runs live: the formulas of its layers, and a shared prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvsim.core.attention import Formula
from kvsim.core.policy import Policy
from kvsim.core.probe import KEY, Chunk, Probe
from kvsim.core.sources import InMemory
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.recorder.cache import cache_option, full_cache
from kvsim.recorder.forward import chunk_rows, continues, device_of, evaluating, last_logits
from kvsim.recorder.head import Head, check_logits
from kvsim.recorder.hooks import KERNELS, KernelCall, intercepting
from kvsim.recorder.models import model_name, unwrapped
from kvsim.recorder.modules import head_of, kernel_name
from kvsim.recorder.options import Options
from kvsim.recorder.positions import indexed, steady_length
from kvsim.recorder.prompts import Prompt
from kvsim.recorder.provenance import describe_model
from kvsim.recorder.session import Session
from kvsim.schema import Spans, object_at

#: Tokens of the capture that shows the formulas of a model's layers.
_PROBE = 32


class RunningModel:
    """A model of transformers, and the formulas of its layers by a capture of a few tokens.

    Raises CaptureError for a model that cannot be recorded, whose kernel takes masks of an unknown
    kind, or whose layers are on several devices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        model = unwrapped(model)
        kernel, devices = kernel_name(model), sorted({str(x.device) for x in model.parameters()})
        problems = {
            f"attends by {kernel!r}; expected one of {', '.join(KERNELS)}: load it with "
            "attn_implementation='sdpa'": kernel not in KERNELS,
            "has an indexer that chooses entries for each row, with a cache of its own; expected a "
            "model without: its traces can be replayed, no more": indexed(model) is not None,
            f"is on {', '.join(devices)}; expected one device, which the layers of a cache share; "
            "load it without a device map": len(devices) > 1,
        }
        for problem, applies in problems.items():
            if applies:
                raise CaptureError(f"{model_name(model)} {problem}")
        self.model = model
        self.device = device_of(model)
        self.added = kernel == "eager"  # masks are added to logits
        #: whether some layers keep a state, which depends on all rows before, instead of entries
        self.has_states = any(hasattr(part, "conv_states") for part in full_cache(model).layers)

    @cached_property
    def head(self) -> Head:
        """The part of the model that computes logits of its decoder's output."""
        return head_of(self.model)

    @cached_property
    def continues(self) -> bool:
        """Whether a forward of several rows goes on from the states of the rows before."""
        return not self.has_states or continues(self.model, range(1, 7))

    def filled(self, ids: Sequence[int]) -> Cache:
        """Return a cache of all of these tokens."""
        cache, chunk = full_cache(self.model), self.chunk(ids)
        with torch.inference_mode(), evaluating(self.model):
            self.run(ids, cache, 0, chunk)
        return cache

    @cached_property
    def described(self) -> dict[str, Any]:
        """The model as traces describe it, with the digest of its weights."""
        return describe_model(self.model)

    @cached_property
    def _plain(self) -> Trace:
        return self._probed()

    @cached_property
    def _projected(self) -> Trace:
        return self._probed(o_proj=True)

    def _probed(self, **options: Any) -> Trace:
        """Capture a few tokens, in memory."""
        vocabulary = cast("nn.Embedding", self.model.get_input_embeddings()).num_embeddings
        ids = [token % vocabulary for token in range(1, _PROBE + 1)]
        formulas: dict[int, Formula] = {}

        def receive(call: KernelCall) -> None:
            formulas[call.layer] = call.formula

        # a trace so short does not say how long the sliding windows are
        with intercepting(self.model, receive):
            trace = Session(
                self.model,
                None,
                Prompt("", ids),
                Options(max_new_tokens=0, **options),
                None,
                self.described,
            ).run()
        header = replace(trace.header, formulas=tuple(formulas[at] for at in sorted(formulas)))
        return Trace(trace.source, header, dtype=trace.dtype)

    def check_length(self, n_pos: int) -> None:
        """Raise CaptureError beyond the context of the model, or a change of its frequencies."""
        limit = steady_length(self.model)
        if limit is not None and n_pos > limit:
            raise CaptureError(
                f"the sequence may have {n_pos} tokens; expected at most {limit}, up to which "
                f"{model_name(self.model)} rotates keys and queries alike; give a shorter prompt "
                "or fewer new tokens"
            )

    @cached_property
    def projected(self) -> Trace | None:
        """A trace of a few tokens with output projections.

        None without such matrices, or where a gate acts before them.
        """
        try:
            trace = self._projected
        except CaptureError:
            return None
        return None if trace.has("gate") else trace

    def sketch(
        self,
        policy: Policy,
        prompt_len: int,
        n_pos: int,
        context_len: int | None,
        name: str,
        questions: Spans = (),
    ) -> Trace:
        """Return a sequence that is to be run as a Trace: sizes, formulas, and zeros as q, k, v."""
        self.check_length(n_pos)
        example = self._projected if "o_proj" in policy.reads.arrays else self._plain
        zero = torch.zeros((), dtype=example.dtype)
        if example.has("gate"):
            raise CaptureError(
                f"{policy.name} reads the output projection, before which {model_name(self.model)} "
                "has a gate, expected none in a live run; replay a recorded trace instead"
            )
        shapes = example.source.shapes
        arrays = {
            key: zero.expand(*shapes[key][:2], n_pos, shapes[key][3]) for key in ("q", "k", "v")
        }
        if example.has("o_proj"):
            arrays["o_proj"] = example.source.read("o_proj", slice(None), slice(None))
        model = object_at(example.meta, "model")
        meta: dict[str, Any] = {
            "model": {key: model[key] for key in ("layers", "other_layers") if key in model}
        }
        if example.header.latent is not None:
            meta["latent"] = example.header.latent
        if "probe_q" in policy.reads.arrays:
            rows = context_len or prompt_len  # about as many as will run
            meta[KEY] = Probe("repeat", (Chunk(0, rows, rows),), (0,) * rows).document()
            arrays |= {f"probe_{x}": arrays[x][:, :, :1].expand(-1, -1, rows, -1) for x in "qk"}
        facts: Any = {"prompt_len": prompt_len, "context_len": context_len, "name": name}
        header = replace(example.header, **facts, meta=meta, questions=tuple(questions))
        header.check({key: tuple(array.shape) for key, array in arrays.items()}, name)
        return Trace(InMemory(arrays), header.within(n_pos), dtype=example.dtype)

    def forward(
        self, ids: Sequence[int], start: int, cache: Cache, logits: int, *, back: int = 0
    ) -> Tensor:
        """Run the tokens of rows start, start + 1, ...; returns the logits of the last, [n, V].

        back: how far behind its row the position of a token is. Raises CaptureError for logits that
        are not finite.
        """
        at = torch.arange(start, start + len(ids), device=self.device)
        out: Tensor = self.model(
            torch.tensor([list(ids)], device=self.device),
            position_ids=at[None] - back,
            cache_position=at,
            use_cache=True,
            **cache_option(self.model, cache),
            **last_logits(self.model, max(1, logits)),
        ).logits[0]
        out = out[max(0, len(out) - logits) :]
        return check_logits(out, start + len(ids) - len(out))

    def chunk(self, ids: Sequence[int]) -> int:
        """Return the most rows of a forward of these tokens over an empty cache, for `run`."""
        return chunk_rows(self.model, ids)[0] if ids else 1

    def run(
        self, ids: Sequence[int], cache: Cache, logits: int, chunk: int, begin: int = 0
    ) -> Tensor:
        """Run tokens behind `begin` rows, at most `chunk` in a forward; logits as `forward`."""
        first, parts = len(ids) - logits, list[Tensor]()
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            wanted = min(len(part), max(0, start + len(part) - first))
            parts.append(self.forward(part, begin + start, cache, wanted))
        return torch.cat(parts) if parts else torch.empty(0, 0)


@dataclass(frozen=True)
class Prefix:
    """The first rows of a sequence, with the full cache: shared by runs that differ later.

    For each layer keys and values [H, n, d], None where it holds none, and queries [qhead, n, d];
    logits of the last row, [V].
    """

    tokens: tuple[int, ...]
    keys: list[Tensor | None]
    values: list[Tensor | None]
    queries: list[Tensor]
    logits: Tensor


def prefill(running: RunningModel, ids: Sequence[int]) -> Prefix:
    """Run the first rows of a sequence with the full cache."""
    queries: dict[int, list[Tensor]] = {}

    def receive(call: KernelCall) -> None:
        queries.setdefault(call.layer, []).append(call.q)

    model = running.model
    cache, chunk = full_cache(model), running.chunk(ids)
    with torch.inference_mode(), evaluating(model), intercepting(model, receive):
        logits = running.run(ids, cache, 1, chunk)[0]
    keys, values = (
        [None if x is None else x[0] for x in (getattr(layer, name) for layer in cache.layers)]
        for name in ("keys", "values")
    )
    of_layers = [torch.cat(queries[at], dim=1) for at in sorted(queries)]
    return Prefix(tuple(ids), keys, values, of_layers, logits)
