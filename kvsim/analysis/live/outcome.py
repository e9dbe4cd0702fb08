"""What a running model did under a policy, as arrays; filled in by `kvsim.runner`."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.analysis.arrays import Floats
from kvsim.analysis.output.error import OutputError
from kvsim.core.record import Record
from kvsim.core.trace import Trace


@dataclass(frozen=True)
class Forced:
    """The recorded response fed to the model under the policy, beside the same with the full cache.

    Of R tokens of the response, each predicted by the row before it: nll, full_nll [R], their
    negative log-likelihood in nats; kl [R], the divergence of the prediction from that of the full
    cache, KL(full || live), in nats; agreement [R], 1 where the most likely token is the same.
    stream_error [layer, row]: |h' - h| / |h| of the input of each layer of the model, rows after
    the prompt. output: the error of the attention output of the record's layers, all rows.
    """

    nll: Floats
    full_nll: Floats
    kl: Floats
    agreement: Floats
    stream_error: Floats
    output: OutputError


@dataclass(frozen=True)
class Generated:
    """A response that the model wrote under the policy.

    tokens: of the response. right: whether it has the right answer; None where nothing says what is
    right. answered: tokens until the answer is complete, None without one. full_right: as right,
    with the full cache. seconds: of decoding, without the prefill.
    """

    tokens: tuple[int, ...]
    right: bool | None
    answered: int | None
    full_right: bool | None
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """Both ways of running one prompt under one policy; None for what was not run.

    peak_bytes: most bytes of keys and values that were live at once in decoding, from the event
    that ends the prefill on; full_bytes: of the full cache at the end.
    """

    forced: Forced | None
    generated: Generated | None
    peak_bytes: int
    full_bytes: int


@dataclass(frozen=True)
class LiveSubject:
    """A trace, the record of a live run of its tokens or its prompt, and the outcome."""

    trace: Trace
    record: Record
    outcome: Outcome
