"""Text as token ids: special tokens in it, what ids lose of it, and other tokenizers on resume."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import kvsim
from kvsim.errors import CaptureError
from kvsim.recorder import Prompt, capture, capture_many
from kvsim.recorder.provenance import describe_tokenizer
from small_model import UNKNOWN, small, words_tokenizer

END, FIRST = "<|endoftext|>", "<s>"
CHAT = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def bytes_tokenizer(*, adds="", template=None, normalizer=None, special=(END,)):
    """A tokenizer of bytes whose only special token is also its unknown token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(alphabet)}, merges=[]))
    inner.add_special_tokens(list(special))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    if adds:
        parts = {"bos": f"{END} $A", "eos": f"$A {END}"}[adds]
        tokens = [(END, inner.token_to_id(END))]
        inner.post_processor = TemplateProcessing(single=parts, special_tokens=tokens)
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **names)


def notes(tokenizer, prompt, **options):
    """The notes of a trace of a prompt."""
    options = {"max_new_tokens": 0, **options} if "response" not in options else options
    return capture(small(400), tokenizer, prompt, **options).meta["notes"]


@pytest.mark.parametrize("pieces", [("a b.", "c"), ("", "a b"), ("a b", ""), ("a", " b", "c")])
def test_special_tokens_in_a_text(pieces):
    """A text that names the unknown token is encoded as its pieces with that token between them."""
    tokenizer = bytes_tokenizer()
    special = tokenizer.unk_token_id
    expected = []
    for piece in pieces:
        expected += [*tokenizer(piece)["input_ids"], special]

    prompt = capture(small(300), tokenizer, END.join(pieces), max_new_tokens=0)
    answered = capture(small(300), tokenizer, "a", response=END.join(pieces))

    assert prompt.tokens.tolist() == expected[:-1]
    assert answered.tokens.tolist()[1:] == expected[:-1]
    assert (prompt.meta["notes"], answered.meta["notes"]) == ([], [])


@pytest.mark.parametrize(("adds", "text"), [("bos", END + "a"), ("eos", "a" + END)])
def test_a_special_token_twice_is_noted(adds, text):
    """A note says that text and tokenizer both have it; neither alone makes one."""
    (note,) = notes(bytes_tokenizer(adds=adds), text)

    assert note.startswith(f"the prompt has '{END}' twice")
    assert notes(bytes_tokenizer(), text) == notes(bytes_tokenizer(adds=adds), "a") == []
    assert notes(bytes_tokenizer(adds=adds, template=CHAT), "a", chat=True) == []


def others():
    """Tokenizers that differ from `words_tokenizer()` in one thing each."""
    words = words_tokenizer().backend_tokenizer.to_str()
    vocabulary, rules, ends = (
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(words), unk_token=UNKNOWN)
        for _ in range(3)
    )
    swapped = {"w1": 2, "w2": 1, **{f"w{i}": i for i in range(3, 63)}, "w0": 0, "<unk>": 63}
    vocabulary.backend_tokenizer.model = models.WordLevel(swapped, unk_token=UNKNOWN)
    rules.backend_tokenizer.normalizer = normalizers.Lowercase()
    ends.add_special_tokens({"eos_token": "w5"})
    return {"vocabulary": vocabulary, "rules": rules, "ends": ends}


def test_a_trace_has_class_and_digest_of_its_tokenizer(tmp_path):
    """Both are stored; the digest outlives saving and a call with other options."""
    tokenizer = words_tokenizer()
    trace = capture(small(), tokenizer, "w1", max_new_tokens=0, out=tmp_path / "a.zarr")
    tokenizer.save_pretrained(tmp_path / "words")
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "words")
    again("w1 w2", truncation=True, max_length=1)

    stored = kvsim.open_trace(trace.path).meta["tokenizer"]
    assert stored == describe_tokenizer(tokenizer) == describe_tokenizer(again)
    assert stored["class"] == type(tokenizer).__name__
    assert trace.meta["versions"]["tokenizers"]
    assert "tokenizer" not in capture(small(), None, [1], max_new_tokens=0).meta
    digests = {describe_tokenizer(each)["digest"] for each in others().values()}
    assert len({*digests, stored["digest"], describe_tokenizer(ByT5Tokenizer())["digest"]}) == 5


@pytest.mark.parametrize("kind", ["vocabulary", "rules", "ends"])
def test_another_tokenizer_is_refused(kind, tmp_path):
    """`resume` and live runs refuse it in one line, also where the prompt has the same ids."""
    prompts = [Prompt("a", "w3 w4")]
    (trace,) = capture_many(small(), words_tokenizer(), prompts, tmp_path, max_new_tokens=4)
    other = others()[kind]

    with pytest.raises(CaptureError, match="has another vocabulary or other rules than") as caught:
        capture_many(small(), other, prompts, tmp_path, max_new_tokens=4, resume=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(CaptureError, match=r"its tokenizer \(\w+ \w{8}\) has another"):
        kvsim.live(small(), trace, "tova", 2, tokenizer=other)
    kept = capture_many(
        small(), words_tokenizer(), prompts, tmp_path, max_new_tokens=4, resume=True
    )
    assert kept[0].digest == trace.digest
    kvsim.live(small(), trace, "tova", 2, tokenizer=words_tokenizer())
