"""OpenVINO GenAI entry by entry: sums of pooled attention, whole blocks, and KVCrush."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.testing.loops.event import Decision, Scored, Sets, unprotected
from reference.allocation import gap
from reference.event import Event


def openvino(event: Event) -> Scored:
    """The sum over steps of the largest attention among an entry and those behind it.

    With `norm_sum` over the number of rows that counted and saw it.
    """
    kernel, last = int(event.params["pool_kernel"]), event.column("last row of openvino")[0]
    first = max(0, event.prompt_len - (int(event.params["window"]) or event.prompt_len))
    rows = range(int(last.get(0, -1.0)) + 1, event.row + 1)
    last[0] = float(event.row)  # the first block stays, and its position 0
    prompt = [row for row in rows if first <= row < event.prompt_len]
    steps = [prompt, *([row] for row in rows if row >= event.prompt_len)]
    live, sums = event.live[0], event.column("sums of openvino")
    assert all(others == live for others in event.live)
    for step in filter(None, steps):
        received = dict.fromkeys(live, 0.0)
        for query_head in range(len(event.logits)):
            for row in step:
                for pos, weight in event.attention(query_head, row).items():
                    received[pos] += weight
        for i, pos in enumerate(live):
            window = [received[other] for other in live[i : i + kernel]]
            sums[0][pos] = sums[0].get(pos, 0.0) + max(window)
    score = dict(sums[0])
    if event.params["aggregation"] == "norm_sum":
        score = {pos: x / (event.row + 1 - max(pos, first)) for pos, x in score.items()}
    return Scored([dict(score) for _ in event.live], unprotected(event), rounded=True)


def sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Whole blocks that stay at the beginning and at the end."""
    page = int(params["page"])
    return tuple((int(params[end]) + page - 1) // page for end in ("sink", "recent"))


def blocks(event: Event, scored: Scored, protected: Sets) -> tuple[Sets, list[Decision]]:
    """Whole blocks between the ends leave, the lowest first, until the rest fits the budget."""
    page, live = int(event.params["page"]), event.live[0]
    first, recent = sizes(event.params)
    whole = [live[i : i + page] for i in range(0, len(live) - len(live) % page, page)]
    between = whole[first : len(whole) - recent]
    room = event.budgets[0] // page - first - recent
    score = [sum(scored.values[0][p] for p in block) for block in between]
    free = [i for i, block in enumerate(between) if not protected[0].intersection(block)]
    free.sort(key=lambda i: (score[i], i))
    number = max(0, min(len(between) - room, len(free)))
    leaves, decisions = sorted(free[:number]), list[Decision]()
    if 0 < number < len(free):
        decisions.append(gap(score[free[number]], score[free[number - 1]]))
    crush = int(event.params["crush"])
    if crush and len(leaves) >= crush:
        sums = event.column("sums of openvino")[0]
        of_blocks = [[sums[p] for p in block] for block in between]
        returned, cut = _crush(event.params, of_blocks, leaves)
        leaves = [i for i in leaves if i not in returned]
        decisions.append(cut)
    gone = {p for i in leaves for p in between[i]}
    return [{p for p in live if p not in gone} for _ in event.live], decisions


def _crush(
    params: Mapping[str, Any], sums: Sequence[Sequence[float]], leaves: Sequence[int]
) -> tuple[list[int], Decision]:
    """Blocks that stay although they are among the lowest, and what decided the bits."""
    page, crush = int(params["page"]), int(params["crush"])
    places = [(i, j) for i in range(len(sums)) for j in range(page)]
    order = sorted(places, key=lambda at: (-sums[at[0]][at[1]], at))
    half = len(order) // 2
    above = set(order[:half])
    (i, j), (k, m) = order[half - 1], order[half]
    anchor = {
        "mean": [
            2 * sum((i, j) in above for i in range(len(sums))) > len(sums) for j in range(page)
        ],
        "zeros": [False] * page,
        "ones": [True] * page,
        "alternating": [j % 2 == 1 for j in range(page)],
    }[params["anchor"]]
    apart = [sum(((i, j) in above) != anchor[j] for j in range(page)) for i in range(len(sums))]
    ranked = sorted(leaves, key=lambda i: (apart[i], i))
    step = len(ranked) // crush
    return [ranked[i * step] for i in range(crush)], gap(sums[i][j], sums[k][m])
