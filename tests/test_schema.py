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
    ("value", "form", "text"),
    [(1171.4, ".3g", "1170"), (490.2, ".3g", "490"), (2e-7, ".3g", "2e-07"), (25, ".0e", "2e+01")],
)
def test_other_numbers_are_as_python_formats_them(value, form, text):
    """Those far from 1, and other forms."""
    assert rounded(value, form) == text


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(2.4e-5, ".3f", "2.4e-05"), (-4e-4, "+z.3f", "-0.0004"), (-1e-9, "+z.3f", "+0.000")],
)
def test_three_decimals_show_a_small_number(value, form, text):
    """Two small divergences are no column of zeros; noise of rounding is a zero without a minus."""
    assert rounded(value, form) == text


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


def test_remarks_that_differ_in_names_and_numbers_are_one():
    """Names are counted, numbers are ranges, `--set` has the smallest; layers are no numbers."""
    of_traces = [f"t{place}: asks {place + 8} tokens (1.{place} times)" for place in range(5)]
    budgets = [f"snapkv: exceeds half of {n}; --set snapkv.window={n // 4}" for n in (32, 64)]
    windows = [f"windows in layers 0, {layer}" for layer in (2, 3, 2)]

    assert merged(of_traces) == ["t0, t1, t2 and 2 more: asks 8 to 12 tokens (1.0 to 1.4 times)"]
    assert merged(budgets) == ["snapkv: exceeds half of 32 to 64; --set snapkv.window=8"]
    assert merged(windows) == ["windows in layers 0, 2", "windows in layers 0, 3"]
    assert merged(["a: 2 prompts", "b: 3 prompts"]) == ["a: 2 prompts", "b: 3 prompts"]
    assert merged(["a: x\nof all", "b: x\nof all", ""]) == ["a, b: x", "of all"]
    assert merged(["budget 9 holds all 5 tokens", "budget 9 holds all 7 tokens"]) == [
        "budget 9 holds all 5 to 7 tokens"
    ]
    assert merged(["a: asks 1 token", "b: asks 4 tokens"]) == ["a, b: asks 1 to 4 tokens"]
    assert merged(["a: asks 1 token", "b: asks 1 token"]) == ["a, b: asks 1 token"]
