"""Claims of the papers, tested on the traces of a Table: each paper has a file.

A claim is tested where the Table has its results: policies at the same budget, schedule and
prompts, ablations found by their parameters, properties of the traces. Its number is above 0 on a
prompt where the claim is right (with a margin, near 0). A case, such as a budget or a layer, counts
where sign flips over at least 6 prompts, corrected for the number of cases (Holm), put its mean on
one side, and the mean matters (`claim.MATTERS`). A claim holds where nine tenths of its cases are
for it, does not hold where more than a tenth are against it, and is otherwise not decided. Cases in
which the window of a policy is more than half of its budget are out of its range and not tested.
That is an answer about these traces, and not about the papers' models. Every claim is always
listed: where evidence is missing, with what would give it. Claims on printed numbers, and those
that need generation or training, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvsim.analysis.folder import Tabular, as_table
from kvsim.studies.claims.ams import ams
from kvsim.studies.claims.asl import asl
from kvsim.studies.claims.claim import HOLDS, NOT, OPEN, Claim
from kvsim.studies.claims.evidence import Evidence, Seconds
from kvsim.studies.claims.expected_attention import expected_attention
from kvsim.studies.claims.gkv import gkv

__all__ = ["CLAIMS", "HOLDS", "NOT", "OPEN", "Claim", "Evidence", "Seconds", "claims"]

#: The claims of each paper, in the order of its argument.
CLAIMS: Mapping[str, Callable[[Evidence], Iterable[Claim]]] = {
    "AMS, arXiv 2605.23200": ams,
    "G-KV, arXiv 2512.00504": gkv,
    "Expected Attention, arXiv 2510.00636": expected_attention,
    "ASL, arXiv 2601.07667": asl,
}


def claims(table: Tabular, seconds: Seconds | None = None) -> dict[str, list[Claim]]:
    """Test every claim of each paper.

    Args:
        table: of `kvsim.measure` or a sweep, or a run or its folder, with the metrics of its traces
            (`kvsim.measure(trace)`) for claims about traces.
        seconds: duration of events, for the claims about cost.

    Returns:
        The claims of each paper, by its name.

    Raises:
        PolicyError: parameters in the table are no JSON object.
    """
    evidence = Evidence(as_table(table), seconds)
    return {paper: list(make(evidence)) for paper, make in CLAIMS.items()}
