"""FINCH: keeps the entries that the question at the end of the prompt attends to.

Corallo and Papotti, "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models",
TACL 2024, arXiv 2408.00167. FINCH is SnapKV without pooling, with the question after a text as
window. A later row attends to more entries, so each of its weights is smaller. With n_r the number
of entries before the own entry of row r, the score is

    s_j = mean over the window and the group of n_r a_r(j).

Deviations. Only the beginning of the paper could be read; the score is that of kvpress
(FinchPress), whose delimiter token finds the question. Here `window` is the number of rows of the
question. The paper reads a text in chunks, each followed by the question, and evicts after each of
them; kvpress can rank chunk by chunk. Here one event ranks the whole text. The paper and kvpress
then rotate the keys to their slots in the cache; here they stay at their positions.
"""

from __future__ import annotations

from kvsim.core.lazy import Tensor, torch
from kvsim.core.view import View
from kvsim.policies.window import Windowed, before_window, first_of, over_heads


class Finch(Windowed):
    """Attention of a window, each row times the number of entries before it."""

    def score(self, view: View) -> Tensor:
        """mean_r n_r a_r(j), averaged over the group; [L, H, n]."""
        rows = torch.arange(first_of(view, self.window), view.row + 1, device=view.pos.device)
        before = view.live.unsqueeze(2) & (view.pos.unsqueeze(2) < rows.unsqueeze(-1))
        weights = view.attn(self.window)  # [L, H, G, w, n]
        vote = (weights * before.sum(-1)[:, :, None, :, None]).mean(3)
        score = over_heads(vote, 2).div_(vote.shape[2])
        return score.where(before_window(view, self.window), 0.0)
