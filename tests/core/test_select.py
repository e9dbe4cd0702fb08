"""Selection, against a sort written from its definition."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.select import apportion, compete, in_rounds, select


def sorted_choice(values, quota, protected, live):
    """Protected first, then score descending, then the lower position."""
    order = sorted(
        (i for i in range(len(values)) if live[i]),
        key=lambda i: (not protected[i], -values[i], i),
    )
    return set(order[: max(quota, sum(p and x for p, x in zip(protected, live, strict=True)))])


@given(data=st.data(), n=st.integers(1, 12), heads=st.integers(1, 3))
def test_selection_is_the_sort_by_protection_score_and_position(data, n, heads):
    """Any scores with many ties, infinite ones too, any protection, any ragged heads and quotas."""
    score = st.sampled_from([-float("inf"), -1.0, 0.0, 0.5, 0.5000001, 1e30])
    mask = st.lists(st.booleans(), min_size=n, max_size=n)
    values = [data.draw(st.lists(score, min_size=n, max_size=n)) for _ in range(heads)]
    protected = [data.draw(mask) for _ in range(heads)]
    live = [data.draw(mask) for _ in range(heads)]
    least = [
        sum(p and x for p, x in zip(*pair, strict=True))
        for pair in zip(protected, live, strict=True)
    ]
    quotas = [data.draw(st.integers(low, n)) for low in least]

    keep = select(
        torch.tensor([values], dtype=torch.float64),
        torch.tensor([quotas]),
        torch.tensor([protected]),
        torch.tensor([live]),
    )

    for head in range(heads):
        expected = sorted_choice(values[head], quotas[head], protected[head], live[head])
        assert set(keep[0, head].nonzero()[:, 0].tolist()) == expected


@given(data=st.data(), n=st.integers(1, 10), parts=st.integers(1, 4))
def test_groups_are_chosen_from_one_by_one(data, n, parts):
    """Each group of each head is the same sort, with a quota of its own; pads belong to none."""
    score = st.sampled_from([-float("inf"), -1.0, 0.0, 0.5])
    mask = st.lists(st.booleans(), min_size=n, max_size=n)
    values = data.draw(st.lists(score, min_size=n, max_size=n))
    protected, live, eligible = data.draw(mask), data.draw(mask), data.draw(mask)
    groups = data.draw(st.lists(st.integers(0, parts - 1), min_size=n, max_size=n))
    quotas = []
    for part in range(parts):
        inside = [i for i in range(n) if groups[i] == part and live[i] and protected[i]]
        quotas.append(data.draw(st.integers(len(inside), n)))

    keep = select(
        torch.tensor([[values]], dtype=torch.float64),
        torch.tensor([[quotas]]),
        torch.tensor([[protected]]) & torch.tensor([[live]]),
        torch.tensor([[live]]),
        torch.tensor([[groups]]),
        torch.tensor([[eligible]]),
    )

    expected = set()
    for part in range(parts):
        here = [
            x and groups[i] == part and (eligible[i] or protected[i]) for i, x in enumerate(live)
        ]
        expected |= sorted_choice(values, quotas[part], protected, here)
    assert set(keep[0, 0].nonzero()[:, 0].tolist()) == expected


@given(
    data=st.data(), n=st.integers(1, 8), heads=st.integers(1, 4), share=st.floats(0, 1, width=32)
)
def test_heads_compete_for_the_places_of_their_layer(data, n, heads, share):
    """Each head's floor first, then the best of all; ties by position, then by head."""
    score = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    cells = [(h, p) for h in range(heads) for p in range(n)]
    value = {cell: data.draw(score) for cell in cells}
    protected = {cell: data.draw(st.booleans()) for cell in cells}
    live = {cell: data.draw(st.booleans()) for cell in cells}
    floor = []
    for h in range(heads):
        own = [c for c in cells if c[0] == h and live[c]]
        always = sum(protected[c] for c in own)
        floor.append(data.draw(st.integers(always, max(always, len(own)))))
    total = sum(floor) + int(share * (sum(live.values()) - sum(floor)))

    def grid(of):
        return torch.tensor([[[of[h, p] for p in range(n)] for h in range(heads)]])

    pos = torch.arange(n).expand(1, heads, n)
    counts = compete(
        grid(value),
        torch.tensor([floor]),
        torch.tensor([total]),
        grid(protected) & grid(live),
        grid(live),
        pos,
    )

    kept = set()
    for h in range(heads):
        own = sorted(
            (c for c in cells if c[0] == h and live[c]),
            key=lambda c: (not protected[c], -value[c], c[1]),
        )
        kept |= set(own[: floor[h]])
    rest = sorted(
        (c for c in cells if live[c] and c not in kept), key=lambda c: (-value[c], c[1], c[0])
    )
    kept |= set(rest[: max(0, total - len(kept))])
    assert counts[0].tolist() == [sum(c[0] == h for c in kept) for h in range(heads)]


@st.composite
def shares(draw):
    """(total, weights, floor, cap) that fit together."""
    cap = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))
    floor = [draw(st.integers(0, c)) for c in cap]
    weight = [draw(st.sampled_from([0.0, 0.1, 0.25, 1.0, 1.0, 3.7])) for _ in cap]
    return draw(st.integers(sum(floor), sum(cap))), weight, floor, cap


@given(shares())
def test_apportioned_shares_are_exact_and_near_the_ideal(case):
    """The sum is exact, floors and caps hold, and no share is a unit away from the ideal one."""
    total, weight, floor, cap = case
    found = apportion(
        torch.tensor(total), torch.tensor(weight).double(), torch.tensor(floor), torch.tensor(cap)
    ).tolist()

    assert sum(found) == total
    assert all(low <= x <= high for low, x, high in zip(floor, found, cap, strict=True))
    ideal = ideal_shares(total, weight, floor, cap)
    assert all(abs(x - i) < 1 + 1e-6 for x, i in zip(found, ideal, strict=True))


def ideal_shares(total, weight, floor, cap):
    """floor + min(room, mu * weight) by bisection; what has no weight divides what is left."""
    left, out = total - sum(floor), [float(x) for x in floor]
    for part in (list(weight), [float(w == 0) for w in weight]):
        room = [c - o if w > 0 else 0.0 for c, o, w in zip(cap, out, part, strict=True)]
        low, high = 0.0, 1e6
        for _ in range(200):
            middle = (low + high) / 2
            used = sum(min(r, middle * w) for r, w in zip(room, part, strict=True))
            low, high = (middle, high) if used < left else (low, middle)
        given_now = [min(r, low * w) for r, w in zip(room, part, strict=True)]
        out = [o + g for o, g in zip(out, given_now, strict=True)]
        left -= sum(given_now)
    return out


@given(shares(), st.data())
def test_dealing_is_one_unit_per_round(case, data):
    """The closed form is what a loop over rounds deals, whatever the order of priority."""
    _, _, _, cap = case
    total = data.draw(st.integers(0, sum(cap) + 2))
    priority = [data.draw(st.sampled_from([0.0, 1.0, 2.0])) for _ in cap]
    found = in_rounds(torch.tensor(total), torch.tensor(cap), torch.tensor(priority)).tolist()

    expected, left = [0] * len(cap), total
    turn = sorted(range(len(cap)), key=lambda i: (-priority[i], i))
    while left and expected != cap:
        for i in turn:
            if left and expected[i] < cap[i]:
                expected[i] += 1
                left -= 1
    assert found == expected


def test_equal_fractions_go_to_the_lower_share():
    """Largest remainders: thirds that rounding made unequal are equal."""
    ones = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64)

    found = apportion(torch.tensor(4), ones, torch.zeros(3).long(), torch.full((3,), 4))

    assert found.tolist() == [2, 1, 1]
