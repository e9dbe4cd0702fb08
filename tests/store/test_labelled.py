"""Traces as xarray Datasets."""

import numpy as np
import pytest
import torch

import kvsim
from damage import flip
from kvsim.errors import TraceError
from kvsim.store import open_trace
from saved_traces import projected
from traces import random_trace


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A stored trace, to be copied before it is changed."""
    return projected().save(tmp_path_factory.mktemp("saved") / "made.zarr")


@pytest.mark.parametrize("kind", ["folder", "memory", "http", "in memory"])
def test_a_dataset_has_the_arrays_of_the_trace(kind, request, stored):
    """Dimensions, layers, attributes and any part of any array are those of the trace."""
    trace = projected()
    if kind == "folder":
        trace = open_trace(stored)
    elif kind == "memory":
        trace = open_trace(projected().save(request.getfixturevalue("memory")))
    elif kind == "http":
        trace = open_trace(f"{request.getfixturevalue('folder_on_the_web')}/made.zarr")

    data = kvsim.to_xarray(trace)

    assert data["q"].dims == ("layer", "qhead", "pos", "dim")
    assert data["layer"].values.tolist() == [2, 5]
    assert data.attrs["prompt_len"] == 10
    assert data["token_text"].values[1] == "tök1"
    parts = [
        {},
        {"layer": 1, "pos": slice(250, 260)},
        {"layer": -1, "pos": slice(None, None, -7)},
        {"pos": [299, 0, 0], "LAST": slice(1, 8, 3)},
        {"pos": slice(9, 9)},
    ]
    for name in ("q", "k", "v", "attn_out"):
        expected = getattr(projected(), name).numpy()
        whole = dict(zip(data[name].dims, [slice(None)] * 4, strict=True))
        for part in ({x.replace("LAST", [*whole][-1]): y for x, y in p.items()} for p in parts):
            index = tuple({**whole, **part}.values())
            assert np.array_equal(data[name].isel(part).values, expected[index])
    assert np.array_equal(data["lse"].sel(layer=5).values, projected().lse[1].numpy())
    assert np.array_equal(data["tokens"][3:7].values, np.arange(3, 7))
    assert np.array_equal(data["o_proj"][1].values, projected().o_proj[1].numpy())


def test_a_dataset_reads_what_is_asked_for(stored):
    """Making it reads no chunk; a part reads the chunks that it touches, and damage is an error."""
    data = kvsim.to_xarray(open_trace(stored))
    flip(stored / "q" / "c" / "1" / "0" / "1" / "0")

    assert np.array_equal(data["q"].isel(layer=0).values, projected().q[0].numpy())
    assert np.array_equal(
        data["q"].isel(pos=slice(0, 256)).values, projected().q[:, :, :256].numpy()
    )
    with pytest.raises(TraceError, match=r"q/c/1/0/1/0. is damaged"):
        _ = data["q"].isel(layer=1).values


def test_half_precision_and_views_as_datasets(tmp_path):
    """A stored trace keeps its stored type; views of it, which repeat keys, are computed."""
    trace = random_trace(layers=1, heads=1, n=20, dim=4, dtype=torch.float16)

    opened = open_trace(trace.save(tmp_path / "a.zarr"))

    assert kvsim.to_xarray(opened)["k"].dtype == np.float16
    assert kvsim.to_xarray(opened)["k"].attrs == {"source_dtype": "float16"}
    assert kvsim.to_xarray(opened.per_query_head())["k"].shape == (1, 2, 20, 4)
