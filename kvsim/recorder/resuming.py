"""Whether a trace is that of a capture, so that `resume` keeps it."""

from __future__ import annotations

import json
from typing import Any

from kvsim.core.checks import DTYPES, stored_dtype
from kvsim.core.trace import Trace
from kvsim.recorder.choice import APPLIED
from kvsim.recorder.generation import following, stop_tokens
from kvsim.recorder.provenance import config_differences
from kvsim.recorder.rows import GIVEN
from kvsim.recorder.tokenization import tokenizer_difference
from kvsim.recorder.turns import describe_turns
from kvsim.schema import object_at


def differences(session: Any, trace: Trace) -> list[str]:
    """Return in words how a trace differs from what a capture (`Session`) would record."""
    generation, recorded = (object_at(trace.meta, key) for key in ("generation", "model"))
    prompt = [] if trace.tokens is None else trace.tokens[: trace.prompt_len].tolist()
    ids = session.encoded.ids
    if prompt != ids:
        pairs = enumerate(zip(prompt, ids, strict=False))
        first = next((at for at, (a, b) in pairs if a != b), min(len(prompt), len(ids)))
        expected = f"expected {len(ids)} tokens"
        differing = [
            f"its prompt of {len(prompt)} tokens differs from token {first} on, {expected}"
        ]
    else:
        differing = _prompt_differences(session, trace, given=generation.get("stopped") == GIVEN)
    model, options = session.described, session.options
    exact = DTYPES[stored_dtype(trace.source_dtypes.get("q", "float32"))]
    stored = DTYPES[stored_dtype(DTYPES[trace.stored("q", slice(0, 1), slice(0, 0)).dtype])]
    sources = (object_at(each, "source").get("sha256") for each in (recorded, model))
    settings = session.settings
    weights = model.get("weights")  # not known of a model that is not in memory
    known = weights if weights is None else recorded.get("weights", weights)
    keys = {"model": "name", "model's dtype": "dtype", "attention kernel": "attention"}
    facts = {
        **{f"its {k} is": (recorded.get(key), model[key]) for k, key in keys.items()},
        "the SHA-256 of its GGUF file is": tuple(sources),
        "the digest of its weights is": (known, weights),
        **{f"its {k} is": (generation.get(k), settings.get(k)) for k in (*settings, *APPLIED)},
        "its layers are": (list(trace.layer_ids), list(session.layer_ids)),
        "it is stored in": (stored, options.store_dtype or exact),
        "the rows left out are": (trace.left_out, session.left_out),
    }
    differing += [f"{text} {a}, expected {b}" for text, (a, b) in facts.items() if a != b]
    if config := config_differences(trace.meta, model):
        differing.append(f"its model has another configuration ({', '.join(config)})")
    if (other := tokenizer_difference(trace, session.tokenizer)) is not None:
        differing.append(other)
    if session.probe is not None and trace.header.probe != session.probe:
        differing.append(f"it has {'another' if trace.header.probe else 'no'} probe")
    for name, requested in {"o_proj": options.o_proj, "residual": options.residual}.items():
        if requested is not None and trace.has(name) != requested:
            differing.append(f"it has {'no ' if requested else ''}{name}")
    return differing


def _prompt_differences(session: Any, trace: Trace, *, given: bool) -> list[str]:
    facts = {
        "its labels are": (dict(trace.labels), dict(session.prompt.labels)),
        "the length of its context is": (trace.context_len, session.encoded.context_len),
        "its needle is at tokens": (trace.spans.get("needle", ()), tuple(session.encoded.needle)),
    }
    differing = [f"{text} {a}, expected {b}" for text, (a, b) in facts.items() if a != b]
    response = trace.read("tokens")[trace.prompt_len :].tolist() if given else []
    if response != session.response:
        differing.append(f"its response was {'given' if given else 'generated'}, not this one")
    if session.turns or trace.questions:
        tokens, stop = trace.read("tokens").tolist(), stop_tokens(session.model, session.tokenizer)
        asked = zip(session.turns, trace.questions, strict=False)
        expected = [following(turn.ids, tokens[start - 1], stop) for turn, (start, _) in asked]
        turns = [trace.header.turn(number) for number in range(1, 2 + len(session.turns))]
        if [tokens[a:b] for a, b in trace.questions] != expected or len(expected) + 1 < len(turns):
            differing.append("its later questions are others")
        else:
            ended = [turn.get("stopped") for turn in turns]
            lengths = [b - a for a, b in trace.header.answers(trace.n_pos)[1:]]
            for turn, n, end in zip(session.turns, lengths, ended[1:], strict=True):
                if end != GIVEN and (n > turn.longest or (n < turn.longest and end == "length")):
                    differing.append(f"an answer has {n} of {turn.longest} tokens")
            described = describe_turns(session, trace.header, tokens, ended)
            if json.loads(json.dumps(described)) != turns:
                differing.append("its turns have other labels or answers")
        return differing
    check = session.answer_check(object_at(trace.meta, "text").get("response"))
    if json.loads(json.dumps(check)) != trace.meta.get("answer_check"):
        differing.append("its response was compared with another answer")
    return differing
