"""What consoles show: one short line of an object, and progress."""

import pytest

import kvsim
from kvsim.progress import progress_bar
from kvsim.sweeps import replay_all
from traces import random_trace

EVIL = "<script>alert('x')</script>&amp;"


def make_trace(name="small", n=24, meta=None):
    """A random trace of 2 layers and 2 KV heads."""
    return random_trace(n=n, seed=len(name), prompt_len=12, name=name, meta=meta)


@pytest.fixture(scope="module")
def swept():
    """A run of two policies at two budgets over two traces, the first with a hostile name."""
    return replay_all(
        [make_trace(EVIL), make_trace()],
        ["tova", "snapkv"],
        [8, "50%"],
        fit=True,
        metrics=["entries_seen", "output_error"],
    )


def test_texts_are_one_short_line(swept):
    """What a console shows of an object has no arrays."""
    trace = make_trace()
    record = kvsim.replay(trace, "ams", 20)

    assert repr(record) == (
        "Record('ams', trace='small', budget=20, after 'every 512 rows', layers=2, heads=2, "
        "pos=24, events=0)"
    )
    assert repr(kvsim.policy("knorm")) == "Policy('knorm', after 'the prompt')"
    assert repr(kvsim.policy("ams")).endswith("more, after 'every 512 rows')")
    assert repr(swept) == "Run(tova, snapkv@scaled; records=8, failed=0)"
    assert "; 2 prompts)" in repr(kvsim.compare(swept))


def test_no_bar_outside_of_terminals(capsys):
    """In a pipe short work prints nothing."""
    with progress_bar("cells") as show:
        show(1, 2, "half")

    assert capsys.readouterr() == ("", "")
