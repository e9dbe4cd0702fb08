"""Run released implementations on shared traces, for rulings.py: one function per repository.

Each imports files of a checkout as they are and calls the class that evicts with the queries, keys
and values of a trace. What such a file imports and does not need here (CUDA kernels, modules of
other versions of transformers) is replaced by a stand-in. No code of theirs is in this repository.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from conformance.rulings import Case, Release, shared
from torch import Tensor

from kvsim.core.policy import Schedule
from kvsim.core.trace import Trace
from kvsim.studies.referee.dump import Dump

Cache = list[tuple[Any, Any]]

#: The newest commit of each repository when it was run.
COMMITS = {
    "FasterDecoding/SnapKV": "e216ddc84c5bd210378cbdbbba12ba02102aa640",
    "FMInference/H2O": "ac75c2a8a9e76832b2a4139b9363373b56336bfb",
    "mit-han-lab/streaming-llm": "2e5042606d69933d88fbf909bd77907456b9b4dd",
    "schwartz-lab-NLP/TOVA": "9c7d09bfff64cfc92cfb5f9d7e138cb04866e5a7",
    "Zefan-Cai/KVCache-Factory": "c97f9d706d63d1b56e980f8b81b2a924c21162b3",
    "Zefan-Cai/R-KV": "d15c9767e67c2bd9807128fecc35223fa2484a69",
    "microsoft/G-KV": "6db3b2ee0846dea897c9afa9247d19f860491b49",
    "EIT-NLP/AdaptiveMassSegment": "7eb32cd75600c55888f223dddd2827a81d4f6a80",
    "antgroup/cakekv": "c4675ce21b1d6f62d262f9a8dc0ad1e1e8ee4edd",
    "GATECH-EIC/LaCache": "0f27c33bc1974c1f8a93656bca2dbb9641ef0937",
    "NVlabs/RocketKV": "63637c8eb4b06b5eb83cd687723b0eeb19f48f65",
    "FFY0/AdaKV": "efe4e2eea0099bf497f0c175ac5440a915d89f83",
    "AI-Lab-China-Merchants-Bank/LagKV": "2a9d19e7d17dbf49c5c596d2980ef0728ea121ec",
    "mit-han-lab/duo-attention": "fe93c314ae87306ef6629dc16713250b4718ffe7",
}


@contextmanager
def standing_in(**modules: ModuleType) -> Iterator[None]:
    """Put modules in the place of others; `__` stands for a dot."""
    modules = {name.replace("__", "."): module for name, module in modules.items()}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def stub(name: str, **content: Any) -> ModuleType:
    """A module with some names in it."""
    module = ModuleType(name)
    vars(module).update(content)
    return module


def loaded(file: Path, name: str | None = None) -> ModuleType:
    """A file of a checkout as a module, also under a dotted name of its package."""
    spec = importlib.util.spec_from_file_location(name or file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def dumped(
    trace: Trace,
    rows: Sequence[int],
    step: Callable[[Cache, int], Cache],
    *,
    budget: int,
    interval: int | None,
    prefill: bool = True,
) -> Dump:
    """The sets that `step` leaves after rows, given the caches (keys, values) of all layers.

    Keys and values have the shape [1, head, n, dim]; a step may also return a list of keys [n, dim]
    for heads that hold different numbers.
    """
    kept: dict[int, Any] = {}
    caches: Cache = [(trace.k[x, None, :, :0], trace.v[x, None, :, :0]) for x in _layers(trace)]
    seen = 0
    for row in rows:
        new = slice(seen, row + 1)
        grown = [
            (
                torch.cat([k, trace.k[x, None, :, new]], 2),
                torch.cat([v, trace.v[x, None, :, new]], 2),
            )
            for x, (k, v) in enumerate(caches)
        ]
        seen, caches = row + 1, step(grown, row)
        kept[row] = np.zeros((trace.n_layers, trace.n_heads, row + 1), bool)
        for layer, (keys, _) in enumerate(caches):
            for head in range(trace.n_heads):
                cached = keys[head] if isinstance(keys, list) else keys[0, head]
                kept[row][layer, head, positions(trace.k[layer, head], cached)] = True
    schedule = Schedule(interval, prefill)
    return Dump(kept, trace.layer_ids, trace.name, None, budget, schedule).checked()


def _layers(trace: Trace) -> range:
    return range(trace.n_layers)


def positions(keys: Tensor, cached: Tensor) -> list[int]:
    """Positions of cached keys [n, dim] among all keys [pos, dim], which differ."""
    place = {key.tobytes(): at for at, key in enumerate(keys.numpy())}
    return [place[key.tobytes()] for key in cached.contiguous().numpy()]


def each_layer(trace: Trace, step: Callable[..., tuple[Any, Any]]) -> Callable[[Cache, int], Cache]:
    """The step of a rule that sees one layer: its queries up to the row, keys and values."""

    def steps(caches: Cache, row: int) -> Cache:
        queries = (trace.q[layer, None, :, : row + 1] for layer in _layers(trace))
        return [
            step(layer, q, *cache)
            for layer, (q, cache) in enumerate(zip(queries, caches, strict=True))
        ]

    return steps


def attention(q: Tensor, keys: Tensor, at: Tensor, scale: float) -> Tensor:
    """Softmax of the last rows q [1, H, w, d] over keys [1, h, n, d] at positions [1, h, n]."""
    group = q.shape[1] // keys.shape[1]
    keys, at = (x.repeat_interleave(group, 1) for x in (keys, at))
    rows = at.max() - torch.arange(q.shape[2]).flip(0)
    logits = q @ keys.mT * scale
    return logits.masked_fill(at[:, :, None] > rows[:, None], -torch.inf).softmax(-1)


def places(trace: Trace, layer: int, keys: Tensor) -> Tensor:
    """Positions of a layer's cached keys, [1, h, n]."""
    return torch.tensor([[positions(*pair) for pair in zip(trace.k[layer], keys[0], strict=True)]])


def after_prompt(
    name: str, trace: str, policy: str, budget: int, step: Any, **settings: Any
) -> Case:
    """The case of a rule that acts on the prompt alone."""
    source = shared(trace)
    rows = [source.prompt_len - 1]
    dump = dumped(source, rows, each_layer(source, step), budget=budget, interval=None)
    return Case(name, trace, policy, dump, settings)


def snapkv(checkouts: Path) -> Release:
    """SnapKVCluster keeps one set for each query head."""
    file = "snapkv/monkeypatch/snapkv_utils.py"
    code = loaded(checkouts / "FasterDecoding+SnapKV" / file)

    def case(name: str, budget: int, window: int, kernel: int, pool: str) -> Case:
        cluster = code.SnapKVCluster(window, budget, kernel, f"{pool}pool")

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return cluster.update_kv(k, q, v, None, 1)

        options = {"window": window, "pool": pool, "pool_kernel": kernel}
        return after_prompt(name, "by-query-head", "snapkv", budget, step, **options)

    cases = [
        case("snapkv-64", 64, 16, 5, "avg"),
        case("snapkv-128", 128, 32, 7, "max"),
        case("snapkv-200", 200, 8, 13, "max"),
    ]
    return Release("FasterDecoding/SnapKV", f"`SnapKVCluster.update_kv` of `{file}`", cases)


def h2o(checkouts: Path) -> Release:
    """The cache that drops entries, given the attention of the trace's queries to what it holds."""
    from transformers.models.llama import modeling_llama

    file = "h2o_hf/utils_real_drop/modify_llama.py"
    names = ("LlamaAttention", "rotate_half", "apply_rotary_pos_emb", "LlamaRotaryEmbedding")
    content = {name: getattr(modeling_llama, name) for name in (*names, "LlamaForCausalLM")}
    with standing_in(
        transformers__models__llama__modeling_llama=stub("modeling_llama", **content),
    ):
        code = loaded(checkouts / "FMInference+H2O" / file)
    trace = shared("by-query-head")

    def case(name: str, budget: int, rows: int) -> Case:
        caches = [code.H2OKVCache_LayerWise(budget // 2, budget // 2) for _ in _layers(trace)]

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            at = places(trace, layer, k)
            new = q.shape[2] if q.shape[2] == trace.prompt_len else 1
            return caches[layer]((k, v), attention(q[:, :, -new:], k, at, trace.scale))

        steps = range(trace.prompt_len - 1, trace.prompt_len + rows)
        dump = dumped(trace, steps, each_layer(trace, step), budget=budget, interval=1)
        return Case(name, "by-query-head", "h2o", dump)

    cases = [case("h2o-32", 32, 4), case("h2o-128", 128, 2)]
    how = "unmodified file; the attention that it is given is computed from the trace"
    return Release("FMInference/H2O", f"`H2OKVCache_LayerWise` of `{file}`", cases, how)


def streaming_llm(checkouts: Path) -> Release:
    """Both ways to evict: after a row, and to make room before it."""
    file = "streaming_llm/kv_cache.py"
    code = loaded(checkouts / "mit-han-lab+streaming-llm" / file)
    trace = shared("sample")
    rows = range(trace.prompt_len - 1, trace.prompt_len + 3)
    cache = code.StartRecentKVCache(4, 60)
    after = dumped(trace, rows, lambda caches, _: cache(caches), budget=64, interval=1)
    before = dumped(
        trace, rows, lambda caches, _: cache.evict_for_space(caches, 1), budget=64, interval=1
    )
    cases = [
        Case("streaming-after", "sample", "streaming_llm", after),
        Case("streaming-before", "sample", "streaming_llm", before),
    ]
    return Release("mit-han-lab/streaming-llm", f"`StartRecentKVCache` of `{file}`", cases)


def tova(checkouts: Path) -> Release:
    """TOVACache.reduce, on the lists of tensors that caches of older transformers are."""
    code = loaded(checkouts / "schwartz-lab-NLP+TOVA" / "src/tova_cache.py")
    trace = shared("sample")

    def case(name: str, budget: int, rows: int) -> Case:
        cache = code.TOVACache(budget)
        cache.key_cache = [None] * trace.n_layers
        cache.value_cache = [None] * trace.n_layers

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            cache.key_cache[layer], cache.value_cache[layer] = k, v
            weights = attention(q[:, :, -1:], k, places(trace, layer, k), trace.scale)
            cache.reduce(layer, weights)
            return cache.key_cache[layer], cache.value_cache[layer]

        steps = range(trace.prompt_len - 1, trace.prompt_len + rows)
        dump = dumped(trace, steps, each_layer(trace, step), budget=budget, interval=1)
        return Case(name, "sample", "tova", dump)

    cases = [case("tova-32", 32, 5), case("tova-128", 128, 2)]
    how = "unmodified file; a cache of lists stands in for that of transformers 4.36"
    return Release("schwartz-lab-NLP/TOVA", "`TOVACache.reduce` of `src/tova_cache.py`", cases, how)


def factory(checkouts: Path) -> Release:
    """The clusters of KVCache-Factory, per query head and per KV head."""
    file = "pyramidkv/pyramidkv_utils.py"
    code = loaded(checkouts / "Zefan-Cai+KVCache-Factory" / file)

    def case(
        name: str,
        trace: str,
        kind: str,
        policy: str,
        budget: int,
        run: dict[str, Any],
        **settings: Any,
    ) -> Case:
        n_layers = shared(trace).n_layers

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            options = {"max_capacity_prompt": budget, **run}
            if kind == "PyramidKVCluster":
                options |= {"num_hidden_layers": n_layers, "layer_idx": layer}
            return getattr(code, kind)(**options).update_kv(k, q, v, None, 1)

        return after_prompt(name, trace, policy, budget, step, **settings)

    average = {"window_size": 16, "kernel_size": 5, "pooling": "avgpool"}
    largest = {"window_size": 16, "kernel_size": 7, "pooling": "maxpool"}
    pyramid = average | {"window_size": 8}
    of_average = {"window": 16, "pool": "avg", "pool_kernel": 5}
    of_largest = {"window": 16, "pool": "max", "pool_kernel": 7}
    of_pyramid = of_average | {"window": 8}
    queries, snap, pyramids = "by-query-head", "SnapKVCluster", "PyramidKVCluster"
    cases = [
        case("factory-snapkv", queries, snap, "snapkv", 64, average, **of_average),
        case("factory-snapkv-kv", "sample", snap, "snapkv", 64, average, **of_average),
        case("factory-snapkv-kv-max", "sample", snap, "snapkv", 64, largest, **of_largest),
        case("factory-pyramidkv", "random-16", pyramids, "pyramidkv", 64, pyramid, **of_pyramid),
        case(
            "factory-pyramidkv-short",
            "random-16",
            pyramids,
            "pyramidkv",
            160,
            pyramid,
            **of_pyramid,
        ),
        case("factory-h2o", queries, "H2OKVCluster", "h2o", 64, {"window_size": 32}),
        case(
            "factory-streaming",
            "sample",
            "StreamingLLMKVCluster",
            "streaming_llm",
            64,
            {"window_size": 60},
        ),
        case("factory-l2norm", "sample", "L2NormCluster", "knorm", 64, {}),
    ]
    runs = f"clusters of `{file}`: SnapKV, PyramidKV, H2O, StreamingLLM, L2Norm"
    return Release("Zefan-Cai/KVCache-Factory", runs, cases)


def rkv(checkouts: Path) -> Release:
    """R1KV over events; its package does not import at this commit, two modules are missing."""
    folder = checkouts / "Zefan-Cai+R-KV" / "rkv"
    with standing_in(matplotlib=stub("matplotlib"), rkv=stub("rkv", __path__=[str(folder)])):
        utils = loaded(folder / "utils.py", "rkv.utils")
        names = {x: getattr(utils, x) for x in ("cal_similarity", "compute_attention_scores")}
        package = stub("rkv.compression", __path__=[str(folder / "compression")], **names)
        with standing_in(rkv__compression=package):
            modules = {
                x: loaded(folder / "compression" / f"{x}.py", f"rkv.compression.{x}")
                for x in ("r1_kv", "snapkv", "streamingllm")
            }

    def case(name: str, rule: Any, policy: str, budget: int, events: int, **settings: Any) -> Case:
        trace = shared("sample")
        window = getattr(rule, "window_size", 1)

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return rule.update_kv(k, q[:, :, -window:].contiguous(), v)

        last = trace.prompt_len - 1
        steps = range(last, last + 16 * events, 16)
        dump = dumped(trace, steps, each_layer(trace, step), budget=budget, interval=16)
        return Case(name, "sample", policy, dump, settings)

    def r1(budget: int) -> Any:
        return modules["r1_kv"].R1KV(budget, window_size=8, kernel_size=7, mix_lambda=0.1)

    snap = modules["snapkv"].SnapKV(64, window_size=8, kernel_size=7)
    streaming = modules["streamingllm"].StreamingLLM(64, 4)
    options = {"window": 8, "pool_kernel": 7}
    cases = [
        case("rkv-96", r1(96), "rkv@original", 96, 1),
        case("rkv-64-events", r1(64), "rkv@original", 64, 3),
        case("rkv-64-slots", r1(64), "rkv@original", 64, 3, slot_order="topk"),
        case("rkv-snapkv", snap, "snapkv@gkv", 64, 1, **options),
        case("rkv-streaming", streaming, "streaming_llm", 64, 3),
    ]
    how = (
        "unmodified files, loaded one by one, for `rkv.compression` imports two modules that are "
        "missing; `h2o.py` raises an error for any input"
    )
    runs = "`update_kv` of `R1KV`, `SnapKV` and `StreamingLLM` in `rkv/compression`"
    return Release("Zefan-Cai/R-KV", runs, cases, how)


def lagkv(checkouts: Path) -> Release:
    """LagKV compresses in `update`; after the prompt it equals a budget."""
    code = loaded(checkouts / "AI-Lab-China-Merchants-Bank+LagKV" / "lag_kv.py")

    def case(name: str, lag: int, ratio: float) -> Case:
        source = shared("sample")
        parts, tail = divmod(source.prompt_len - 4, lag)
        budget = 4 + (parts - 1) * int(ratio * lag) + lag + tail
        cache = code.LagKV(None, ratio, 4, lag)
        cache.key_cache, cache.value_cache, cache._seen_tokens = [], [], 0

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            cache.update(k.clone(), v.clone(), layer)
            return cache.key_cache[layer], cache.value_cache[layer]

        return after_prompt(name, "sample", "lagkv", budget, step, sink=4, lag=lag)

    cases = [case("lagkv-32", 32, 0.25), case("lagkv-64", 64, 0.5)]
    how = "unmodified file; a cache of lists stands in for that of older transformers"
    repository = "AI-Lab-China-Merchants-Bank/LagKV"
    return Release(repository, "`LagKV` of `lag_kv.py`, after the prompt", cases, how)


RELEASES = {
    "SnapKV": snapkv,
    "H2O": h2o,
    "StreamingLLM": streaming_llm,
    "TOVA": tova,
    "KVCache-Factory": factory,
    "R-KV": rkv,
    "LagKV": lagkv,
}
