"""Claims of the papers, tested on the traces of a Table: each paper has a file.

A claim is a sentence about cells: budgets, layers, or policies that it names, all of the same
prompts. The number of cells in which it has to be right follows from the paper's words:
"consistently", "every" and a list of policies are `ALL`, all others `MOST`. A cell has a number per
prompt, above 0 where the sentence is right, which matters from `claim.MATTERS` on. One test over
the prompts with all cells (`kvsim.analysis.significance.at_least`) has a p-value of the sentence,
and one of its contrary: a sentence holds, does not hold, or is not decided, as always with fewer
than 6 prompts. Cells in which the window of a policy is more than half of its budget are not
tested.

Results are about these traces, not about the papers' models. Every claim is listed, also without
evidence, with the replays that would produce it. Claims on printed numbers, and claims that need
generation or training, are left out.
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
