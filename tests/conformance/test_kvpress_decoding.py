"""Kept sets of kvpress's DecodingPress, event after event, and what makes them differ from ours.

The model is fed given tokens. What enters layer 0 does not depend on what any layer has evicted, so
there one full-cache trace says what both see, however many events there were. Where the sets
differ, the test puts the one cause on our side, and they agree.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from conformance.dumps import decode
from conformance.test_kvpress import positions_of
from torch import Tensor
from transformers import DynamicCache

import kvsim
from kvsim.core.policy import Policy, Scorer, Scores
from kvsim.core.view import View
from kvsim.errors import PolicyError
from traces import changed

pytestmark = pytest.mark.peers

PROMPT, INTERVAL, TARGET = 40, 24, 32
EVENTS = [63, 87, 111, 135]
LENGTH = EVENTS[-1] + 1


@dataclass(frozen=True)
class Event:
    """What layer 0 of kvpress did after a row.

    kept: bool [head, pos]; scores: of the cached entries in the order of its cache [head, n]; keys:
    of its cache before the event [head, n, dim].
    """

    row: int
    kept: Tensor
    scores: Tensor
    keys: Tensor


@dataclass
class Run:
    """A press in decoding and what it is compared with: its events and the full-cache trace."""

    trace: kvsim.Trace
    events: list[Event]

    def agrees(
        self, policy: Policy, trace: kvsim.Trace | None = None, *, prefill: bool = False
    ) -> list[bool]:
        """Whether our sets are the press's, event by event."""
        record = ours(trace or self.trace, policy, prefill=prefill)
        assert record.events == [PROMPT - 1][: int(prefill)] + [event.row for event in self.events]
        kept = [torch.from_numpy(record.retained(event.row)[0]) for event in self.events]
        return [bool((a == e.kept).all()) for a, e in zip(kept, self.events, strict=True)]


def ours(
    trace: kvsim.Trace, policy: Policy, *, interval: int = INTERVAL, prefill: bool = False
) -> kvsim.Record:
    """The replay of layer 0 at the press's interval and target."""
    how = {"interval": interval, "prefill": prefill}
    return kvsim.replay(trace, policy, TARGET, layers=[0], internals=True, **how)


@pytest.fixture
def decoded(kvpress: ModuleType, recorded: Callable, family: str) -> Callable[..., Run]:
    """Runs a press from kvpress over given tokens, the first `PROMPT` of them as a prompt."""

    class Recording(kvpress.DecodingPress):
        """Keeps what layer 0 does."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.events: list[Event] = []
            base = self.base_press
            self.scorer = getattr(base, "press", base) if masks(base) else base
            score = self.scorer.score

            def listening(*arguments: Any) -> Tensor:
                found = score(*arguments)
                self.found = found[0].clone()  # AdaKV goes on to write into it
                return found

            self.scorer.score = listening

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            rest = (hidden_states, keys, values, attentions, kwargs)
            left = super().compress(module, *rest)
            if module.layer_idx == 0:
                kept = torch.zeros(keys.shape[1], LENGTH, dtype=torch.bool)
                if masks(self.base_press):
                    kept[:, : keys.shape[2]] = True
                    kept[module.masked_key_indices[1:]] = False
                else:
                    kept.scatter_(-1, positions_of(left[0][0], self.known), value=True)
                row = int(kwargs["cache_position"][-1])
                self.events.append(Event(row, kept, self.found, keys[0].clone()))
            return left

    def masks(base: Any) -> bool:
        return isinstance(base, kvpress.AdaKVPress)

    def run(
        base: Any, kernel: str = "sdpa", buffer: int = 256, interval: int = INTERVAL, first=None
    ) -> Run:
        model, tokens, whole = recorded(family, LENGTH, kernel)
        press = Recording(base, interval, TARGET, buffer)
        press.known = whole.k[0]
        both = kvpress.PrefillDecodingPress(first, press)
        with both(model):
            decode(model, tokens[:LENGTH], DynamicCache(), PROMPT)
        for block in model.model.layers:  # the model is used again
            block.self_attn.__dict__.pop("masked_key_indices", None)
        return Run(with_queries(whole, whole.q), press.events)

    return run


def with_queries(trace: kvsim.Trace, q: Tensor) -> kvsim.Trace:
    """The trace with other queries, and the prompt that is decoded from."""
    return changed(trace, q=q, prompt_len=PROMPT, o_proj=trace.o_proj)


class InCacheOrder:
    """A view whose entries stand in the order of kvpress's cache."""

    def __init__(self, view: View, order: Tensor) -> None:
        self._view, self._order = view, order  # [L, H, n]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    @property
    def pos(self) -> Tensor:
        """Positions, in no order; [L, H, n]."""
        return self._view.pos.gather(-1, self._order)

    @property
    def keys(self) -> Tensor:
        """[L, H, n, d]."""
        return self._rows(self._view.keys)

    @property
    def values(self) -> Tensor:
        """[L, H, n, d]."""
        return self._rows(self._view.values)

    def attn(self, last: int, group: str | None = None) -> Tensor:
        """As View's; [L, H, ..., n]."""
        found = self._view.attn(last, group)
        order = self._order.view(*self._order.shape[:2], *[1] * (found.ndim - 3), -1)
        return found.gather(-1, order.expand_as(found))

    def _rows(self, x: Tensor) -> Tensor:
        return x.gather(2, self._order.unsqueeze(-1).expand_as(x))


@dataclass(frozen=True)
class Scrambled(Scorer):
    """Entries in the order of the last top-k; recent: how many have the largest score + 1."""

    scorer: Any
    recent: int = 0

    columns: ClassVar[Mapping[str, float]] = {"place": torch.inf}  # new entries come last

    def score(self, view: View) -> Scores:
        """Minus the place in the top-k, so that what it chose stays; [L, H, n]."""
        order = view["place"].argsort(dim=-1, stable=True)
        seen = InCacheOrder(view, order)
        scores = self.scorer.score(seen)
        scores = scores.masked_fill(seen.pos > view.row - self.recent, scores.max() + 1)
        top = order.gather(-1, scores.topk(TARGET, dim=-1).indices)
        place = torch.arange(TARGET, dtype=view["place"].dtype).expand_as(top)
        place = torch.full_like(view["place"], torch.inf).scatter(-1, top, place)
        return Scores(-place, {"place": place})


@dataclass(frozen=True)
class SinksBySlot:
    """kvpress's StreamingLLM: what is to leave are the slots that follow the first four."""

    def score(self, view: InCacheOrder) -> Tensor:
        """1 for what stays, 0 for the rest; [L, H, n]."""
        scores = torch.ones_like(view.keys[..., 0])
        scores[..., 4 : 4 + scores.shape[-1] - TARGET] = 0
        return scores


def scrambled(scorer: Any, recent: int = 0) -> Policy:
    """A policy of ours, or a scorer, in the order of kvpress's cache."""
    inner = scorer.scorer if isinstance(scorer, Policy) else scorer
    return Policy("scrambled", Scrambled(inner, recent))


def turned_to_the_event(trace: kvsim.Trace, window: int) -> kvsim.Trace:
    """The trace with the queries of each event's window rotated to the event's own position."""
    q = trace.q.clone()
    for row in EVENTS:
        rows = torch.arange(row - window + 1, row + 1)
        plain = trace.rope.unrotate(q[:, :, rows], rows)
        q[:, :, rows] = trace.rope.rotate(plain, torch.full_like(rows, row))
    return with_queries(trace, q)


ALL = [True] * len(EVENTS)
FIRST = [True] + [False] * (len(EVENTS) - 1)

EQUAL = {
    "knorm": ("KnormPress", "sdpa", "knorm"),
    "keydiff": ("KeyDiffPress", "sdpa", "keydiff"),
    "tova": ("TOVAPress", "sdpa", "tova@kvpress"),
    "tova-eager": ("TOVAPress", "eager", "tova@kvpress"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_scores_that_need_no_order_are_equal(kvpress, decoded, name):
    """Knorm, KeyDiff and TOVA agree at every event, and none with the policy of another."""
    press, kernel, policy = EQUAL[name]
    run = decoded(getattr(kvpress, press)(), kernel)
    assert run.agrees(kvsim.policy(policy)) == ALL
    assert all(
        run.agrees(kvsim.policy(other)) == [False] * 4
        for _, _, other in EQUAL.values()
        if other != policy
    )


@pytest.mark.parametrize(
    ("press", "policy"),
    [("TOVAPress", "tova@kvpress"), ("ExpectedAttentionPress", "expected_attention@kvpress")],
)
def test_an_event_after_the_prompt_is_a_press_of_its_own(kvpress, decoded, press, policy):
    """PrefillDecodingPress with the same press twice is a schedule with the prefill event."""
    kind = getattr(kvpress, press)
    run = decoded(kind(), first=kind(1 - TARGET / PROMPT))
    assert run.agrees(kvsim.policy(policy), prefill=True) == ALL
    kept = torch.from_numpy(
        ours(run.trace, kvsim.policy(policy), prefill=True).retained(PROMPT - 1)
    )
    cached = positions_of(run.events[0].keys[:, :TARGET], run.trace.k[0])
    assert (torch.zeros_like(kept[0]).scatter(-1, cached, value=True) == kept[0]).all()


def test_streaming_llm_loses_its_sinks(kvpress, decoded):
    """The sinks are the first four slots, which hold other tokens once top-k has permuted them."""
    run = decoded(kvpress.StreamingLLMPress())
    assert run.agrees(kvsim.policy("streaming_llm")) == FIRST
    assert run.agrees(scrambled(SinksBySlot())) == ALL
    sinks = [bool(event.kept[:, :4].all()) for event in run.events]
    assert sinks == FIRST


@pytest.mark.parametrize("cross", [True, False])
def test_lagkv_loses_the_order_of_its_partitions(kvpress, decoded, cross):
    """Partitions of slots in the order of top-k are not neighbours in the text."""
    run = decoded(kvpress.LagKVPress(lag_size=8, cross_scoring=cross))
    policy = kvsim.policy("lagkv", lag=8, cross_scoring=cross)
    assert run.agrees(scrambled(policy)) == ALL
    agrees = run.agrees(policy)
    assert agrees[1:] == FIRST[1:]
    assert agrees[0] is cross  # ranks, which are there without it, tie at the cut


def test_observed_attention_divides_by_the_slot(kvpress, decoded):
    """It is the last row's attention / (n - slot), with slots in the order of top-k."""
    run = decoded(kvpress.ObservedAttentionPress(), "eager")
    policy = kvsim.policy("observed_attention")
    assert run.agrees(policy) == FIRST
    assert run.agrees(scrambled(policy)) == ALL


@pytest.mark.parametrize("buffer", [256, 12])
def test_expected_attention_counts_positions_in_its_buffer(kvpress, decoded, buffer):
    """Its future begins at the number of buffered rows, and of these the first four are sinks."""
    run = decoded(kvpress.ExpectedAttentionPress(epsilon=0.01), buffer=buffer)
    policy = kvsim.policy("expected_attention@kvpress", epsilon=0.01, query_buffer=buffer)
    assert run.agrees(policy) == ALL
    right = kvsim.policy("expected_attention", query_buffer=buffer)
    assert run.agrees(right) != ALL


def test_expected_attention_without_samples(kvpress, decoded):
    """With nothing in the buffer behind its sinks kvpress goes on with NaN, and kvsim refuses."""
    run = decoded(kvpress.ExpectedAttentionPress(), interval=4)
    assert all(event.scores.isnan().all() for event in run.events)
    with pytest.raises(PolicyError, match="interval is 4"):
        ours(run.trace, kvsim.policy("expected_attention@kvpress"), interval=4)


def snapkv(**params: Any) -> Policy:
    """SnapKV with a window that fits between two events."""
    return kvsim.policy("snapkv@kvpress", window=8, **params)


def test_snapkv_turns_its_window_to_the_current_position(kvpress, decoded):
    """All queries of the window are rotated as the last one; with that, scores and sets agree."""
    run = decoded(kvpress.SnapKVPress(window_size=8, kernel_size=1))
    policy, turned = snapkv(pool_kernel=1), turned_to_the_event(run.trace, 8)
    assert run.agrees(policy, turned) == ALL
    assert run.agrees(policy) != ALL
    older = slice(EVENTS[0] + 1 - 8)
    theirs = run.events[0].scores[:, older].double()
    found, right = (
        torch.from_numpy(ours(trace, policy).internals[0].scores[0, :, older])
        for trace in (turned, run.trace)
    )
    torch.testing.assert_close(found, theirs, rtol=0, atol=2e-6 * float(theirs.max()))
    assert float((right - theirs).abs().max()) > 1e-3 * float(theirs.max())


def test_snapkv_pools_over_scrambled_neighbours(kvpress, decoded):
    """From the second event on the slots beside an entry are those of other ranks."""
    run = decoded(kvpress.SnapKVPress(window_size=8, kernel_size=5))
    turned = turned_to_the_event(run.trace, 8)
    assert run.agrees(snapkv(), turned) == FIRST
    assert run.agrees(scrambled(snapkv(), recent=8), turned) == ALL
    assert run.agrees(scrambled(snapkv(), recent=8)) != ALL


def test_snapkv_eager_has_a_window_of_one_row(kvpress, decoded):
    """It takes the weights that attention returns, which in decoding are of the last row alone."""
    press = kvpress.SnapKVPress(window_size=8, kernel_size=1)
    run = decoded(press, "eager")
    one_row = kvsim.policy("snapkv@kvpress", window=1, pool_kernel=1, protect={"recent": 8})
    assert run.agrees(one_row) == ALL
    assert run.agrees(snapkv(pool_kernel=1)) != ALL
    assert run.agrees(snapkv(pool_kernel=1), turned_to_the_event(run.trace, 8)) != ALL


def test_criticalkv_takes_what_snapkv_takes(kvpress, decoded):
    """Around SnapKV it inherits the turned window and adds no difference of its own."""
    press = kvpress.CriticalKVPress(kvpress.SnapKVPress(window_size=8, kernel_size=1))
    run = decoded(press)
    policy = kvsim.policy("criticalkv+snapkv@kvpress", window=8, pool_kernel=1)
    assert run.agrees(policy, turned_to_the_event(run.trace, 8)) == ALL
    assert run.agrees(policy) != ALL
    assert run.agrees(snapkv(pool_kernel=1), turned_to_the_event(run.trace, 8)) != ALL


def test_pyramidkv_ignores_the_target(kvpress, decoded):
    """The first layer holds 56 of a target of 32, as it does in ours; the window is turned."""
    run = decoded(kvpress.PyramidKVPress(window_size=4, kernel_size=1, beta=4))
    policy = kvsim.policy("pyramidkv@kvpress", window=4, pool_kernel=1, beta=4)
    assert [event.kept.sum(-1).tolist() for event in run.events] == [[56, 56]] * 4
    assert run.agrees(policy, turned_to_the_event(run.trace, 4)) == ALL
    assert run.agrees(policy) != ALL


def adakv(inner: str, **params: Any) -> Policy:
    """AdaKV as kvpress counts, around a scorer."""
    return kvsim.policy(f"adakv@kvpress+{inner}", **params)


def revived(events: list[Event]) -> int:
    """Entries that an event keeps although an earlier one has evicted them."""
    return sum(
        int((later.kept & ~earlier.kept)[:, : earlier.row + 1].sum())
        for earlier, later in pairwise(events)
    )


def test_adakv_frees_nothing(kvpress, decoded, fake_keys):
    """It masks. Around Knorm a masked key is so long that the sets agree all the same."""
    run = decoded(kvpress.AdaKVPress(kvpress.KnormPress()))
    assert [event.keys.shape[1] for event in run.events] == [row + 1 for row in EVENTS]
    assert run.agrees(adakv("knorm")) == ALL
    assert revived(run.events) == 0


def test_adakv_brings_evicted_entries_back(kvpress, decoded, fake_keys):
    """Masked keys are overwritten and scored again; on its damaged cache our sets are its."""
    run = decoded(kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(epsilon=0.01)))
    policy = adakv("expected_attention@kvpress", epsilon=0.01)
    assert run.agrees(policy) == FIRST
    assert revived(run.events) > 0
    for event in run.events:
        kept = ours(damaged(run.trace, event), policy).retained(event.row)
        assert (torch.from_numpy(kept)[0] == event.kept[:, : event.row + 1]).all()


def damaged(trace: kvsim.Trace, event: Event) -> kvsim.Trace:
    """Layer 0 with the keys that the press had in its cache; the event is the only one."""
    stop = event.row + 1
    q, v = (x[:1, :, :stop] for x in (trace.q, trace.v))
    arrays = {"q": q, "k": event.keys[None], "v": v, "layer_ids": [0], "rope": trace.rope}
    return changed(trace, **arrays, prompt_len=stop - INTERVAL, scale=trace.scale)
