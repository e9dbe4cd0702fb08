"""Readers, codecs and mergers by their names."""

from __future__ import annotations

from collections.abc import Mapping

from kvsim.policies.clairvoyant import TopK, TopP
from kvsim.policies.d2o import D2O
from kvsim.policies.double_sparsity import DoubleSparsity
from kvsim.policies.entry import Entry, Preset
from kvsim.policies.infllm import InfLLM
from kvsim.policies.kivi import Kivi
from kvsim.policies.kvquant import KVQuant
from kvsim.policies.lookm import LookM
from kvsim.policies.magicpig import MagicPIG
from kvsim.policies.per_token import BlockFloats, Integers, ShortFloats
from kvsim.policies.pqcache import PQCache
from kvsim.policies.quest import Quest
from kvsim.policies.rocketkv import RocketKV
from kvsim.policies.skip_softmax import SkipSoftmax
from kvsim.policies.think import ThinK
from kvsim.policies.turboquant import TurboQuant

#: Readers, codecs and mergers, which stand behind an eviction, or alone.
ACCESS: Mapping[str, Entry] = {
    "quest": Entry(
        "reads pages whose keys could have the largest logits",
        Quest,
        None,
        presets={"release": Preset("reads at least three pages", params={"least": 3})},
    ),
    "double_sparsity": Entry(
        "reads entries with the largest products over a few channels",
        DoubleSparsity,
        None,
        required={"calibration": "prefix:64"},
    ),
    "infllm": Entry(
        "reads the first and last entries, and blocks by representative ones",
        InfLLM,
        None,
        presets={
            "release": Preset(
                "blocks of 128, 128 first and 4,096 last entries",
                params={"page": 128, "sink": 128, "local": 4096},
            )
        },
    ),
    "pqcache": Entry(
        "reads the first and last entries, and those whose coded keys have the largest logits",
        PQCache,
        None,
        presets={"release": Preset("32 first entries", params={"sink": 32})},
    ),
    "magicpig": Entry(
        "reads the first and last entries, and samples others by hashing, with weights",
        MagicPIG,
        None,
        presets={"release": Preset("adds 1e-4 to probabilities", params={"epsilon": 1e-4})},
    ),
    "rocketkv": Entry(
        "reads pages by a few channels, of what stays after the prompt",
        RocketKV,
        None,
        default="snapkv",
        inner={"snapkv": {"pool_kernel": 63}},
    ),
    "skip_softmax": Entry(
        "reads all keys, and the values of blocks with a logit not far below the largest so far",
        SkipSoftmax,
        None,
        presets={
            "modelopt": Preset(
                "blocks of 128, a threshold of 1e-5", params={"page": 128, "threshold": 1e-5}
            )
        },
    ),
    "topk": Entry("reads the entries that a row attends to most: a bound", TopK, None),
    "topp": Entry("reads the fewest entries with a share of a row's attention", TopP, None),
    "kivi": Entry("stores few bits: keys per channel, values per token", Kivi, None),
    "kvquant": Entry("stores few bits as kivi does, and outliers exactly", KVQuant, None),
    "turboquant": Entry(
        "stores few bits of the rotated vector, with one codebook for all",
        TurboQuant,
        None,
        presets={
            "prod": Preset(
                "a bit of each key's number for what is left", params={"objective": "prod"}
            ),
            "vllm": Preset(
                "Hadamard matrix, levels of norm 1, values not rotated",
                params={"rotation": "hadamard", "unit": True, "uniform_values": True},
            ),
        },
    ),
    "think": Entry(
        "stores the channels of keys that matter to the last queries of the prompt",
        ThinK,
        None,
        presets={"kvpress": Preset("prunes the recent keys, too", params={"recent": 0})},
    ),
    "int8": Entry("stores 8 bits, with a scale per token", Integers, None),
    "int4": Entry(
        "stores 4 bits, with a scale per token", Integers, None, params={"bits_per_number": 4}
    ),
    "fp8": Entry("stores 8-bit floating-point numbers", ShortFloats, None),
    "nvfp4": Entry(
        "stores 4-bit floating-point numbers, with a scale per block", BlockFloats, None
    ),
    "lookm": Entry(
        "merges what is evicted into the nearest kept entries", LookM, None, default="h2o"
    ),
    "d2o": Entry(
        "merges what is evicted into the nearest kept entries, if similar enough",
        D2O,
        None,
        default="h2o",
        presets={
            "release": Preset(
                "weights are cosines, and heads share a threshold",
                params={"weights": "cosine", "across_heads": True},
            )
        },
    ),
}
