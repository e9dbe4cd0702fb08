"""Words and numbers that every part shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.schema import rounded


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
