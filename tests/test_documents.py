"""Files with a JSON document: whatever one value becomes, checksums renewed, a line refuses it."""

import json
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save

import kvsim
from kvsim.core.pieces import Run
from kvsim.errors import KvsimError
from kvsim.policies.lukv import PARAMS, PERCENTS, SCORER, SINK
from kvsim.policies.model import model_of
from kvsim.studies.cost.accounting import estimate
from kvsim.studies.cost.model import Model
from kvsim.studies.interop.masks import read_masks
from kvsim.testing import strategies

#: What takes the place of each value, at any depth.
WRONG = (float("nan"), 10**400, 2**40, -1, 0, 1.9, True, None, "7", [], {}, {"a": 1})


def places(document, path=()):
    """Yield the path of each value, in lists of the first."""
    yield path
    items = document.items() if isinstance(document, dict) else enumerate(document[:1])
    for key, value in items if isinstance(document, dict | list) else ():
        yield from places(value, (*path, key)) if isinstance(value, dict | list) else [(*path, key)]


def changed(document):
    """Yield (path, value, document) for each value replaced by another, or removed."""
    for path in places(document):
        if not path:
            yield from (((), value, value) for value in WRONG)
            continue
        for value in (*WRONG, "removed"):
            copy = deepcopy(document)
            inner = copy
            for key in path[:-1]:
                inner = inner[key]
            if value == "removed":
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            if json.dumps(copy) != json.dumps(document):
                yield path, value, copy


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A stored trace, of which files say that they are of it."""
    trace = strategies.make_case("normal", n=24, prompt_len=12, group=2).trace()
    return kvsim.open_trace(kvsim.save_trace(trace, tmp_path_factory.mktemp("traces") / "t.zarr"))


def files(trace, path):
    """For each kind of file its document, and a function that reads a file with another one."""

    def plan(document, kind="duo"):
        path.write_text(json.dumps(document))
        policy = kvsim.policy(f"{kind}:{path}")
        policy.allocator.check(Run(trace.n_layers, trace=trace))
        policy.protection(64, enforced=False)

    def masks(document):
        tensor = torch.zeros(2, 3, 5, dtype=torch.int32)
        path.write_bytes(save({"last_row.0": tensor}, {"labels": json.dumps(document)}))
        read_masks(path)

    def config(document):
        path.write_text(json.dumps(document))
        estimate(Model.from_config(path), kvsim.policy("tova"), 8, 40)

    scores = [[float(head) for head in range(trace.n_heads)]] * trace.n_layers
    made_on = {"model": model_of(trace)}
    curves = {"version": 1, "scores": np.full((PERCENTS, 1, 1), 0.5).tolist()}
    curves["training"] = {**made_on, "scorer": SCORER, "params": PARAMS, "sink": SINK}
    sizes = {"num_attention_heads": 8, "hidden_size": 64, "num_key_value_heads": 4, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 100}
    sizes |= {"model_type": "llama"}
    return {
        "heads": ({"version": 1, "scores": scores, "training": made_on}, plan),
        "curves": (curves, partial(plan, kind="lukv")),
        "masks": ([{"layers": [0, 1], "policy": "tova"}], masks),
        "config": (
            {
                **sizes,
                "dtype": "float16",
                "sliding_window": 9,
                "layer_types": ["full_attention"] * 2,
            },
            config,
        ),
    }


KINDS = ("heads", "curves", "masks", "config")


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_of_a_file_is_an_uncaught_error(kind, trace, tmp_path):
    """One line refuses it, or the file is read."""
    document, read = files(trace, tmp_path / "file")[kind]
    read(document)
    uncaught, refusals = [], []
    for path, value, other in changed(document):
        try:
            read(other)
        except KvsimError as error:
            refusals.append(str(error))
        except Exception as error:  # noqa: BLE001  it is what is looked for
            uncaught.append((path, repr(value)[:20], type(error).__name__))
    assert uncaught == []
    assert len(refusals) > 20
    assert "\n" not in "".join(refusals)
