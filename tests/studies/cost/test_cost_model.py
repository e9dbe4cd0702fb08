"""Models by their configuration: parameters, FLOPs, what is refused."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from cost_models import BIG, LLAMA, LLAMA_8B, QWEN, QWEN_7B, counted

import kvsim
from kvsim.studies.cost.accounting import estimate
from kvsim.studies.cost.model import Model, ModelError
from kvsim.tiny import PATH as TINY


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "mistral", "tie_word_embeddings": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "attention_bias": True},
        {"model_type": "gemma"},
        {"model_type": "gemma2"},
        {"model_type": "gemma3_text"},
        {"model_type": "starcoder2", "use_bias": False},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_parameters_are_those_of_the_model(config):
    """The number of parameters equals that of the model which transformers builds."""
    shape = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 100,
    }
    if config["model_type"] == "starcoder2":
        shape.pop("head_dim")
    built = transformers.AutoConfig.for_model(**shape, **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    mine = Model.from_config(json.loads(built.to_json_string(use_diff=False)))

    found = sum(p.numel() for p in model.parameters())
    # biases of norms are not counted: two norms of each layer and the last one
    biases = 5 * 64 if config["model_type"] == "starcoder2" else 0

    assert mine.parameters + biases == found


def test_weights_of_known_models():
    """Llama-3.1-8B has 8.03e9 parameters, Qwen2.5-7B 7.62e9, Llama-3.1-70B 70.6e9."""
    sizes = [round(m.parameters / 1e9, 2) for m in (LLAMA_8B, QWEN_7B, BIG)]

    assert sizes == [8.03, 7.62, 70.55]
    assert LLAMA_8B.weight_bytes == 2 * LLAMA_8B.parameters


def test_flops_are_those_of_the_model():
    """FLOPs of a prefill are those of the products that the shipped model computes, and softmax."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="eager")
    mine, rows = Model.from_config(TINY), 40
    ids = torch.arange(rows).unsqueeze(0)
    with torch.inference_mode():
        done = counted(lambda: model(ids, logits_to_keep=1))
        one = counted(lambda: model(ids[:, :1]))
        states = torch.zeros(1, rows, mine.hidden)
        angles = counted(lambda: model.model.rotary_emb(states, ids))  # by a product or not
    softmax = 3 * mine.n_layers * mine.n_qheads

    assert mine.prefill_flops(rows, causal=False) == done + softmax * rows**2 - angles
    assert mine.decode_flops(1) == one + softmax - angles // rows


def test_causal_attention_is_half():
    """A causal prefill sees n (n + 1) / 2 pairs, and decoding token by token costs the same."""
    rows = 64
    layer = LLAMA_8B.layer_flops(rows)
    by_row = sum(2 * LLAMA_8B.layer_matrices + LLAMA_8B.attention_flops(n + 1) for n in range(rows))

    assert layer == by_row
    assert LLAMA_8B.layer_flops(rows, causal=False) > layer


def test_configurations_are_read(tmp_path):
    """A mapping, a file and a folder give the same model, with what is missing derived."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "torch_dtype")}

    from_file = Model.from_config(tmp_path / "config.json")
    assert from_file == Model.from_config(str(tmp_path))
    assert replace(from_file, name="config") == LLAMA_8B
    assert (LLAMA_8B.dim, LLAMA_8B.group) == (128, 4)
    assert Model.from_config(bare).n_heads == 32
    assert Model.from_config(bare).number_bytes == 2
    assert Model.from_config({**LLAMA, "dtype": "float32"}).number_bytes == 4
    assert Model.from_config(LLAMA, number_bytes=1).weight_bytes == LLAMA_8B.weight_bytes / 2
    assert Model.from_config({"dtype": "bfloat16", "text_config": LLAMA}) == LLAMA_8B


@pytest.mark.parametrize("size", [0, 0.5, -2, 9, float("nan")])
def test_sizes_of_numbers_are_1_to_8_bytes(size):
    """A size that no number has is an error, and never the configuration's own instead."""
    with pytest.raises(ModelError, match="expected a number from 1 to 8"):
        Model.from_config(LLAMA, number_bytes=size)


def test_layers_without_entries_hold_no_bytes():
    """A hybrid holds keys and values in its attention layers alone, and a remark says so."""
    kinds = [*["linear_attention"] * 3, "full_attention"] * 8
    hybrid = Model.from_config({**LLAMA, "layer_types": kinds})

    assert hybrid.kv_bytes(1000) == LLAMA_8B.kv_bytes(1000) / 4
    assert "24 layers without keys and values (linear_attention) are left out" in hybrid.remarks[0]


def test_sliding_windows_are_remarked():
    """What is counted otherwise than it is, is said."""
    model = Model.from_config({**LLAMA, "model_type": "mistral", "sliding_window": 4096})
    idle = Model.from_config({**QWEN, "sliding_window": 4096, "use_sliding_window": False})

    assert "sliding window (4096 tokens)" in model.remarks[0]
    assert model.remarks[0] in estimate(model, kvsim.policy("tova"), 8, 64).assumptions
    assert idle.remarks == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing; expected the config.json"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"num_key_value_heads": 7}, "32 query heads cannot share 7 KV heads"),
        ({"vocab_size": 0}, r"vocab is 0; expected an integer from 1 to 1e\+06"),
        ({"num_local_experts": 8}, "a mixture of experts"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_kv_shared_layers": 4}, "read the keys and values of others"),
        ({"torch_dtype": "mystery"}, "dtype is 'mystery'"),
    ],
)
def test_other_configurations_are_refused(change, message):
    """A configuration that the arithmetic does not describe is an error that says why."""
    with pytest.raises(ModelError, match=message):
        Model.from_config({**LLAMA, **change})


def test_files_that_are_no_configuration_are_refused(tmp_path):
    """A path without a file, and files that hold something else, are errors that name the path."""
    (tmp_path / "a.json").write_text("{", "utf-8")
    (tmp_path / "b.json").write_text("[1]", "utf-8")

    for name, message in (("none.json", "no file"), ("a.json", "no JSON"), ("b.json", "a list")):
        with pytest.raises(ModelError, match=rf"{message}.*; expected the config\.json"):
            Model.from_config(tmp_path / name)


def test_traces_know_their_model(trace):
    """A recorded trace gives its model with the data type it ran in; one without says so."""
    model = Model.from_trace(kvsim.open_trace(kvsim.sample_trace()))

    assert replace(model, name="x") == replace(Model.from_config(TINY), name="x")
    assert model.number_bytes == 4
    with pytest.raises(ModelError, match="trace 'small' does not say which model"):
        Model.from_trace(trace)


def test_values_count_by_their_own_size():
    """Bytes of an entry, matrices and FLOPs of attention, where a configuration states it."""
    model = Model.from_config({**LLAMA, "head_dim": 128, "v_head_dim": 96})

    assert model.entry_bytes == 2 * (128 + 96)
    assert model.attention_flops(10) == 10 * 32 * (2 * 128 + 3 + 2 * 96)
    equal = Model.from_config(LLAMA)
    assert equal.layer_matrices - model.layer_matrices == 4096 * (32 + 8) * 32
