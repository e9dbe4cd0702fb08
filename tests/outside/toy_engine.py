"""A toy engine in numpy, which evicts by SnapKV after the prompt, with bugs to switch on.

python toy_engine.py STATES.npz DUMP.npz [BUG]

STATES has q, k, v, prompt_len and inv_freq; DUMP is for `kvsim conform`.
"""

import sys

import numpy as np
from kvsim_dump import Dump

WINDOW, KERNEL, BUDGET = 8, 7, 64

#: bugs, and the explanation that `kvsim conform` gives; the first six are those of beginners
BUGS = {
    "softmax axis": "softmax-over-heads",
    "attention shifted": "shifted-left",
    "average": "pool=avg",
    "no pooling": "pool=none",
    "kernel": "pool_kernel=5",
    "scale": "unscaled",
    "heads interleaved": "heads-interleaved",
    "no mask": "no-mask",
    "before RoPE": "unrotated",
    "sign": "lowest-scores",
    "window pooled": "window-pooled",
    "logits": "no-softmax",
    "softmax over rows": "by-chance",
}


def softmax(z, axis=-1):
    """Shares of exponentials along an axis."""
    z = np.exp(z - z.max(axis, keepdims=True))
    return z / z.sum(axis, keepdims=True)


def unrotated(x, inv_freq):
    """Rows [..., n, d] before RoPE, of which the two halves of channels are pairs."""
    angle = np.arange(x.shape[-2])[:, None] * inv_freq
    a, b = np.split(x, 2, -1)
    cos, sin = (f(angle).astype(x.dtype) for f in (np.cos, np.sin))
    return np.concatenate([a * cos + b * sin, b * cos - a * sin], -1)


def pooled(vote, kernel, average):
    """The largest or the mean of so many neighbours [..., n]; zeros count as outside of a mean."""
    width, outside = [(0, 0)] * (vote.ndim - 1) + [(kernel // 2,) * 2], 0 if average else -np.inf
    parts = np.pad(vote, width, constant_values=outside)
    parts = np.lib.stride_tricks.sliding_window_view(parts, kernel, -1)
    return parts.mean(-1) if average else parts.max(-1)


def keep(q, k, inv_freq, scale, bug=""):
    """Positions that each head keeps of a layer: q [qhead, n, d], k [head, n, d] of the prompt."""
    heads, n, _ = k.shape
    if bug == "before RoPE":
        q, k = unrotated(q, inv_freq), unrotated(k, inv_freq)
    rows = np.arange(n - WINDOW, n)
    q = q[:, rows].reshape(heads, -1, WINDOW, q.shape[-1])
    if bug == "heads interleaved":
        q = q.reshape(-1, heads, WINDOW, q.shape[-1]).swapaxes(0, 1)
    z = np.einsum("hgwd,hnd->hgwn", q, k) * (1 if bug == "scale" else scale)
    if bug != "no mask":
        z = np.where(np.arange(n) <= rows[:, None], z, -1e30)
    if bug == "softmax axis":
        attention = softmax(z.reshape(-1, *z.shape[2:]), 0).reshape(z.shape)
    elif bug == "softmax over rows":
        attention = softmax(z, -2)
    else:
        attention = z if bug == "logits" else softmax(z)
    if bug == "attention shifted":
        attention = np.roll(attention, -1, -1)
    vote = attention.mean(2)
    if bug != "window pooled":
        vote[..., -WINDOW:] = 0
    if bug != "no pooling":
        vote = pooled(vote, 5 if bug == "kernel" else KERNEL, bug == "average")
    score = vote.mean(1)[:, :-WINDOW] * (-1 if bug == "sign" else 1)
    best = np.argsort(-score, axis=-1, kind="stable")[:, : BUDGET - WINDOW]
    return np.concatenate([np.sort(best), np.broadcast_to(rows, (heads, WINDOW))], -1)


def run(states, path, bug=""):
    """Write what the engine keeps of the states."""
    n, q, k = int(states["prompt_len"]), states["q"], states["k"]
    scale = float(states.get("scale", q.shape[-1] ** -0.5))
    dump = Dump(budget=BUDGET, interval=0, prefill=True)
    for layer in range(len(q)):
        of_layer = (x[layer, :, :n].astype(np.float32) for x in (q, k))
        dump.kept(layer, n - 1, keep(*of_layer, states["inv_freq"], scale, bug))
    dump.save(path)


if __name__ == "__main__":
    run(dict(np.load(sys.argv[1])), *sys.argv[2:])
