"""What must be read together stays within its limits (`tests/sizes.py`)."""

import pytest
from sizes import AXES, CLOSURES, CONTRACTS, closure, members, outside, screen


@pytest.mark.parametrize("name", CLOSURES)
def test_an_import_brings_few_lines(name):
    """A policy can be read with its contract alone, a replay without store or names."""
    code, most = CLOSURES[name]
    assert closure(code) <= most


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_fits_on_a_screen(contract):
    """Public members, fields included."""
    assert len(members(contract)) <= CONTRACTS[contract]


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_lives_in_one_room(axis):
    """Few files outside the room of an axis name it."""
    *_, most = AXES[axis]
    assert len(outside(axis)) <= most, outside(axis)


def test_commands_and_options_of_replay_fit_on_a_screen():
    """At most fourteen of each."""
    sizes = screen()
    assert max(sizes["commands"], sizes["options of replay"]) <= 14
