"""No policy loops over heads, segments or tokens: the number of tensor operations shows it."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import kvsim
from kvsim.core import view, weights
from kvsim.policies import CATALOGUE, names
from kvsim.testing.strategies import make_case
from traces import short_lengths

#: One of each way to score, allocate and propagate; all names are deep.
FEW = ("snapkv", "gkv", "cake", "fastkv", "kvzip", "ams+expected_attention", "chunkkv+snapkv")
EACH = [*FEW, *(pytest.param(x, marks=pytest.mark.deep) for x in names() if x not in FEW)]


class Counting(TorchDispatchMode):
    """Counts the operations that reach a tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """One more."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(name, *, layers, heads, tokens):
    """Operations of one event that evicts half of the entries of every head."""
    entry = CATALOGUE[name.partition("@")[0].partition("+")[0]]
    full = name if "+" in name or entry.innermost or entry.default else f"{name}+tova"
    params = dict(entry.required)
    if "protect_prompt" in entry.parameters:
        params["protect_prompt"] = False
    policy = kvsim.policy(full, **{**params, **short_lengths(name)})
    case = make_case("normal", layers=layers, heads=heads, n=tokens + 1, dim=8, prompt_len=tokens)
    trace = case.trace()
    trace.full()  # what the oracle reads is there
    # blocks of rows that fit memory or the processor's cache are no loops over heads or tokens
    with pytest.MonkeyPatch.context() as patch, Counting() as counting:
        for module in (view, weights):
            patch.setattr(module, "LOGIT_BYTES", 4 * module.LOGIT_BYTES)
        patch.setattr(weights, "CACHE_BYTES", weights.LOGIT_BYTES)
        patch.setattr(weights, "CHUNK", 4 * weights.CHUNK)
        record = kvsim.replay(trace, policy, tokens // 2, prefill=True)
    # RPC keeps the whole prompt, and a single layer drops no rows for others
    assert record.events or name in ("full", "rpc") or (entry.kind == "propagation" and layers < 3)
    return counting.count


def goes_in_depth_order(name):
    """Whether layers depend on each other: one by one, or as the steps of a ladder."""
    if name.startswith("lacache"):
        return True
    return CATALOGUE[name.partition("@")[0].partition("+")[0]].kind == "propagation"


@pytest.mark.parametrize("name", EACH)
def test_operations_do_not_grow_with_layers_and_heads(name):
    """Four layers of five heads take as many operations as one head."""
    few = operations(name, layers=4 if goes_in_depth_order(name) else 1, heads=1, tokens=160)
    many = operations(name, layers=4, heads=5, tokens=160)

    # a tie between heads, or heads of different length, may take a branch of a few operations
    assert many <= few + 40


@pytest.mark.parametrize("name", EACH)
def test_operations_hardly_grow_with_tokens(name):
    """Three times the tokens add a few operations, as doubling steps do, and not one per token."""
    few = operations(name, layers=2, heads=2, tokens=320)
    many = operations(name, layers=2, heads=2, tokens=960)

    assert many <= few + 60
