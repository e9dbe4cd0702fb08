"""Models are loaded from folders and the hub, and nothing of theirs is run."""

import json
import shutil
import socket
import time

import pytest
import torch
import transformers
from huggingface_hub import constants
from recorder_models import exact_attention, small
from safetensors.torch import load_file, save_file

from kvsim.errors import CaptureError
from kvsim.recorder import capture, load_model, loading
from kvsim.tiny import MODELS
from small_model import UNKNOWN, words_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small model and its tokenizer."""
    path = tmp_path_factory.mktemp("model") / "small-qwen2"
    small("qwen2").save_pretrained(path)
    words_tokenizer().save_pretrained(path)
    return path


def test_a_local_folder_is_loaded(folder, tmp_path):
    """A folder's weights and tokenizer are loaded, in float32 on the CPU unless asked otherwise."""
    model, tokenizer = load_model(folder)
    brain, _ = load_model(folder, dtype="bfloat16", attention="eager")

    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.unk_token == UNKNOWN
    assert brain.dtype == torch.bfloat16
    assert brain.config._attn_implementation == "eager"
    trace = capture(str(folder), None, "w1 w2", max_new_tokens=2)
    assert trace.meta["model"]["name"] == "small-qwen2"
    expected = capture(small("qwen2"), None, [1, 2], max_new_tokens=2)
    assert torch.allclose(
        trace.read("q"), expected.read("q"), atol=1e-4
    )  # weights lie at other addresses


def test_the_text_part_of_a_multimodal_model_is_recorded(tmp_path):
    """A folder of a class for text and images gives what its text part alone gives."""
    text = small("llama")
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, projection_dim=32,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text.config, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(tmp_path / "llava")
    ids = [3 * i % 60 for i in range(40)]

    trace = capture(str(tmp_path / "llava"), None, ids, max_new_tokens=4)

    expected = capture(text, None, ids, max_new_tokens=4)
    assert trace.meta["model"]["type"] == "llava"
    assert trace.meta["notes"] == ["a multimodal model, of which only text was recorded"]
    assert trace.tokens.tolist() == expected.tokens.tolist()
    for name in ("q", "k", "v", "attn_out"):
        assert torch.allclose(trace.read(name), expected.read(name), atol=1e-4)
    for layer in range(trace.n_layers):
        out = exact_attention(trace, layer)
        assert torch.allclose(trace.full()[0][layer].double(), out, atol=1e-4)


def test_pickled_weights_are_never_loaded(folder, tmp_path):
    """A folder with pickled weights alone is refused and told how to be converted."""
    path = tmp_path / "pickled"
    path.mkdir()
    (path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save({}, path / "pytorch_model.bin")

    with pytest.raises(CaptureError, match=r"cannot be loaded: .*safetensors"):
        load_model(path)


@pytest.mark.parametrize("change", ["gone", "other shape"])
def test_weights_that_would_be_random_are_refused(folder, tmp_path, change, monkeypatch):
    """A folder without all weights, or with some in other shapes: one line names the first."""
    path = shutil.copytree(folder, tmp_path / "part")
    weights = load_file(path / "model.safetensors")
    names = [name for name in sorted(weights) if "mlp" in name]
    for name in names:
        weights[name] = weights[name][:1].clone()
        if change == "gone":
            del weights[name]
    save_file(weights, path / "model.safetensors", {"format": "pt"})

    with pytest.raises(CaptureError, match=f"part lacks {len(names)} of .*{names[0]}, ") as caught:
        load_model(path)

    assert "\n" not in str(caught.value)
    monkeypatch.setattr(transformers.PreTrainedModel, "_hf_peft_config_loaded", True)
    with pytest.raises(CaptureError, match="; merge the adapter into its base model"):
        load_model(path)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"", None])
def test_a_damaged_file_of_weights_is_one_line(folder, tmp_path, content):
    """A pointer of git-lfs, an empty file, or half of one."""
    path = shutil.copytree(folder, tmp_path / "part")
    whole = (path / "model.safetensors").read_bytes()
    half = whole[: len(whole) // 2]
    (path / "model.safetensors").write_bytes(half if content is None else content)

    with pytest.raises(CaptureError, match="part") as e:
        load_model(path)

    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("tokenizer.json", x) for x in ("{", "{}", "[]", '{"model": {"vocab": [1]}}', "version")),
        *(("tokenizer_config.json", x) for x in ("{", "[]")),
    ],
)
def test_a_damaged_tokenizer_is_not_taken_for_none(tmp_path, name, content):
    """One line names the folder and what to do."""
    path = shutil.copytree(MODELS["tiny"], tmp_path / "part")
    (path / name).write_text(content)

    with pytest.raises(CaptureError, match=r"the tokenizer of \S+part cannot be loaded") as error:
        load_model(path)

    assert "\n" not in str(error.value)


def test_remote_code_is_not_run(folder, tmp_path):
    """A folder that brings its own code is refused unless it is trusted."""
    path = tmp_path / "custom"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "custom",
                "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"},
            }
        )
    )
    (path / "c.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())

    with pytest.raises(CaptureError, match="cannot be loaded") as caught:
        load_model(path)

    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("./none", "/none/at/all", "~none/at", "a/b/c", r"a\b", r"C:\a", "", "./" + 300 * "n"),
        *("smolm2", "SmolLM2", "tiny_deep", "smol"),
    ],
)
def test_a_folder_that_is_not_there(name, monkeypatch):
    """What can only be a path, or a shipped model's name misspelt, is one line without the hub."""
    monkeypatch.setattr(loading, "unreachable", pytest.fail)

    with pytest.raises(CaptureError, match="no model folder at") as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A hub that refuses connections, and an empty cache, whose path it gives."""
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setattr(time, "sleep", pytest.fail)  # between one try and the next
        yield tmp_path / "hub"


@pytest.mark.parametrize("name", ["none", "some/none"])
def test_a_hub_that_cannot_be_reached(name, no_hub):
    """A model that only the hub could have is refused at the first refusal, in one line."""
    with pytest.raises(
        CaptureError, match=r"http://127\.0\.0\.1:\d+ cannot be reached \("
    ) as caught:
        load_model(name)

    assert f"model {name!r} cannot be loaded: it is not a folder" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_the_hub_gave_before(folder, no_hub):
    """What is in the cache is loaded without the hub, under its own name."""
    place = no_hub / "models--some--small"
    shutil.copytree(folder, place / "snapshots" / "0abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0abc")

    model, tokenizer = load_model("some/small")

    assert tokenizer.unk_token == UNKNOWN
    trace = capture(model, tokenizer, "w1 w2", max_new_tokens=0)
    assert trace.meta["model"]["name"] == "some/small"


def test_an_unknown_dtype(folder):
    """A dtype that does not exist lists those that do."""
    with pytest.raises(CaptureError, match="dtype is 'int4', expected float32"):
        load_model(folder, dtype="int4")
