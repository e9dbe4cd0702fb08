"""Checks that a model is the recorded one, and relative changes of its states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvsim.core.checks import DTYPES, tolerance
from kvsim.core.sources import dtype_of
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError, NeedsError
from kvsim.recorder.head import Predictions
from kvsim.recorder.hooks import KernelCall
from kvsim.recorder.provenance import config_differences, tokenizer_difference
from kvsim.schema import first_of, object_at

#: Of the tolerance of a precision (`kvsim.core.checks`), what the first layer may differ by in one
#: row, and what may add up over all layers. On shipped models, other kernels, threads and block
#: sizes reach 2 % of either in float32; in bfloat16 0 and 28 %, where weights that were changed by
#: 1 % exceed the first.
_FIRST, _DEEP = 0.5, 5.0


def check_recorded(trace: Trace, described: Mapping[str, Any], tokenizer: Any = None) -> list[int]:
    """Return the tokens of a trace that is to be run again on its model, as it is described.

    Raises NeedsError for a trace without tokens, or of some layers of the model alone, and
    CaptureError for another model or tokenizer than the recorded ones.
    """
    if trace.tokens is None or not trace.header.whole:
        missing = "no tokens" if trace.tokens is None else "only some layers of its model"
        raise NeedsError(
            f"{trace.name} has {missing}, expected the tokens and all layers of a sequence that is "
            "to be run again; record it with kvsim capture"
        )
    if difference := _difference(trace, described) or tokenizer_difference(trace, tokenizer):
        raise CaptureError(f"{difference}; give the model of {trace.name} was recorded with")
    tokens: list[int] = trace.tokens.tolist()
    return tokens


def _difference(trace: Trace, described: Mapping[str, Any]) -> str:
    """Return in what a model is not the recorded one, as far as both are described; else empty."""
    recorded, name = object_at(trace.meta, "model"), f"the model {described['name']}"
    facts: dict[str, Any] = {"layers": trace.n_layers}
    if recorded.get("config") is not None:
        if differing := config_differences(trace.meta, described):
            of = f"in {first_of(differing)} of its configuration"
            return f"{name} differs from the recorded {recorded.get('name')} {of}"
        known = (x for x in ("dtype", "weights") if recorded.get(x) and described.get(x))
        facts |= {x: recorded[x] for x in known}
    pairs = ((x, str(described[x])[:19], str(y)[:19]) for x, y in facts.items())
    return next((f"{name} has {x} {a}, expected {b}" for x, a, b in pairs if a != b), "")


def holds_cache(trace: Trace, described: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether recorded keys and values are those that a model in this precision caches.

    Recorded with the same weights, by their digests, and stored without rounding; of layers that
    all have entries of their own, which are not latents.
    """
    weights = object_at(trace.meta, "model").get("weights")
    stored = dtype_of(trace.source)
    return (
        weights is not None
        and weights == described.get("weights")
        and torch.promote_types(stored, dtype) == stored
        and trace.header.latent is None
        and not trace.header.owners
    )


class RecordedCheck:
    """A pass of a model with the full cache over the tokens of a trace, compared with the trace.

    Pass `receive` to `kvsim.recorder.hooks.intercepting`, and logits to `check`; both raise
    CaptureError where another model, or another token, was recorded. In the first layer each row of
    q, k and v must be the recorded one, which depend on its own token alone; in the last layer q, k
    and v over all rows, which depend on all layers before; and each recorded token of the response
    must be as likely as it was. Differences that the precisions of model and trace explain pass.
    """

    def __init__(self, trace: Trace, dtype: torch.dtype) -> None:
        stored = DTYPES[dtype_of(trace.source)]
        source = trace.header.source_dtypes.get("q", stored)
        self._trace, self._tolerance = trace, tolerance(DTYPES[dtype], stored, source)

    def receive(self, call: KernelCall) -> None:
        """Compare a kernel call of the first or the last layer."""
        rows, last = slice(call.start, call.k.shape[1]), self._trace.n_layers - 1
        place = self._trace.layer_ids.index(call.layer)
        if place not in (0, last):
            return
        arrays = {"q": call.q, "k": call.k[:, rows], "v": call.v[:, rows]}
        held = {name: self._trace.header.held(name, range(rows.start, rows.stop)) for name in "qkv"}
        for name, part in ((name, part) for name, parts in held.items() for part in parts):
            x = arrays[name][:, part.start - rows.start : part.stop - rows.start]
            full = self._trace.read(name, slice(place, place + 1), part)[0].to(x.device)
            if x.shape != full.shape:
                raise CaptureError(
                    f"{self._trace.name} has {name} of shape {list(full.shape)}, and the model "
                    f"computes {list(x.shape)}; give the model that it was recorded from"
                )
            gap, size = (torch.linalg.vector_norm(y, dim=-1) for y in (x.to(full) - full, full))
            what = f"{name} of layer {call.layer}"
            if place == 0:
                error = relative(gap, size.maximum(size.mean(-1, keepdim=True))).amax(0)
                self._compare(what, error, _FIRST, part.start)
            if place == last:
                self._compare(what, relative(gap.norm(), size.norm())[None], _DEEP)

    def check(self, predictions: Predictions) -> None:
        """Compare the predictions of the R tokens of the response."""
        trace, start = self._trace, self._trace.prompt_len
        if trace.tokens is None or not len(predictions):
            return
        tokens = trace.tokens[start:, None].to(predictions.outputs.device)
        most, own, least, total, mean = torch.empty(5, len(tokens), device=tokens.device)
        for rows, part in predictions.parts():
            logits = part.float()
            most[rows], least[rows] = logits.amax(-1), logits.amin(-1)
            own[rows] = logits.gather(1, tokens[rows])[:, 0]
            total[rows] = logits.logsumexp(-1)
            mean[rows] = logits.log_softmax(-1).clamp(min=-1000).mean(-1)
        size = most.maximum(-least)
        if trace.header.response_logprobs:
            means = torch.tensor(trace.meta.get("mean_logprobs", ()), device=own.device)
            expected = torch.tensor(trace.header.response_logprobs, device=own.device)
            gap = (own - total - expected).abs()
            self._compare("log-likelihood of the response", relative(gap, size), _DEEP, start)
            if len(means):  # also of a model that is certain of each token
                gap = relative((mean - means).abs(), means.abs())
                self._compare("mean log-likelihood of tokens", gap, _DEEP, start)
        elif object_at(trace.meta, "generation").get("temperature") == 0:
            # a near-tie may go either way, and questions were not written by the model
            error = relative(most - own, size)
            for first, stop in trace.header.questions:
                error[first - start : stop - start] = 0
            self._compare("likeliest token", error, _DEEP, start)

    def _compare(self, what: str, error: Tensor, share: float, start: int | None = None) -> None:
        """Raise CaptureError for errors above a share of the tolerance; start: row of the first."""
        allowed = share * self._tolerance
        differing = (~(error <= allowed)).nonzero()[:, 0]
        if len(differing):
            at = ""
            if start is not None:
                first = start + int(differing[0])
                at = f" at {len(differing)} of {len(error)} tokens (first: {first})"
            raise CaptureError(
                f"{self._trace.name}: the model computes another {what}{at}, by "
                f"{float(error.max()):.2g} (relative), expected at most {allowed:.2g}; give the "
                "model that it was recorded from, and its tokens unchanged"
            )


def unchecked(trace: Trace) -> str:
    """Return a remark on a trace that cannot say whether a model has its logits; else empty."""
    if trace.header.response_logprobs or trace.prompt_len == trace.n_pos:
        return ""
    return (
        f"{trace.name}: recorded without the log-likelihoods of its response, so that a model with "
        "logits of another scale would pass for the recorded one; record it again"
    )


def relative(gap: Tensor, size: Tensor) -> Tensor:
    """Return gap / size; 0 where both are 0."""
    return torch.where(gap == 0, 0.0, gap / size)


def relative_change(x: Tensor, full: Tensor) -> Tensor:
    """Return |x - full| / |full| over the last axis; 0 where both are 0."""
    gap, size = (torch.linalg.vector_norm(y, dim=-1) for y in (x - full, full))
    return relative(gap, size)
