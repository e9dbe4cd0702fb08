"""Models by their configuration: parameters, FLOPs, what is refused."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from cost_models import LLAMA, LLAMA_8B, QWEN, counted
from transformers import DynamicCache

import kvsim
from kvsim.recorder.forward import cache_option
from kvsim.studies.cost.accounting import estimate
from kvsim.studies.cost.model import Model, ModelError
from kvsim.tiny import PATH as TINY
from tests.recorder import census

#: Families of one kind of layers, of experts, of layers with states, and with MLPs of two matrices.
FAMILIES = [
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "starcoder2", "gpt2", "gpt_neox", "phi"),
    *("arcee", "apertus", "jais2", "persimmon", "nanochat", "mixtral", "gpt_oss", "olmo2"),
    *("bamba", "recurrent_gemma", "jamba", "zamba2", "granitemoehybrid", "lfm2", "qwen3_next"),
    *("falcon_h1", "nemotron_h", "olmo_hybrid", "qwen4_exp_text", "bloom"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_model(family):
    """Parameters are those of the model, and bytes of a position those that its cache holds."""
    if family not in census.families():
        pytest.xfail("this release of transformers does not have it")
    model = census.build(family)
    config = json.loads(model.config.to_json_string(use_diff=False))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), use_cache=True, **cache_option(model, cache))
    pairs = [(getattr(x, "keys", None), getattr(x, "values", None)) for x in cache.layers]
    arrays = [x for pair in pairs for x in pair if x is not None]
    held = sum(x[..., 0, :].numel() for x in arrays)

    mine = Model.from_config({**config, "dtype": "float32"})

    assert mine.parameters == sum(each.numel() for each in model.parameters())
    assert mine.kv_bytes(1000) == 4 * 1000 * held
    if len(arrays) < 2 * model.config.num_hidden_layers:
        assert "layers without keys and values" in " ".join(mine.remarks)


def test_experts_count_by_those_that_a_token_passes():
    """FLOPs and bytes read are of 2 experts of 4; all of them take memory."""
    sizes = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    model = Model.from_config({**LLAMA, **sizes, "num_hidden_layers": 2})
    experts = 2 * 4 * 3 * 4096 * 14336

    assert model.weight_bytes - model.read_bytes == experts / 2 * model.number_bytes
    assert model.layer_matrices == 4096 * (32 + 8) * 256 + experts / 4 + 4 * 4096
    assert "the experts that a token passes" in " ".join(model.remarks)


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

    unseen = mine.n_layers * mine.attention_flops(rows * (rows - 1) / 2)
    assert mine.prefill_flops(rows) + unseen == done + softmax * rows**2 - angles
    assert mine.decode_flops(1) == one + softmax - angles // rows


def test_configurations_are_read(tmp_path):
    """A mapping, a file and a folder give the same model, with what is missing derived."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "torch_dtype")}

    from_file = Model.from_config(tmp_path / "config.json")
    assert from_file == Model.from_config(str(tmp_path))
    assert replace(from_file, name="config") == LLAMA_8B
    assert LLAMA_8B.dim == 128
    assert Model.from_config(bare).n_heads == 32
    assert Model.from_config(bare).number_bytes == 2
    assert Model.from_config({**LLAMA, "dtype": "float32"}).number_bytes == 4
    assert Model.from_config({"dtype": "bfloat16", "text_config": LLAMA}) == LLAMA_8B


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
        ({"hidden_size": None}, "config: .*; expected the config.json of a decoder"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, r"1e\+09 layers or experts, expected at most 4096"),
        ({"num_key_value_heads": 7}, "32 query heads cannot share 7 KV heads"),
        ({"vocab_size": 10**7}, r"vocab is 10000000; expected an integer from 1 to 1e\+06"),
        ({"model_type": "mamba"}, "heads, dimensions. none, expected one size"),
        ({"model_type": "nothing"}, "nothing"),
        ({"model_type": None}, "config: .*; expected the config.json"),
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

    for name in ("none.json", "a.json", "b.json"):
        with pytest.raises(ModelError, match=rf"{name} is no configuration .*expected the config"):
            Model.from_config(tmp_path / name)


def test_traces_know_their_model(trace):
    """A recorded trace gives its model with the data type it ran in; one without says so."""
    model = Model.from_trace(kvsim.open_trace(kvsim.sample_trace()))

    assert replace(model, name="x") == replace(Model.from_config(TINY), name="x")
    assert model.number_bytes == 4
    with pytest.raises(ModelError, match="trace 'small' does not say which model"):
        Model.from_trace(trace)
