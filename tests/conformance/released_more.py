"""More of released.py: implementations that take an attention module, several layers, or more."""

import sys
import types
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conformance.released import (
    after_prompt,
    attention,
    dumped,
    each_layer,
    loaded,
    places,
    standing_in,
    stub,
)
from conformance.rulings import Case, Release, shared
from torch import Tensor, nn

from kvsim.core.trace import Trace


def gkv(checkouts: Path) -> Release:
    """ScoreBasedKV with and without its parts, and StreamingLLMKV."""
    folder = checkouts / "microsoft+G-KV" / "gkv"
    triton = stub("triton", jit=lambda function: function, language=stub("tl", constexpr=int))
    with standing_in(triton=triton, triton__language=triton.language):
        names = ("gkv", "gkv.model", "gkv.utils", "gkv.model.compression", "gkv.model.sparse_mask")
        packages = {name.replace(".", "__"): stub(name, __path__=[]) for name in names}
        packages["gkv__model__sparse_mask"].expand_sparse_mask = None
        with standing_in(**packages):
            loaded(folder / "utils/compression_score.py", "gkv.utils.compression_score")
            files = folder / "model/compression"
            score = loaded(files / "score_based.py", "gkv.model.compression.score_based")
            streaming = loaded(files / "streamingllm.py", "gkv.model.compression.streamingllm")

    def case(
        name: str, policy: str, budget: int, events: int, run: dict[str, Any], **settings: Any
    ) -> Case:
        trace = shared("sample")
        rule = score.ScoreBasedKV(budget=budget, window_size=16, triton_similarity=False, **run)
        scores: dict[int, Any] = {}

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            keys, values, _, scores[layer] = rule.update_kv(
                k, q[:, :, -16:].contiguous(), v, score_cache=scores.get(layer)
            )
            return keys, values

        last = trace.prompt_len - 1
        rows = range(last, last + 32 * events, 32)
        dump = dumped(trace, rows, each_layer(trace, step), budget=budget, interval=32)
        return Case(name, "sample", policy, dump, settings)

    def sinks() -> Case:
        trace, rule = shared("sample"), streaming.StreamingLLMKV(60, 4)

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return rule.update_kv(k, v, torch.ones(1, k.shape[2]))[:2]

        last = trace.prompt_len - 1
        dump = dumped(
            trace, range(last, last + 96, 32), each_layer(trace, step), budget=60, interval=32
        )
        return Case("gkv-streaming", "sample", "streaming_llm", dump)

    redundancy = {"suppressing_redundancy": True}
    cached = {"enable_score_cache": True, "alpha": 0.8}
    cases = [
        case("gkv", "gkv@release", 64, 3, redundancy | cached | {"mix_lambda": 0.5}, cosine="raw"),
        case("gkv-global", "global_max", 96, 3, cached),
        case("gkv-snapkv", "snapkv@gkv", 64, 3, {"enable_pooling": True}),
        case("gkv-rkv", "rkv@gkv", 64, 3, redundancy | {"enable_pooling": True, "mix_lambda": 0.1}),
        sinks(),
    ]
    runs = "`update_kv` of `ScoreBasedKV` and `StreamingLLMKV` in `gkv/model/compression`"
    how = "unmodified files with the similarity in PyTorch; an empty module stands in for triton"
    return Release("microsoft/G-KV", runs, cases, how)


def lacache(checkouts: Path) -> Release:
    """LaCache sees the caches of all layers."""
    file = "ppl/lacache/kv_cache.py"
    code = loaded(checkouts / "GATECH-EIC+LaCache" / file)
    trace = shared("random-16")

    def case(name: str, policy: str, budget: int, first: int, rows: int, span: int) -> Case:
        rule = code.LaCache(budget, span, 0)
        steps = range(first - 1, first + rows)
        part = _cut(trace, first)
        dump = dumped(part, steps, lambda caches, _: rule(caches), budget=budget, interval=1)
        return Case(name, f"random-16:{first}", policy, dump, {"span": span})

    cases = [
        case("lacache-short", "lacache@release", 140, 240, 4, 8),
        case("lacache-long", "lacache@release", 64, 280, 1, 8),
        case("lacache-ladder", "lacache", 140, 240, 1, 8),
        case("lacache-larger", "lacache@release", 140, 240, 1, 4),
    ]
    return Release("GATECH-EIC/LaCache", f"`LaCache` of `{file}`", cases)


def _cut(trace: Trace, prompt: int) -> Trace:
    return shared(f"{trace.name}:{prompt}")


def cake(checkouts: Path) -> Release:
    """The attention forward of the release, on projections that return the trace's states."""
    folder = checkouts / "antgroup+cakekv" / "cake"
    cache = types.new_class("Cache")
    kinds = {x: types.new_class(x) for x in ("DynamicCache", "HybridCache", "StaticCache")}

    def rotated(q: Tensor, k: Tensor, *angles: Any) -> tuple[Tensor, Tensor]:
        return q, k

    def repeated(x: Tensor, times: int) -> Tensor:
        return x.repeat_interleave(times, 1)

    names = {x: getattr(typing, x) for x in ("List", "Union", "Optional", "Tuple")}
    llama = stub(
        "llama",
        apply_rotary_pos_emb=rotated,
        repeat_kv=repeated,
        BaseModelOutputWithPast=object,
        logger=SimpleNamespace(warning_once=lambda _: None),
        **names,
    )
    flash = stub("flash", _flash_attention_forward=_queries)
    config = stub("config", LlamaConfig=object)
    root = "transformers__models__llama__"
    with standing_in(
        **{
            "cake": stub("cake", __path__=[str(folder)]),
            "cake__model": stub("cake.model", __path__=[str(folder / "model")]),
            "transformers__cache_utils": stub("cache_utils", Cache=cache, **kinds),
            "transformers__modeling_flash_attention_utils": flash,
            f"{root}modeling_llama": llama,
            f"{root}configuration_llama": config,
        }
    ):
        loaded(folder / "utils.py", "cake.utils")
        caches = loaded(folder / "cake_cache.py", "cake.cake_cache")
        forward = loaded(folder / "model/modify_llama.py", "cake.model.modify_llama")

    def case(name: str, trace: str, budget: int, window: int, policy: str = "cake") -> Case:
        source = shared(trace)
        layers, heads = source.n_layers, source.q.shape[1]
        prefill = [caches.CakeprefillKVCache(budget, window, 2, 2, heads, layers)] * layers
        options = SimpleNamespace(
            prefill=[True] * layers,
            decoding_evict=[None] * layers,
            prefill_cake_evict=prefill,
            window_size=[window] * layers,
            key_size=[budget - window] * layers,
            tau1=1.0,
            tau2=1.0,
            gamma=200.0,
        )

        def step(given: Any, row: int) -> Any:
            held = caches.CakeCache()
            for layer, (k, v) in enumerate(given):
                module = SimpleNamespace(
                    config=options,
                    layer_idx=layer,
                    training=False,
                    attention_dropout=0.0,
                    num_heads=heads,
                    num_key_value_heads=source.n_heads,
                    head_dim=source.dim,
                    num_key_value_groups=heads // source.n_heads,
                    is_causal=True,
                    _flash_attn_uses_top_left_mask=False,
                    o_proj=lambda x: x,
                    q_proj=_Returns(source.q[layer, :, : row + 1]),
                    k_proj=_Returns(k[0]),
                    v_proj=_Returns(v[0]),
                )
                hidden = torch.zeros(1, row + 1, 1)
                forward.llama_attn_forward_cake(
                    module, hidden, past_key_value=held, position_embeddings=(None, None)
                )
            return list(zip(held.key_cache, held.value_cache, strict=True))

        last = source.prompt_len - 1
        dump = dumped(source, [last], step, budget=budget, interval=None)
        return Case(name, trace, policy, dump, {"window": window})

    cases = [
        case("cake-sample", "sample", 96, 32),
        case("cake-random", "random-16", 64, 32),
        case("cake-random-8", "random-16", 128, 8),
    ]
    how = (
        "unmodified files; projections return the states of the trace, and stand-ins replace "
        "names that newer transformers lack"
    )
    runs = "`llama_attn_forward_cake`, `CakeCache` and `CakeprefillKVCache`"
    return Release("antgroup/cakekv", runs, cases, how)


def _queries(q: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stand for a kernel whose output is not looked at."""
    return q


class _Returns(nn.Module):
    """A projection that returns the states [head, n, dim] of a trace."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states, self.weight = states, nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.states.transpose(0, 1).flatten(1)[None]


def rocketkv(checkouts: Path) -> Release:
    """The first stage of RocketKV, which evicts; attention itself is a stand-in."""
    file = "pipeline/inf_stream_llm/inf_llm/attention/rocket.py"
    folder = (checkouts / "NVlabs+RocketKV" / file).parent
    package = stub("attention", __path__=[str(folder)])
    with standing_in(attention=package):
        loaded(folder / "utils.py", "attention.utils")
        code = loaded(folder / "rocket.py", "attention.rocket")

    def rotate(q: Tensor, k: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return q, k

    interface = stub("interface", flash_attn_func=_queries)

    def case(name: str, trace: str, budget: int, kernel: int) -> Case:
        source = shared(trace)
        heads, dim = source.q.shape[1], source.dim
        forward = code.rocket_forward(
            fattn=True,
            topk=32,
            compression_ratio=2.0,
            prompt_budget=budget,
            window_size=32,
            kernel_size=kernel,
        )

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            module = SimpleNamespace(layer_idx=layer, config=SimpleNamespace(num_hidden_layers=99))
            hidden = torch.zeros(1, q.shape[2], 1)
            with standing_in(flash_attn=stub("f"), flash_attn__flash_attn_interface=interface):
                _, held = forward(
                    module,
                    hidden,
                    hidden,
                    rotate,
                    True,  # noqa: FBT003 - their signature
                    None,
                    _Returns(q[0]),
                    _Returns(k[0]),
                    _Returns(v[0]),
                    lambda x: x,
                    dim,
                    heads,
                    source.n_heads,
                )
            return held

        options = {"window": 32, "pool": "max", "pool_kernel": kernel}
        return after_prompt(name, trace, "snapkv", budget, step, **options)

    cases = [
        case("rocketkv-96", "sample", 96, 63),
        case("rocketkv-queries", "by-query-head", 96, 63),
    ]
    how = "unmodified file; projections return the trace's states, FlashAttention is a stand-in"
    runs = f"first stage of `rocket_forward` in `{file}`"
    return Release("NVlabs/RocketKV", runs, cases, how)


def adakv(checkouts: Path) -> Release:
    """AdaptiveSnapKVCluster returns keys of all heads in a row, and their numbers."""
    file = "adaptive_snapkv/monkeypatch/snapkv_utils.py"
    with standing_in(flash_attn=stub("flash_attn", flash_attn_func=None)):
        code = loaded(checkouts / "FFY0+AdaKV" / file, "adakv_utils")

    def case(name: str, trace: str, budget: int, *, group: bool, floor: float = 0.2) -> Case:
        source = shared(trace)
        groups = source.q.shape[1] // source.n_heads

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            cluster = code.AdaptiveSnapKVCluster(
                window_size=32,
                kernel_size=7,
                pooling="maxpool",
                base_capacity=budget,
                floor_alpha=floor,
                skip=0,
                normalize=False,
                layer_idx=layer,
                num_hidden_layers=source.n_layers,
                num_key_value_groups=groups,
                gqa_support=group,
                gqa_func="mean",
            )
            keys, values = cluster.update_kv(k, q, v)
            sizes = cluster.head_lens.tolist()
            return list(keys.split(sizes)), list(values.split(sizes))

        options = {"window": 32, "pool_kernel": 7, "floor": floor}
        return after_prompt(name, trace, "adakv+snapkv", budget, step, **options)

    cases = [
        case("adakv", "by-query-head", 96, group=False),
        case("adakv-no-floor", "by-query-head", 96, group=False, floor=0.0),
        case("adakv-group", "sample", 96, group=True),
    ]
    how = "unmodified file; an empty module stands in for flash_attn"
    return Release("FFY0/AdaKV", f"`AdaptiveSnapKVCluster` of `{file}`", cases, how)


def ams(checkouts: Path) -> Release:
    """The press of the release in decoding, given attention of the trace at its own positions."""
    folder = checkouts / "EIT-NLP+AdaptiveMassSegment" / "kvpress"
    base = folder / "presses"
    empty = {
        "utils": stub("kvpress.utils", extract_keys_and_values=None, get_prerope_query_states=None)
    }
    with standing_in(
        kvpress=stub("kvpress", __path__=[str(folder)]),
        kvpress__presses=stub("kvpress.presses", __path__=[str(base)]),
        kvpress__utils=empty["utils"],
        kvpress__presses__base_press=stub("base_press", BasePress=object),
    ):
        names = ("scorer_press", "snapkv_press", "tova_press", "adaptive_segment_head_press")
        codes = {x: loaded(base / f"{x}.py", f"kvpress.presses.{x}") for x in names}
        for name in names:
            del sys.modules[f"kvpress.presses.{name}"]

    def case(name: str, policy: str, budget: int, interval: int, events: int, **run: Any) -> Case:
        trace = shared("sample")
        press = codes["adaptive_segment_head_press"].AdaptiveMassSegmentWrapperHeadPress(
            base_press=codes["tova_press"].TOVAPress(), compression_ratio=0.5, **run
        )
        config = SimpleNamespace(
            num_attention_heads=trace.q.shape[1], num_key_value_heads=trace.n_heads
        )

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            press.compression_ratio = 1 - budget / k.shape[2]
            module = SimpleNamespace(layer_idx=layer, config=config, head_dim=trace.dim)
            weights = attention(q[:, :, -interval:], k, places(trace, layer, k), trace.scale)
            return press.compress(module, torch.zeros(1, interval, 1), k, v, weights, {})

        last = trace.prompt_len - 1
        rows = range(last + interval, last + interval * events + 1, interval)
        dump = dumped(
            trace, rows, each_layer(trace, step), budget=budget, interval=interval, prefill=False
        )
        settings = {
            "sink": 0,
            "min_segment": 8,
            "max_segment": 64,
            "window": 16,
            "min_quota": 2,
            "recent": run.get("always_keep_last", 0),
        }
        return Case(name, "sample", policy, dump, settings)

    run = {"window_size": 16, "min_seg_len": 8, "max_seg_len": 64, "min_keep_per_segment": 2}
    cases = [
        case("ams", "ams@release", 64, 32, 3, **run),
        case("ams-tova", "ams@release+tova@kvpress", 64, 32, 3, **run),
        case("ams-recent", "ams@release", 96, 32, 2, **run, always_keep_last=8),
    ]
    how = "unmodified files, which read the attention of the trace's rows at their own positions"
    runs = "`AdaptiveMassSegmentWrapperHeadPress` around `TOVAPress`"
    return Release("EIT-NLP/AdaptiveMassSegment", runs, cases, how)


def duo(checkouts: Path) -> Release:
    """The cache of DuoAttention: streaming heads are the last of each layer."""
    import transformers.models.llama.modeling_llama as llama

    file = "duo_attn/patch/static_kv_cache.py"
    names = dict.fromkeys(("CausalLMOutputWithPast", "CrossEntropyLoss"), object)
    names |= {"BaseModelOutputWithPast": object, "Union": typing.Union}
    mistral = stub("mistral", MistralForCausalLM=object)
    with standing_in(
        transformers__models__llama__modeling_llama=stub(
            "llama", LlamaForCausalLM=llama.LlamaForCausalLM, **names
        ),
        transformers__models__mistral__modeling_mistral=mistral,
    ):
        code = loaded(checkouts / "mit-han-lab+duo-attention" / file)
    trace = shared("sample")
    config = SimpleNamespace(
        num_hidden_layers=trace.n_layers,
        num_attention_heads=trace.q.shape[1],
        num_key_value_heads=trace.n_heads,
        hidden_size=trace.q.shape[1] * trace.dim,
    )
    model = SimpleNamespace(config=config, parameters=lambda: iter([torch.zeros(1)]))
    cache = code.DuoAttentionStaticKVCache(model, [[0] * 4] * trace.n_layers, 1, 472, 4, 28)

    def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
        parts = cache.split_kv(layer, k.transpose(1, 2), v.transpose(1, 2))
        cache.put_full_kv(layer, *parts[:2])
        cache.compress_and_replace_streaming_kv(layer, *parts[2:])
        keys, values = cache.get_streaming_kv(layer)
        return keys.transpose(1, 2), values.transpose(1, 2)

    cases = [after_prompt("duo", "sample", "streaming_llm", 32, step)]
    how = "unmodified file; all heads stream; an empty module stands in for Mistral's"
    runs = f"`DuoAttentionStaticKVCache` of `{file}`, streaming heads after the prompt"
    return Release("mit-han-lab/duo-attention", runs, cases, how)


MORE = {
    "G-KV": gkv,
    "AMS": ams,
    "CAKE": cake,
    "LaCache": lacache,
    "RocketKV": rocketkv,
    "AdaKV": adakv,
    "DuoAttention": duo,
}
