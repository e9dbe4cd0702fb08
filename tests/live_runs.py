"""Live runs for tests: what each layer of a running model computed, and the same by definition."""

from dataclasses import dataclass, replace

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvsim
from kvsim.core.sources import InMemory
from kvsim.errors import PolicyError
from kvsim.policies import names, parameters
from kvsim.runner.decoding import Decoding, check_live
from traces import short_lengths

COMPOSED = (
    "adakv+snapkv",
    "adakv+expected_attention",
    "criticalkv+snapkv",
    "chunkkv+snapkv",
    "global+tova",
    "ams+tova",
)


def live_policies():
    """All policies of the catalogue that a running model can follow, by name, and compositions."""
    policies = {}
    for name in (*names(), *COMPOSED):
        try:
            given = {"calibration": "prefix:16"} if "calibration" in parameters(name) else {}
            if name == "raas":  # it protects the prompt, which is over these budgets
                given = {"protect_prompt": False}
            policy = kvsim.policy(name, **{**given, **short_lengths(name)})
            check_live(policy)
        except PolicyError:  # a composition alone, or no policy for a running model
            continue
        if policy.sparse is not None or policy.storage is not None:
            continue
        if policy.positions == "slot" or policy.propagation is not None:  # no single layers
            continue
        if "probe_q" in policy.reads.arrays:  # see tests/runner/test_probe.py
            continue
        policies[name] = policy
    return policies


@dataclass
class Live:
    """A finished live run: its Decoding, the logits of all rows [T, V], and each layer's tensors.

    q, out [layer, qhead, T, d], k, v [layer, head, T, d] of all rows, evicted ones included.
    """

    decoding: Decoding
    logits: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    @property
    def record(self):
        """When each entry left."""
        return self.decoding.record()

    def trace(self):
        """The tensors as a trace, of which a replay sees the very numbers of the live run."""
        sketch = self.decoding.sketch
        o_proj = {"o_proj": sketch.read("o_proj")} if sketch.has("o_proj") else {}
        return kvsim.Trace.from_arrays(
            self.q,
            self.k,
            self.v,
            prompt_len=sketch.prompt_len,
            context_len=sketch.header.context_len,
            rope=sketch.ropes,
            formulas=sketch.formulas,
            owners=sketch.header.owners,
            **o_proj,
        )


def run_live(running, policy, budget, tokens, prompt_len, *, step=None, **options):
    """Feed tokens to a running model, the response in steps of so many or at once."""
    calls, moments = {}, [options.pop(name, None) for name in ("compress", "prefill_chunk")]
    policy = replace(policy, schedule=policy.schedule.override(None, None, *moments))

    def observe(call):
        w = call.q.shape[1]
        parts = (call.q, call.k[:, -w:], call.v[:, -w:], call.out)
        calls.setdefault(call.layer, []).append([part.clone() for part in parts])

    n = len(tokens)
    with Decoding(
        running, policy, budget, prompt_len=prompt_len, n_pos=n, observe=observe, **options
    ) as decoding:
        logits = [decoding.feed(tokens[:prompt_len], logits=prompt_len)]
        for start in range(prompt_len, n, step or n):
            piece = tokens[start : start + (step or n)]
            logits.append(decoding.feed(piece, logits=len(piece)))
    layers = [
        [torch.cat(parts, dim=1) for parts in zip(*calls[layer], strict=True)]
        for layer in sorted(calls)
    ]
    tensors = (torch.stack(parts).float() for parts in zip(*layers, strict=True))
    return Live(decoding, torch.cat(logits), *tensors)


def by_definition(live, layer, evicted_at):
    """Output [qhead, T, d] of a layer in float64: row r sees p iff p <= r <= evicted_at[p]."""
    formula = live.decoding.sketch.formulas[layer]
    q, k, v = (x[layer].double() for x in (live.q, live.k, live.v))
    group = len(q) // len(k)
    k, v, last = (x.repeat_interleave(group, 0) for x in (k, v, evicted_at))
    z = formula.scale * q @ k.mT
    if formula.softcap:
        z = formula.softcap * torch.tanh(z / formula.softcap)
    pos = torch.arange(z.shape[-1])
    row = pos[:, None]
    z = z.masked_fill((pos > row) | (row > last[:, None]), -torch.inf)
    if formula.sinks:
        sinks = torch.tensor(formula.sinks, dtype=torch.float64)
        z = torch.cat([z, sinks[:, None, None].expand(-1, len(pos), 1)], -1)
    return z.softmax(-1)[..., : len(pos)] @ v


def output_gap(live, layer, evicted_at):
    """The largest difference to `by_definition`, relative to the row of a head; in float64."""
    expected = by_definition(live, layer, torch.from_numpy(evicted_at).long())
    return relative(live.out[layer], expected)


def relative(mine, expected):
    """The largest difference of rows [..., V], relative to the row."""
    gap = (mine - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)
    return float(gap.max())


class Masked:
    """Attention of all layers that sees what a Record retains; a row always sees itself."""

    def __init__(self, record):
        self.last = torch.from_numpy(record.evicted_at)

    def __call__(self, module, q, k, v, mask, scaling, **rest):
        """q [1, qhead, n, d], k and v [1, head, n, d] -> out [1, n, qhead, d]."""
        n, group = q.shape[2], q.shape[1] // k.shape[1]
        pos, row = torch.arange(n), torch.arange(n)[:, None]
        gone = (pos > row) | (row > self.last[module.layer_idx][:, None])
        gone = (gone & (pos != row)).repeat_interleave(group, 0)
        k, v = (x[0].repeat_interleave(group, 0).double() for x in (k, v))
        z = ((q[0].double() @ k.mT) * scaling).masked_fill(gone, -torch.inf)
        return (z.softmax(-1) @ v).float().transpose(0, 1)[None], None


def logits_behind_masks(monkeypatch, model, tokens, record):
    """Logits of all rows [T, V] where each row sees what a Record retains, and itself."""
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", Masked(record))
        return model(torch.tensor([tokens])).logits[0]


def older(trace, **arrays):
    """A trace without the digest of weights; arrays replace those of the trace."""
    model = {key: x for key, x in trace.meta["model"].items() if key != "weights"}
    header = replace(trace.header, meta={**trace.meta, "model": model})
    if not arrays:
        return kvsim.Trace(trace.source, header, dtype=trace.dtype)
    given = {name: trace.read(name) for name in ("q", "k", "v", "attn_out", "tokens")} | arrays
    return kvsim.Trace(InMemory(given), header, dtype=trace.dtype)


def judged_logits(judge, records):
    """Logits [B, R, V] that predict the R tokens of the response under each record."""
    out = {}
    for numbers, predictions, _ in judge._batches(records):
        full = judge._full.predictions
        same = full[: len(full) - len(predictions)].logits().expand(len(numbers), -1, -1)
        together = torch.cat([same, predictions.logits()], dim=1)
        response = together[:, judge.trace.prompt_len - 1 - judge._full.predicts :]
        out.update(zip(numbers, response, strict=True))
    return torch.stack([out[number] for number in range(len(records))])
