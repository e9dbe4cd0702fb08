"""Readers, codecs and mergers by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvsim.policies.entry import Entry, variant

#: Readers, codecs and mergers, which stand behind an eviction, or alone.
ACCESS: Mapping[str, Entry] = {
    "quest": Entry(
        "reads pages whose keys could have the largest logits",
        "quest:Quest",
        presets={"release": variant("reads at least three pages", least=3)},
    ),
    "double_sparsity": Entry(
        "reads entries with the largest products over a few channels",
        "double_sparsity:DoubleSparsity",
        required={"calibration": "prefix:64"},
    ),
    "infllm": Entry(
        "reads the first and last entries, and blocks by representative ones",
        "infllm:InfLLM",
        presets={
            "release": variant(
                "blocks of 128, 128 first and 4,096 last entries", page=128, sink=128, local=4096
            )
        },
    ),
    "pqcache": Entry(
        "reads the first and last entries, and those whose coded keys have the largest logits",
        "pqcache:PQCache",
        presets={"release": variant("32 first entries", sink=32)},
    ),
    "magicpig": Entry(
        "reads the first and last entries, and samples others by hashing, with weights",
        "magicpig:MagicPIG",
        presets={"release": variant("adds 1e-4 to probabilities", epsilon=1e-4)},
    ),
    "rocketkv": Entry(
        "reads pages by a few channels, of what stays after the prompt",
        "rocketkv:RocketKV",
        default="snapkv",
        inner={"snapkv": {"pool_kernel": 63}},
    ),
    "skip_softmax": Entry(
        "reads all keys, and the values of blocks with a logit not far below the largest so far",
        "skip_softmax:SkipSoftmax",
        presets={
            "modelopt": variant("blocks of 128, a threshold of 1e-5", page=128, threshold=1e-5)
        },
    ),
    "topk": Entry("reads the entries that a row attends to most: a bound", "clairvoyant:TopK"),
    "topp": Entry("reads the fewest entries with a share of a row's attention", "clairvoyant:TopP"),
    "kivi": Entry("stores few bits: keys per channel, values per token", "kivi:Kivi"),
    "kvquant": Entry("stores few bits as kivi does, and outliers exactly", "kvquant:KVQuant"),
    "turboquant": Entry(
        "stores few bits of the rotated vector, with one codebook for all",
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
    "think": Entry(
        "stores the channels of keys that matter to the last queries of the prompt",
        "think:ThinK",
        presets={"kvpress": variant("prunes the recent keys, too", recent=0)},
    ),
    "int8": Entry("stores 8 bits, with a scale per token", "per_token:Integers"),
    "int4": Entry(
        "stores 4 bits, with a scale per token", "per_token:Integers", params={"bits_per_number": 4}
    ),
    "fp8": Entry("stores 8-bit floating-point numbers", "per_token:ShortFloats"),
    "nvfp4": Entry(
        "stores 4-bit floating-point numbers, with a scale per block", "per_token:BlockFloats", None
    ),
    "lookm": Entry(
        "merges what is evicted into the nearest kept entries", "lookm:LookM", default="h2o"
    ),
    "d2o": Entry(
        "merges what is evicted into the nearest kept entries, if similar enough",
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
