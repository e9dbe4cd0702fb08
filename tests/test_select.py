"""Selection, against a sort written from its definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsim.select import select


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


def test_a_protected_entry_stays_below_any_score():
    """Protection is no score: an entry of the lowest one stays before the highest."""
    values = torch.tensor([[[-1e30, 1e30, 1e30]]])
    protected = torch.tensor([[[True, False, False]]])

    keep = select(values, torch.tensor([[1]]), protected, torch.ones_like(protected))

    assert keep.tolist() == [[[True, False, False]]]


@pytest.mark.parametrize("quota", [1, 2, 3])
def test_entries_tied_at_the_cut_stay_from_the_lowest_position(quota):
    """All scores equal: the first entries stay."""
    live = torch.ones(1, 1, 4, dtype=torch.bool)

    keep = select(torch.zeros(1, 1, 4), torch.tensor([[quota]]), ~live, live)

    assert keep[0, 0].tolist() == [i < quota for i in range(4)]
