"""Words and numbers that every part shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.schema import merged, rounded, size_in_bytes


@given(st.floats(1e-4, 990_000), st.sampled_from([".3g", "+.3g", ".2g"]))
def test_significant_digits_have_no_power_of_ten(value, form):
    """The same number, written as those next to it in a column or a sentence."""
    text = rounded(value, form)

    assert "e" not in text
    assert float(text) == float(format(value, form))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("4096", 4096), ("7B", 7), ("2kB", 2000), ("3 MB", 3_000_000), ("1.5GB", 1_500_000_000)),
        *(("1TB", 10**12), ("2KiB", 2048), ("3MiB", 3_145_728), ("1.5GiB", 1_610_612_736)),
        *(("1TiB", 1_099_511_627_776), ("0", None), ("-1MB", None), ("1QB", None), ("MiB", None)),
    ],
)
def test_units_of_sizes_are_powers_of_1000_or_of_1024(text, size):
    """MB is a million bytes, and MiB 1,048,576."""
    assert size_in_bytes(text) == size


def test_remarks_that_differ_in_names_are_one_line():
    """Names are listed and counted."""
    of_traces = [f"t{place}: asks 8 tokens" for place in range(5)]

    assert merged(of_traces) == ["t0, t1, t2 and 2 more: asks 8 tokens"]
    assert merged(["a: x\nof all", "b: x\nof all", ""]) == ["a, b: x", "of all"]
