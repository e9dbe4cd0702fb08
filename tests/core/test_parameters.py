"""Parameters: what an annotation says is checked, worded and shown in one way."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.core.parameters import (
    Above,
    AtLeast,
    AtMost,
    Below,
    Between,
    Finite,
    Odd,
    Parameter,
)
from kvsim.core.pieces import LayerBudgets, Scorer
from kvsim.errors import PolicyError
from kvsim.policies import CATALOGUE, describe, names

REFUSED = object()


def outcome(hint, value):
    """The value that a parameter with this annotation holds, or REFUSED."""
    try:
        return Parameter("x", hint, None).value(value, "piece")
    except PolicyError as error:
        assert str(error).startswith(f"piece: x is {value!r}; expected ")  # noqa: PT017  not raised
        return REFUSED


anything = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.sampled_from(["max", "avg", (), [], 2j, np.float32(0.5), np.int64(3), np.True_]),
)
numbers = st.integers(-9, 9) | st.floats(-9, 9) | st.sampled_from([math.inf, -math.inf, math.nan])


@given(anything)
def test_an_integer_is_an_integer_and_no_truth_value(value):
    """Python's and numpy's integers pass, as plain ones; True, 2.0 and text do not."""
    fits = isinstance(value, int | np.integer) and not isinstance(value, bool)
    found = outcome(int, value)

    assert (found is not REFUSED) == fits
    assert not fits or (found == value and type(found) is int)


@given(anything)
def test_a_number_may_be_an_integer(value):
    """Any real number passes for a float, without becoming another one; True does not."""
    real = isinstance(value, int | float | np.integer | np.floating)
    fits = real and not isinstance(value, bool)
    found = outcome(float, value)

    assert (found is not REFUSED) == fits
    assert not fits or found == value or math.isnan(value)
    assert not fits or type(found) in (int, float)


@given(anything)
def test_choices_truth_values_and_none_are_exactly_those(value):
    """A choice is one of the words, a bool is no number, None passes where it is named."""
    same = type(value) is str and value in ("max", "avg")

    assert (outcome(Literal["max", "avg"], value) is not REFUSED) == same
    assert (outcome(Literal["max", "avg"] | None, value) is not REFUSED) == (same or value is None)
    assert (outcome(bool, value) is not REFUSED) == (type(value) is bool)
    assert outcome(Any, value) is value


BOUNDS = {
    AtLeast(2): lambda x: x >= 2,
    AtMost(2): lambda x: x <= 2,
    Above(2): lambda x: x > 2,
    Below(2): lambda x: x < 2,
    Between(-1, 2): lambda x: -1 <= x <= 2,
    Finite(): math.isfinite,
}


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
@given(numbers)
def test_a_bound_holds_what_it_says(bound, value):
    """As the comparison of Python does, also behind a None; NaN is in no bound."""
    fits = bool(BOUNDS[bound](value)) and not math.isnan(value)

    for hint in (Annotated[float, bound], Annotated[float, bound] | None):
        assert (outcome(hint, value) is not REFUSED) == fits
    assert outcome(Annotated[float | None, bound], None) is None
    assert outcome(Annotated[float, bound, Finite()], value) in (
        [value] if fits and math.isfinite(value) else [REFUSED]
    )


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "an integer"),
        (Annotated[int, AtLeast(1)], "an integer of at least 1"),
        (Annotated[int, AtLeast(0)] | None, "an integer of at least 0, or None"),
        (Annotated[int, AtLeast(1), Odd()], "an integer of at least 1 and odd"),
        (Annotated[float, Between(0, 1)], "a number from 0 to 1"),
        (Annotated[float, Above(0), Finite()], "a number above 0 and finite"),
        (Annotated[float, AtLeast(0), Below(1)], "a number of at least 0 and below 1"),
        (
            Annotated[int, AtLeast(1)] | Annotated[float, Above(0), AtMost(1)] | None,
            "an integer of at least 1, a number above 0 and at most 1, or None",
        ),
        (bool, "True or False"),
        (Literal["a", "b"], "'a' or 'b'"),
        (Literal["a", "b"] | None, "'a', 'b' or None"),
        (str | kvsim.Trace | None, "text, a Trace, or None"),
        (Any, "any value"),
    ],
)
def test_annotations_in_words(hint, words):
    """Errors and lists say in the same words what a value must be."""
    assert Parameter("x", hint, None).expected == words


class Mine(Scorer):
    """A user's own scorer: a field with bounds, one without, and one that cannot be checked."""

    sink: Annotated[int, AtLeast(0)] = 4
    weight: float = 1.0
    table: list[int] | None = None

    def score(self, view):
        """Positions."""
        return view.pos.double()


@dataclass(frozen=True)
class Pair(LayerBudgets):
    """Two parameters that go together."""

    low: Annotated[int, AtLeast(1)] = 1
    high: Annotated[int, AtLeast(1)] = 2

    def __post_init__(self):
        """The order, after the bounds."""
        super().__post_init__()
        if self.high < self.low:
            raise PolicyError(f"{self.label}: high is {self.high}; expected at least low")

    def budgets(self, view, budget):
        """Not replayed here."""
        raise NotImplementedError


def test_a_piece_of_a_users_own_is_checked_by_its_annotations():
    """The error names the class; what cannot be checked is taken as it is."""
    assert Mine(sink=np.int64(2)) == Mine(sink=2)
    assert type(Mine(sink=np.int64(2)).sink) is int
    assert Mine(table=[1, "any"]).table == [1, "any"]
    with pytest.raises(FrozenInstanceError):
        Mine().sink = 3
    with pytest.raises(PolicyError, match=r"^Mine: sink is -1; expected an integer of at least 0$"):
        Mine(sink=-1)
    with pytest.raises(PolicyError, match=r"^Mine: weight is '1'; expected a number$"):
        Mine(weight="1")
    with pytest.raises(PolicyError, match=r"^Pair: low is 0; expected an integer of at least 1$"):
        Pair(low=0, high=-1)
    with pytest.raises(PolicyError, match=r"^Pair: high is 1; expected at least low$"):
        Pair(low=2, high=1)


@pytest.mark.parametrize("name", names())
def test_every_parameter_of_the_catalogue_says_what_it_must_be(name):
    """Values of policies and presets are within the bounds, and a complex number within none."""
    base, _, preset = name.partition("@")
    entry = CATALOGUE[base].preset(preset)

    for key, value in describe(name).params.items():
        parameter = entry.parameters[key]
        assert parameter.expected != "any value"
        assert parameter.value(value, name) == value
        with pytest.raises(PolicyError, match=f"{key} is 2j"):
            parameter.value(2j, name)
