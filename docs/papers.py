# ruff: noqa: INP001 - lies in docs/, which is no package
"""Formulas as papers print them, so that their numbers can be followed.

What kvsim counts itself is in `kvsim.studies.cost`. Where a printed number does not
follow from its formula, or the formula leaves out what matters, docs/cost.md says so.

* ASL: Taniguchi et al., "Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference",
  arXiv 2601.07667, appendix B (its equations have no numbers).
* G-KV: Liao et al., "G-KV: Decoding-Time KV Cache Eviction with Global Attention",
  arXiv 2512.00504, appendix G.
* Expected Attention: Devoto, Jeblick and Jegou, "Expected Attention: KV Cache Compression by
  Estimating Attention from Future Queries Distribution", arXiv 2510.00636, appendix F.
"""

from __future__ import annotations

from kvsim.studies.cost.model import Model

# ------------------------------------------------------------------------------ ASL, appendix B


def asl_layer_time(rows: float, dim: int) -> float:
    """T_attn(n) = n^2 d + n d^2 (B.1), in arbitrary units."""
    return rows**2 * dim + rows * dim**2


def asl_prefill_ratio(
    selection_layer: float, n_layers: int, kept: int, context: int, dim: int
) -> float:
    """T_ASL / T_full of the time to first token (B.1); kept = k rows go on of context = n.

    (L_sel + 1) / L + (L - L_sel - 1) / L * T_attn(k) / T_attn(n)
    """
    q = asl_layer_time(kept, dim) / asl_layer_time(context, dim)
    before = selection_layer + 1
    return before / n_layers + (n_layers - before) / n_layers * q


def two_pass_prefill_ratio(
    selection_layer: float, n_layers: int, kept: int, context: int, dim: int
) -> float:
    """The same for a second pass over all layers (not in the paper): (L_sel + 1) / L + q."""
    q = asl_layer_time(kept, dim) / asl_layer_time(context, dim)
    return (selection_layer + 1) / n_layers + q


def asl_decode_ratio(kept: int, context: int) -> float:
    """T_ASL / T_full of the time per output token (B.2): k / n."""
    return kept / context


def asl_cache_numbers(n_layers: int, n_heads: int, dim: int, entries: int) -> int:
    """M_full and M_ASL-KV, in numbers and not in bytes (B.3): 2 L h d n."""
    return 2 * n_layers * n_heads * dim * entries


def asl_overhead_numbers(look_back: int, context: int, pool_kernel: int) -> float:
    """M_ASL-OV, pooled scores and ranks, in numbers (B.3): 2 L_obs n / w, w the kernel."""
    return 2 * look_back * context / pool_kernel


# ----------------------------------------------------------------------------- G-KV, appendix G


def gkv_cache_bytes(
    n_layers: int, n_heads: int, dim: int, entries: float, batch: int = 1, number_bytes: float = 2
) -> float:
    """Keys and values of `batch` sequences: 28 * 128 * 2 * 16384 * 2 * 2 in the paper."""
    return n_layers * dim * n_heads * entries * 2 * number_bytes * batch


def gkv_cache_share(budget: int, interval: int, context: int) -> float:
    """Share of the cache after compression: (b + s) / sequence length."""
    return (budget + interval) / context


def gkv_score_share(budget: int, window: int, dim: int) -> float:
    """The score cache as a share of the KV cache: (b - w) / (2 b d), roughly 1 / (2 d)."""
    return (budget - window) / (2 * budget * dim)


def gkv_score_bytes(
    n_layers: int, n_heads: int, budget: int, window: int, batch: int = 1, number_bytes: float = 2
) -> float:
    """F in R^(h_kv x (b - w)) of every layer, in the data type of the cache."""
    return n_layers * n_heads * (budget - window) * number_bytes * batch


def mask_bytes(n_layers: int, n_heads: int, rows: int, batch: int = 1) -> int:
    """A dense attention mask of one byte per row and entry: 16 * 28 * 2 * 4096 * 4096."""
    return batch * n_layers * n_heads * rows * rows


# -------------------------------------------------------------- Expected Attention, appendix F


def ea_prefill_flops(model: Model, rows: int) -> float:
    """FLOPs of a forward pass (appendix F), with n = rows and the model's own V, D, H, d, D_ff.

    4 n V D + L (6 n D H d + 4 n^2 H d + 3 H n^2 + 2 n D H d + 4 n D D_ff)

    The embedding counts as a product, keys and values as if every query head had its own, the MLP
    as two matrices, and every row sees all others.
    """
    n, width = rows, model.n_qheads * model.dim
    attention = 6 * n * model.hidden * width + 2 * n * width * model.hidden
    attention += 4 * n**2 * width + 3 * model.n_qheads * n**2
    projections = model.hidden * (model.n_qheads + model.n_heads) * model.entry_size
    dense = 4 * n * (model.layer_matrices - projections) / 3  # of the three matrices of the MLP
    return 4 * n * model.vocab * model.hidden + model.n_layers * (attention + dense)


def ea_overhead_flops(model: Model, rows: int, *, reproject: bool = False) -> float:
    """FLOPs of the scores of a prompt, which the paper does not write down.

    Per layer: mean and covariance of the queries, 2 n H d + 2 n H d^2; both turned by the mean
    rotation, H (4 d^3 + 2 d^2); k.Sigma k, 2 n H d^2 + 2 n H d; mu.k, 2 n H d; the softmax, 3 H n;
    norms of values, 2 n G d for G KV heads. reproject: queries are computed from the hidden states
    a second time, 2 n D H d, as the released code does.
    """
    n, h, d = rows, model.n_qheads, model.dim
    moments = 2 * n * h * d + 2 * n * h * d**2 + h * (4 * d**3 + 2 * d**2)
    logits = 2 * n * h * d**2 + 2 * n * h * d + 2 * n * h * d
    layer = moments + logits + 3 * h * n + 2 * n * model.n_heads * d
    if reproject:
        layer += 2 * n * model.hidden * h * d
    return model.n_layers * layer
