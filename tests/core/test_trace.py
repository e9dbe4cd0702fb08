"""Traces in memory: shapes, dtypes, attention, digest, bad input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.attention import Rope, causal_attention
from kvsim.core.parts import by_query_head
from kvsim.core.trace import Trace
from kvsim.errors import NeedsError, PositionError, TraceError
from reference import metrics
from traces import random_arrays, random_trace


def arrays(**sizes):
    """Random q, k, v."""
    return random_arrays(**{"n": 40, "size": 1.0} | sizes)


def make(prompt_len=10, **options):
    """A trace of random arrays."""
    return random_trace(**{"n": 40, "size": 1.0, "prompt_len": prompt_len} | options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_compute_dtype(dtype):
    """float64 stays, all others compute in float32, and the dtype of the source is remembered."""
    trace = make(dtype=dtype)

    expected = torch.float64 if dtype == torch.float64 else torch.float32
    arrays_of = trace.read("q"), *trace.full()
    assert {trace.dtype, *(x.dtype for x in arrays_of)} == {expected}
    assert trace.header.source_dtypes["q"] == str(dtype).removeprefix("torch.")


def test_attention_is_computed_where_it_is_missing():
    """Without recorded attention, `full` gives causal attention of q, k, v, layer by layer."""
    trace = make()
    data = arrays()

    last, _ = trace.full(slice(1, 2))
    out, lse = trace.full()

    assert last.data_ptr() == trace.full(slice(1, 2))[0].data_ptr()
    for layer in range(2):
        expected = causal_attention(*(data[name][layer] for name in "qkv"), trace.formulas[layer])
        assert torch.equal(out[layer], expected[0])
        assert torch.equal(lse[layer], expected[1])
    assert not trace.has("attn_out")


def test_recorded_attention_is_used():
    """Recorded attention output is what `full` gives, and what is missing beside it is computed."""
    own = 1.25 * make().full()[0]

    trace = make(attn_out=own)

    assert torch.equal(trace.full()[0], own)
    assert torch.equal(trace.full()[1], make().full()[1])


@given(
    rows=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    pos=st.none() | st.lists(st.integers(0, 11), min_size=1, max_size=5),
    layer=st.integers(-2, 1),
)
def test_attention_rows_equal_the_definition(rows, pos, layer):
    """Any rows and columns of full attention equal a float64 loop, and future columns are 0."""
    trace = make(n=12, dtype=torch.float64, prompt_len=4)
    expected = metrics.attention(
        trace.read("q")[layer], trace.read("k")[layer], trace.formulas[0].scale
    )

    found = trace.attention(layer, rows, pos)

    columns = range(12) if pos is None else pos
    assert np.abs(found.numpy() - expected[:, rows][:, :, columns]).max() < 1e-12


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (3, "positions are 3; expected"),
        ([0, -99], r"positions are \[0, -99\]; expected a slice or integers in 0\.\."),
    ],
)
def test_positions_are_a_list_of_integers(at, message):
    """A mask, a number and a table are refused, and a position that is not there is named."""
    with pytest.raises(PositionError, match=message):
        make().attention(0, at)


def test_per_query_head():
    """The view per query head has as many KV heads as query heads and the same attention."""
    trace = make()

    view = by_query_head(trace)

    assert (view.n_heads, view.group) == (4, 1)
    assert torch.equal(view.read("k"), trace.read("k").repeat_interleave(2, dim=1))
    assert torch.equal(view.read("v", slice(0, 1), slice(3, 5)), view.read("v")[:1, :, 3:5])
    assert torch.equal(view.full()[0], trace.full()[0])
    assert torch.allclose(view.attention(1, [5, 30]), trace.attention(1, [5, 30]), atol=1e-6)
    assert view.digest == f"{trace.digest}/per_query_head"
    assert by_query_head(view) is view


def test_the_output_projection_is_kept():
    """`o_proj` is a view where it is in memory, has no positions, and leaves the digest alone."""
    own = torch.randn(2, 4, 8, 20)

    trace = make(o_proj=own)

    assert trace.read("o_proj").data_ptr() == own.data_ptr()
    assert torch.equal(trace.read("o_proj", slice(1, 2), slice(3, 5)), own[1:])
    assert torch.equal(by_query_head(trace).read("o_proj"), own)
    assert trace.digest == make().digest
    assert make(o_proj=own.bfloat16()).read("o_proj").dtype == torch.float32
    assert make(o_proj=own, dtype=torch.float64).read("o_proj").dtype == torch.float64


def test_digest_depends_on_content_alone():
    """The digest changes with any number, fact or token, and not with name or provenance."""
    base = make().digest
    changed = arrays()
    changed["v"] = changed["v"].clone()
    changed["v"][1, 1, 39, 7] += 1e-3

    others = {
        Trace.from_arrays(**changed, prompt_len=10, rope=Rope.default(8)).digest,
        make(prompt_len=11).digest,
        make(scale=0.3).digest,
        make(tokens=range(40)).digest,
        make(layer_ids=[1, 2]).digest,
        make(attn_out=make().full()[0]).digest,
        Trace.from_arrays(**arrays(), prompt_len=10, rope=Rope.default(8, 5e5)).digest,
        make(dtype=torch.float64).digest,
    }

    assert make(name="other", meta={"a": 1}).digest == base
    assert base.startswith("sha256:")
    assert len(base) == 71
    assert len(others - {base}) == 8


def test_digest_follows_its_definition():
    """The digest equals one computed by hand from the text of docs/trace-format.md."""
    import hashlib
    import json
    import struct

    trace = make(layers=1, n=300, tokens=range(300))

    def layer_sum(blocks):
        return hashlib.sha256(b"".join(block.tobytes() for block in blocks)).hexdigest()

    def f64(x):
        return struct.pack(">d", x).hex()

    entries = {}
    for name in "qkv":
        values = trace.read(name)[0].numpy()
        entries[name] = {
            "dtype": "float32",
            "shape": [1, *values.shape],
            "layers": [layer_sum([values[:, :256], values[:, 256:]])],
        }
    ids = np.arange(300, dtype="<i4")
    entries["tokens"] = {"dtype": "int32", "shape": [300], "layers": [layer_sum([ids])]}
    text = json.dumps(
        {
            "arrays": entries,
            "layer_ids": [0],
            "mask": "causal",
            "prompt_len": 10,
            "rope": {
                "attention_scaling": f64(1.0),
                "inv_freq": [f64(f) for f in trace.ropes[0].inv_freq],
                "layout": "half",
                "rotary_dim": 8,
            },
            "scale": f64(8**-0.5),
        },
        sort_keys=True,
        separators=(",", ":"),
    )

    assert trace.digest == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def with_bad_number(name, value):
    """All arrays, one of them with a bad number at one place."""
    data = {**arrays(), "attn_out": torch.zeros(2, 4, 40, 8), "lse": torch.zeros(2, 4, 40)}
    data[name] = data[name].clone()
    data[name][1, 1, 17] = value
    return data


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("name", ["q", "lse"])
def test_numbers_that_are_not_finite_are_named(name, value):
    """NaN or infinity is refused with the array, layer, head and position where it is."""
    with pytest.raises(TraceError, match=rf"{name} is -?(nan|inf) at layer 1, head 1, pos 17"):
        Trace.from_arrays(**with_bad_number(name, value), prompt_len=1, rope=Rope.default(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 2, 39, 8)}, r"k has shape \(2, 2, 39, 8\), expected \(2, 2, 40, 8\)"),
        ({"v": torch.zeros(2, 1, 40, 8)}, r"v has shape \(2, 1, 40, 8\), expected \(2, 2, 40, 8\)"),
        ({"q": torch.zeros(2, 40, 8)}, r"q has shape \(2, 40, 8\), expected \[layer, qhead"),
        (
            {"q": torch.zeros(2, 3, 40, 8)},
            "query heads is 3; expected a multiple of 2 KV heads",
        ),
        ({"q": torch.zeros(2, 4, 40, 8, dtype=torch.int32)}, "q has dtype torch.int32, expected"),
        (
            {"o_proj": torch.zeros(2, 2, 8, 9)},
            r"o_proj has shape \(2, 2, 8, 9\), expected \(2, 4, 8",
        ),
        ({"prompt_len": 41}, "prompt_len is 41; expected 1 to 40"),
        ({"tokens": [1, 2]}, "tokens are"),
        ({"token_text": ["a"]}, "token_text is"),
        ({"layer_ids": [1]}, "layer_ids is"),
        ({"rope": Rope.default(16)}, "rotary_dim of rope is 16; expected at most the 8 of a head"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    """Wrong shapes, dtypes and facts are refused in one line with found and expected."""
    options = {**arrays(), "prompt_len": 10, "rope": Rope.default(8), **change}

    with pytest.raises(TraceError, match=message) as caught:
        Trace.from_arrays(**options)

    assert "\n" not in str(caught.value)


def test_reading_what_is_not_there():
    """An array that the trace lacks is a NeedsError that lists what it has."""
    with pytest.raises(NeedsError, match=r"no array 'o_proj', it has q, k, v; .* with --o-proj"):
        _ = make().read("o_proj")
