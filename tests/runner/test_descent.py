"""The prefill of a live run that drops rows, compared with hooks that drop them.

The prefill here shares nothing with kvsim's: the model runs from the token ids, hooks on its own
decoder layers gather the rows, and the loops of tests/reference decide in float64 what to drop.
"""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import kvsim
from kvsim.analysis.table import fidelity, selection_fidelity
from kvsim.errors import CaptureError
from kvsim.recorder.modules import attention_modules
from kvsim.runner.decoding import Decoding, RunningModel
from kvsim.runner.descent import Decoder
from reference import propagation

PROMPT = 130
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def make_model(family, layers, seed=0, attention="sdpa"):
    """A random model whose attention is far from even, in float32."""
    config = CONFIGS[family](num_hidden_layers=layers, **SIZES)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                weight.normal_(std=0.25)
            elif "bias" in name:
                weight.normal_(std=0.1)
            elif weight.dim() == 2:
                weight.normal_(std=0.12)
    return model


#: A random prompt.
IDS = torch.randint(0, 300, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()


class Live:
    """A prefill of the model itself in which hooks on its layers drop rows.

    decide(layer, rows, q, k) gives places among `rows` that go on, or None; q [qhead, k, d] and k
    [head, k, d] are what the layer's attention got.
    """

    def __init__(self, model, ids, decide):
        self.model, self.decide = model, decide
        self.rows = list(range(len(ids)))
        self.of_layer, self.out, self.qk = [], [], []
        self.cos_sin = None
        base = model.model
        with ExitStack() as stack:
            for layer, module in enumerate(base.layers):
                before = module.register_forward_pre_hook(
                    lambda _, args, kwargs, layer=layer: self.enter(layer, args, kwargs),
                    with_kwargs=True,
                )
                after = module.register_forward_hook(
                    lambda _, __, out, layer=layer: self.leave(layer, out)
                )
                stack.callback(before.remove)
                stack.callback(after.remove)
            with torch.no_grad():
                cache_off = {"use_cache": False, "logits_to_keep": 1}
                self.logits = model(torch.tensor([ids]), **cache_off).logits[0, -1]

    def enter(self, layer, args, kwargs):
        """Give the layer rotations and positions of the rows that are left."""
        kwargs = dict(kwargs)
        cos, sin = kwargs["position_embeddings"]
        at = torch.tensor(self.rows)
        kwargs["position_embeddings"] = (cos[:, at], sin[:, at])
        kwargs["position_ids"] = at[None]
        kwargs["cache_position"] = at
        kwargs["attention_mask"] = torch.full((1, 1, len(at), len(at)), -torch.inf).triu(1)
        self.of_layer.append(list(self.rows))
        hidden = args[0] if args else kwargs["hidden_states"]
        self.qk.append(self.project(layer, hidden, *kwargs["position_embeddings"]))
        return args, kwargs

    def project(self, layer, hidden, cos, sin):
        """Queries and keys as the family makes them, after RoPE."""
        module = self.model.model.layers[layer]
        x = module.input_layernorm(hidden)
        attention, out = module.self_attn, []
        for name in ("q", "k"):
            y = getattr(attention, f"{name}_proj")(x)[0].unflatten(-1, (-1, attention.head_dim))
            norm = getattr(attention, f"{name}_norm", None)
            y = (y if norm is None else norm(y)).transpose(0, 1)
            a, b = y.chunk(2, -1)
            out.append(y * cos[0] + torch.cat([-b, a], -1) * sin[0])
        return out

    def leave(self, layer, out):
        """Drop what does not go on."""
        hidden = out[0] if isinstance(out, tuple) else out
        self.out.append(hidden[0])
        q, k = self.qk[layer]
        chosen = self.decide(layer, self.rows, q.double().numpy(), k.double().numpy())
        if chosen is None:
            return None
        self.rows = [self.rows[i] for i in chosen]
        return hidden[:, chosen]


def window_best(q, k, window, kernel, count, pool):
    """Ranks of the places before the window; the `count` best of them, and the window itself."""
    n = q.shape[1]
    votes = propagation.votes(q, k, n, q.shape[-1] ** -0.5, window, pool, kernel)
    ranking = propagation.ranks(propagation.total(votes))
    best = propagation.one_of_best(ranking, count)
    return ranking, propagation.with_window(best, n, window)


class LiveASL:
    """ASL decided inside the live prefill, by the rules of the reference."""

    def __init__(self, layers, budget, tau, window, kernel, look_back=8):
        self.first, self.look_back = layers // 3, look_back
        self.budget, self.tau, self.window, self.kernel = budget, tau, window, kernel
        self.ranks, self.layer = [], None

    def __call__(self, layer, rows, q, k):
        """Places that go on, at the first layer whose variance is below the threshold."""
        if self.layer is not None:
            return None
        count = self.budget - self.window
        ranking, chosen = window_best(q, k, self.window, self.kernel, count, "avg")
        self.ranks.append(ranking)
        _, rho = propagation.curve(self.ranks, self.first, self.look_back, count)
        if layer not in rho or rho[layer] >= self.tau:
            return None
        self.layer = layer
        return chosen


def live_fastkv(at, rows, window, kernel):
    """FastKV decided inside the live prefill."""

    def decide(layer, alive, q, k):
        if layer != at:
            return None
        return window_best(q, k, window, kernel, rows - window, "max")[1]

    return decide


def live_pyramidinfer(n, layers, ratio=0.9, least=64, sink=4):
    """PyramidInfer decided inside the live prefill, every drop on what the drops before left."""

    def decide(layer, alive, q, k):
        recent = 1 + int(0.2 * n)
        context = len(alive) - recent
        kept = int(context * propagation.remaining(layer, layers, ratio))
        if kept <= min(least, n - recent) or kept == context:
            return None
        places = list(range(len(alive)))
        received = propagation._received(q, k, places, context, len(alive), q.shape[-1] ** -0.5)
        order = sorted(places[sink:context], key=lambda p: (-received[p], p))
        best = sorted([*places[:sink], *order[: kept - sink]])
        return [*best, *places[context:]]

    return decide


def largest(found, expected):
    """Largest difference over the largest size."""
    return float((found - expected).abs().max() / expected.abs().max())


CASES = {
    "asl": ({"tau": 1.01, "window": 8}, 40),
    "asl, by variance": ({"tau": 0.97, "window": 8}, 48),
    "fastkv": ({"rows": 70, "window": 8}, 32),
    "pyramidinfer": ({"least": 10}, 64),
}


MODELS = [("llama", 24, "sdpa"), ("qwen2", 9, "sdpa"), ("qwen3", 6, "sdpa"), ("qwen3", 6, "eager")]


def run(model, policy, budget):
    """Logits of the last row of the prompt, and the record."""
    with Decoding(RunningModel(model), policy, budget, prompt_len=PROMPT, n_pos=PROMPT) as decoding:
        return decoding.feed(IDS)[0], decoding.record()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("family", "layers", "attention"), MODELS)
def test_the_prefill_is_that_of_hooks_that_drop_the_rows(family, layers, attention, case):
    """Rows of every layer, and logits to 2e-5 relative in float32."""
    model, (params, budget) = make_model(family, layers, attention=attention), CASES[case]
    policy = kvsim.policy(case.partition(",")[0], **params)
    decide = {
        "asl": lambda: LiveASL(layers, budget, params["tau"], 8, 7),
        "fastkv": lambda: live_fastkv(policy.propagation.at(layers), params["rows"], 8, 7),
        "pyramidinfer": lambda: live_pyramidinfer(PROMPT, layers, least=10),
    }[policy.name]()
    logits, record = run(model, policy, budget)
    live = Live(model, IDS, decide)

    assert record.selection.counts == tuple(map(len, live.of_layer))
    assert record.selection.dropped or case == "asl, by variance"
    for layer, rows in enumerate(live.of_layer):
        seen = record.evicted_at[layer, 0] >= np.arange(PROMPT)
        assert np.flatnonzero(seen).tolist() == rows
    assert largest(logits, live.logits) < 2e-5


def test_a_replay_is_exact_up_to_the_second_drop():
    """Its sets there are those of the live run, and later ones are open loop."""
    model = make_model("qwen2", 9)
    trace = kvsim.capture(model, None, IDS, max_new_tokens=2)
    policy = kvsim.policy("pyramidinfer", least=10)
    live, opened = run(model, policy, 64)[1], kvsim.replay(trace, policy, 64)
    labels = [fidelity(trace, opened, "sets", layer) for layer in range(9)]
    exact = opened.selection.dropped[1] + 2

    assert live.selection.counts == opened.selection.counts
    assert labels == ["exact"] * exact + ["open"] * (9 - exact)
    left = opened.evicted_at[..., :PROMPT] < PROMPT
    same = (live.evicted_at < PROMPT) == left
    assert same[:exact].all()
    assert not same[exact:].all()
    assert selection_fidelity(opened) == "open"
    asl = kvsim.replay(trace, kvsim.policy("asl", tau=1.01, window=8), 40)
    assert selection_fidelity(asl) == "exact"
    assert {fidelity(trace, asl, "sets", layer) for layer in range(9)} == {"exact"}
    assert [fidelity(trace, asl, "rows", layer) for layer in (0, 1)] == ["exact", "open"]
    alone = kvsim.replay(trace, policy, 64, layers=[8])  # no live run drops rows in one layer
    assert fidelity(trace, alone, "sets", 8) == "open"
    plain = kvsim.replay(trace, kvsim.policy("snapkv", window=8), 40, layers=[8])
    assert fidelity(trace, plain, "rows", 8) == "exact"


@pytest.mark.parametrize("name", ["logits_scaling", "final_logit_softcapping"])
def test_what_a_model_does_to_its_logits_is_not_left_out(name):
    """Scaled or capped logits would make the first token's distribution another one."""
    model = make_model("llama", 2)
    setattr(model.config, name, 8.0)

    with pytest.raises(CaptureError, match=f"has .*{name}.: 8"):
        Decoder(model)


def test_a_model_without_the_known_parts_is_refused(monkeypatch):
    """Families whose rotary module is elsewhere are named as unknown."""
    model = make_model("llama", 2)
    attention_modules(model)  # measured by a forward
    monkeypatch.setattr(model.model, "rotary_emb", None)

    with pytest.raises(CaptureError, match="lacks rotary_emb, norm or"):
        Decoder(model)
