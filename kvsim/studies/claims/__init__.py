"""Claims of the papers, tested on the traces of a Table: each paper has a file.

A claim is a sentence about cells: budgets, layers, or policies that it names, all of the same
prompts. How many of them it has to be right in is read from the paper's words: "consistently",
"every" and a list of policies are `ALL`, all others `MOST`. In a cell it is a number per prompt,
above 0 where the sentence is right, and matters from `claim.MATTERS` on. One test over the prompts
that have all cells (`kvsim.analysis.significance.at_least`) gives a p-value of the sentence, and
one of its contrary: a sentence holds, does not hold, or is not decided, as always with fewer than
6 prompts. Cells in which the window of a policy is more than half of its budget are out of its
range and not tested.

That is an answer about these traces, and not about the papers' models. Every claim is always
listed: where evidence is missing, with what would produce it. Claims on printed numbers, and those
that need generation or training, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvsim.analysis.folder import Tabular, as_table
from kvsim.studies.claims.ams import ams
from kvsim.studies.claims.asl import asl
from kvsim.studies.claims.claim import Claim
from kvsim.studies.claims.evidence import Evidence, Seconds
from kvsim.studies.claims.expected_attention import expected_attention
from kvsim.studies.claims.gkv import gkv

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
