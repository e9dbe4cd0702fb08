"""Readers, quantizers and mergers by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvsim.policies.entry import Entry, of_file, variant

#: Readers, quantizers and mergers, which stand behind an eviction, or alone.
ACCESS: Mapping[str, Entry] = {
    "quest": of_file(
        "quest:Quest", presets={"release": variant("reads at least three pages", least=3)}
    ),
    "double_sparsity": of_file(
        "double_sparsity:DoubleSparsity", required={"calibration": "prefix:64"}
    ),
    "infllm": of_file(
        "infllm:InfLLM",
        presets={
            "release": variant(
                "blocks of 128, 128 first and 4,096 last entries", page=128, sink=128, local=4096
            )
        },
    ),
    "pqcache": of_file(
        "pqcache:PQCache", presets={"release": variant("32 first entries", sink=32)}
    ),
    "magicpig": of_file(
        "magicpig:MagicPIG",
        presets={"release": variant("adds 1e-4 to probabilities", epsilon=1e-4)},
    ),
    "rocketkv": of_file(
        "rocketkv:RocketKV", default="snapkv", inner={"snapkv": {"pool_kernel": 63}}
    ),
    "skip_softmax": of_file(
        "skip_softmax:SkipSoftmax",
        presets={
            "modelopt": variant("blocks of 128, a threshold of 1e-5", page=128, threshold=1e-5)
        },
    ),
    "topk": Entry("reads the entries that a row attends to most: a bound", "clairvoyant:TopK"),
    "topp": Entry("reads the fewest entries with a share of a row's attention", "clairvoyant:TopP"),
    "kivi": of_file("kivi:Kivi"),
    "kvquant": of_file("kvquant:KVQuant"),
    "turboquant": of_file(
        "turboquant:TurboQuant",
        presets={
            "prod": variant("a bit of each key's number for what is left", objective="prod"),
            "vllm": variant(
                "Hadamard matrix, levels of norm 1, values not rotated",
                rotation="hadamard",
                unit=True,
                uniform_values=True,
            ),
        },
    ),
    "think": of_file(
        "think:ThinK", presets={"kvpress": variant("prunes the recent keys, too", recent=0)}
    ),
    "int8": Entry("stores 8 bits, with a scale per token", "per_token:Integers"),
    "int4": Entry(
        "stores 4 bits, with a scale per token", "per_token:Integers", params={"bits_per_number": 4}
    ),
    "fp8": Entry("stores 8-bit floating-point numbers", "per_token:ShortFloats"),
    "nvfp4": Entry(
        "stores 4-bit floating-point numbers, with a scale per block", "per_token:BlockFloats", None
    ),
    "lookm": of_file("lookm:LookM", default="h2o"),
    "d2o": of_file(
        "d2o:D2O",
        default="h2o",
        presets={
            "release": variant(
                "weights are cosines, and heads share a threshold",
                weights="cosine",
                across_heads=True,
            )
        },
    ),
}
