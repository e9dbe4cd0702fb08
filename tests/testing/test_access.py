"""Seeded bugs in reading and storing are caught; records are the same anywhere."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import kvsim
from kvsim.analysis.output.bytes import cache_bytes
from kvsim.analysis.output.error import output_error
from kvsim.analysis.table import fidelity
from kvsim.core.merging import Merger, Shares
from kvsim.core.reading import SparseAttention, best
from kvsim.core.record import record_document
from kvsim.core.storing import Quantizer, Spec
from kvsim.errors import OutputError, PolicyError
from kvsim.policies.per_token import Integers
from kvsim.store.records import read_records, write_records
from kvsim.sweeps.driver import _joined
from kvsim.sweeps.folder import decode_records, encode_records
from kvsim.testing import InvariantError, check_policy, strategies

CASE = strategies.make_case("sharp", layers=2, heads=2, group=2, n=24, dim=8, prompt_len=10)


@dataclass(frozen=True)
class Nearest(SparseAttention):
    """Pages with the largest mean logit."""

    page: int = 2

    def chosen(self, scores, entries, budget):
        """Half of the budget."""
        return best(self.heads, scores, entries, budget // 4)

    def score(self, queries, pages, visible):
        """The mean key of each page stands for it."""
        mean = pages.keys.sum(2) / pages.live.sum(-1, keepdim=True).clamp(min=1)
        return queries @ mean.unsqueeze(1).mT


class Neighbouring(Nearest):
    """Scores are relative to those of other rows of the block."""

    def score(self, queries, pages, visible):
        """Less the mean over rows."""
        scores = super().score(queries, pages, visible)
        return scores * scores.mean(2, keepdim=True)


class Stuffed(Nearest):
    """Reads pages that do not exist yet."""

    def chosen(self, scores, entries, budget):
        """All of them."""
        return torch.ones_like(super().chosen(scores, entries, budget))


class Short(Nearest):
    """However large the budget is, its first page is not read."""

    def chosen(self, scores, entries, budget):
        """All but the first page, unless it is the only one."""
        chosen = super().chosen(scores, entries, 4 * budget)
        chosen[..., 0] &= (entries > 0).sum(-1) == 1
        return chosen


@dataclass(frozen=True)
class Halves(Quantizer):
    """Multiples of a half."""

    def keys(self, groups):
        """The nearest."""
        return (2 * groups).round() / 2

    def values(self, groups):
        """The nearest."""
        return (2 * groups).round() / 2

    def bits(self, dim):
        """Eight each."""
        return 8.0 * dim, 8.0 * dim


class Shared(Halves):
    """One scale for all groups."""

    def keys(self, groups):
        """By the largest number of the whole call."""
        return (groups / groups.abs().amax()).round() * groups.abs().amax()


class Overwriting(Halves):
    """Rounds in place."""

    def values(self, groups):
        """The argument itself."""
        return groups.mul_(2).round_().div_(2)


class Dithering(Halves):
    """A random number before rounding."""

    def values(self, groups):
        """Another one in every call."""
        return (2 * groups + torch.rand_like(groups)).floor() / 2


class Vanishing(Halves):
    """Divides by a range that may be 0."""

    def keys(self, groups):
        """NaN where all channels are alike."""
        low, high = groups.aminmax(dim=-1, keepdim=True)
        return ((groups - low) / (high - low)).round() * (high - low) + low


@dataclass(frozen=True)
class Averaged(Merger):
    """All entries count alike."""

    def shares(self, cosines):
        """Ones."""
        one = torch.ones_like(cosines)
        return Shares(one, 0 * one, one)


class Mixing(Averaged):
    """The threshold is that of all heads together."""

    def merging(self, cosines, leaves, before):
        """Those above the mean over heads."""
        return leaves & (cosines > cosines[leaves].mean()), before


def _mine(piece, eviction="knorm"):
    kind = "sparse" if isinstance(piece, SparseAttention) else "storage"
    return replace(kvsim.policy(eviction), name="mine", **{kind: piece})


@pytest.mark.deep
@pytest.mark.parametrize(
    ("piece", "invariant"),
    [
        (Neighbouring(), "reading_is_causal"),
        (Stuffed(), "reads_what_is_resident"),
        (Short(), "reading_everything"),
        (Shared(), "quantizer_is_a_function"),
        (Overwriting(), "quantizer_is_a_function"),
        (Dithering(), "quantizer_is_a_function"),
        (Vanishing(), "quantizer_is_a_function"),
        (Mixing(), "heads_merge_apart"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_bug_in_sparse_attention_or_a_quantizer_of_the_users_own_is_caught(piece, invariant):
    """The future, absent pages, unread pages, company, writes, dice and NaN."""
    with pytest.raises(InvariantError, match=f"invariant '{invariant}'"):
        check_policy(_mine(piece), max_examples=300, only=[invariant], shrink=False, max_n=16)


def test_sparse_attention_that_reads_nothing_or_scores_other_things_is_refused():
    """One line that says what is expected of scores."""

    class Flat(Nearest):
        def score(self, queries, pages, visible):
            return super().score(queries, pages, visible).sum(-1)

    class Lost(Nearest):
        def score(self, queries, pages, visible):
            return super().score(queries, pages, visible) * torch.nan

    with pytest.raises(PolicyError, match=r"^Flat: scores of pages are \[2, 2, 5\]; expected"):
        kvsim.replay(CASE.trace(), _mine(Flat()), 10, interval=5)
    with pytest.raises(PolicyError, match=r"^Lost: a row reads no page; expected"):
        kvsim.replay(CASE.trace(), _mine(Lost()), 10, interval=5)


@pytest.mark.parametrize(
    "piece", [Nearest(), Halves(), Averaged()], ids=["sparse", "quantizer", "merger"]
)
def test_a_piece_without_a_bug_passes(piece):
    """What the buggy ones are made from satisfies every invariant."""
    check_policy(_mine(piece), max_examples=8, max_n=20)


@pytest.mark.parametrize(
    "name",
    [
        *("snapkv+quest+d2o", "magicpig+d2o", "fastkv+d2o", "oracle+lookm", "lookm+snapkv"),
        "streaming_llm@original+lookm",
    ],
)
def test_what_has_no_rule_for_merging_is_refused(name):
    """Sparse attention, quantizers, dropped rows, bounds and keys in slots."""
    with pytest.raises(PolicyError):
        kvsim.policy(name)


def test_sixteen_bits_of_sixteen_bits_change_nothing():
    """Behind an eviction, fp16 numbers stored as fp16 are as without quantizer, bytes included."""
    case = strategies.make_case("half", layers=2, heads=2, group=2, n=24, dim=8, prompt_len=10)
    trace = case.trace()
    exact = kvsim.replay(trace, "h2o", 8, interval=3)
    stored = kvsim.replay(trace, kvsim.policy("h2o+fp8", format="fp16"), 8, interval=3)
    np.testing.assert_array_equal(stored.evicted_at, exact.evicted_at)
    one, other = output_error(trace, [exact, stored])
    np.testing.assert_allclose(other.error, one.error, atol=1e-6)
    one, other = cache_bytes(trace, [exact, stored])
    np.testing.assert_array_equal(one[0], other[0])


@pytest.fixture(scope="module")
def record():
    """Ragged eviction, pages of two entries and few bits."""
    params = {"window": 2, "page": 2, "dense_layers": 1, "share": 0.5}
    policy = replace(kvsim.policy("adakv+snapkv+quest", **params), storage=Integers(4, window=1))
    return kvsim.replay(CASE.trace(), policy, 6, interval=3)


def _same(one, other):
    np.testing.assert_array_equal(one.evicted_at, other.evicted_at)
    np.testing.assert_array_equal(one.reads.bits, other.reads.bits)
    both = [{**vars(x.reads), "bits": 0, "sparse": Spec.of(x.reads.sparse)} for x in (one, other)]
    assert both[0] == both[1]
    assert Spec.of(one.storage) == Spec.of(other.storage)
    results = (output_error(CASE.trace(), [each])[0].error for each in (one, other))
    np.testing.assert_array_equal(*results)


def test_a_record_survives_files_and_parts(record, tmp_path):
    """Bit for bit, from zarr and from the parts of a sweep, and of layers joined again."""
    write_records(tmp_path / "records.zarr", [record])
    _same(record, read_records(tmp_path / "records.zarr")[0])
    _same(record, decode_records(encode_records([record]))[0])
    parts = [
        replace(
            record,
            layers=(at,),
            evicted_at=record.evicted_at[at : at + 1],
            reads=replace(record.reads, bits=record.reads.bits[at : at + 1]),
        )
        for at in range(2)
    ]
    _same(record, _joined(parts))


def test_a_damaged_account_is_refused(record, tmp_path):
    """Another shape of the account, a missing chunk and pages of no entries."""
    path = tmp_path / "records.zarr"
    write_records(path, [record])
    (chunk,) = path.glob("*/reads/c/1/0/0/0")
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-4])
    with pytest.raises(OutputError, match="damaged"):
        read_records(path)
    chunk.unlink()
    with pytest.raises(OutputError):
        read_records(path)
    with pytest.raises(ValueError, match="pages of 0"):
        replace(record.reads, page=0).check(record.evicted_at)


def test_a_quantizer_of_the_users_own_is_measured_before_it_is_stored(record, tmp_path):
    """A stored record names its quantizer, and kvsim does not have everybody's."""
    mine = replace(record, storage=Halves())
    assert output_error(CASE.trace(), [mine])[0].error.max() > 0
    write_records(tmp_path / "records.zarr", [mine])
    (stored,) = read_records(tmp_path / "records.zarr")
    assert record_document(stored)["codec"]["name"] == Halves().label
    with pytest.raises(PolicyError, match="measure it where it was replayed"):
        output_error(CASE.trace(), [stored])


def test_values_behind_sparse_attention_or_a_quantizer_are_open_loop():
    """Deeper layers would see other inputs, though nothing leaves; what is kept is exact."""
    trace = CASE.trace()
    for name, level in [("int8", "open"), ("topk", "open"), ("full", "exact")]:
        plain = kvsim.replay(trace, name, 8)
        levels = [fidelity(trace, plain, "rows", layer) for layer in range(2)]
        assert levels == ["exact", level]
        assert fidelity(trace, plain, "sets", 1) == "exact"
