"""The claims of each paper, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from results_page.claims.ams import ams_claims
from results_page.claims.asl import selection_claims
from results_page.claims.expected_attention import expected_claims
from results_page.claims.gkv import gkv_claims
from results_page.statistics import Results
from results_page.verdicts import Claim

CLAIMS: Mapping[str, Callable[[Results], Iterable[Claim]]] = {
    "AMS, arXiv 2605.23200": ams_claims,
    "G-KV, arXiv 2512.00504": gkv_claims,
    "Expected Attention, arXiv 2510.00636": expected_claims,
    "ASL, arXiv 2601.07667": selection_claims,
}
