"""Text as token ids: special tokens in it, what ids lose of it, and other tokenizers on resume."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import kvsim
from kvsim.errors import CaptureError
from kvsim.recorder import Prompt, capture, capture_many
from kvsim.recorder.tokenization import describe_tokenizer
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


def sentencepiece_tokenizer():
    """A tokenizer of letters with a space before each part of a text, as Llama 2 has."""
    letters = {x: i for i, x in enumerate([UNKNOWN, FIRST, "▁", *map(chr, range(33, 127))])}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token=UNKNOWN))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens([FIRST, UNKNOWN])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=FIRST, unk_token=UNKNOWN, chat_template=CHAT
    )


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


@pytest.mark.parametrize(("adds", "verb", "text"), [("bos", "begins", END + "a"),
                                                    ("eos", "ends", "a" + END)])  # fmt: skip
def test_a_special_token_twice_is_noted(adds, verb, text):
    """A note says that text and tokenizer both have it; neither alone makes one."""
    (note,) = notes(bytes_tokenizer(adds=adds), text)

    assert note.startswith(f"the prompt {verb} with '{END}' twice")
    assert notes(bytes_tokenizer(), text) == notes(bytes_tokenizer(adds=adds), "a") == []
    assert notes(bytes_tokenizer(adds=adds, template=CHAT), "a", chat=True) == []


KEPT = {
    "bytes": (bytes_tokenizer(), "Größe ☃\n\n  漢字 "),
    "lower case": (bytes_tokenizer(normalizer=normalizers.Lowercase()), "A B"),
    "composed": (bytes_tokenizer(normalizer=normalizers.NFC()), "a\u0308"),
    "sentencepiece": (sentencepiece_tokenizer(), "  two spaces"),
    "sentencepiece, special": (sentencepiece_tokenizer(), "a<s>b"),
    "stripping special": (bytes_tokenizer(special=[END, AddedToken("<x>", rstrip=True)]), "<x>\na"),
    "words": (words_tokenizer(), "w1 w2"),
    "in Python": (ByT5Tokenizer(), "Größe ☃"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_text_that_is_kept_has_no_note(name):
    """The ids decode to the text, up to the normalisation that the tokenizer declares."""
    tokenizer, text = KEPT[name]

    assert notes(tokenizer, text) == []
    assert notes(tokenizer, text, response=text) == []


def losing_tokenizer():
    """A tokenizer of words that has no word for anything else, and says nothing of it."""
    inner = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_a_text_that_is_not_kept_is_noted():
    """A note says where text and tokens part; of prompt and response each."""
    (dropped,) = notes(losing_tokenizer(), "abca")
    (spaces,) = notes(words_tokenizer(), "w1  w2")
    first, second = notes(words_tokenizer(), "w1\nw2", response="w3  w4")

    assert dropped == (
        "the tokens of the prompt do not decode to its text: after 2 characters they have 'a', "
        "and the text has 'ca'"
    )
    assert "after 3 characters they have 'w2', and the text has ' w2'" in spaces
    assert "after 2 characters they have ' w2', and the text has '\\nw2'" in first
    assert "the tokens of the response do not decode to its text" in second
    assert notes(words_tokenizer(), "w1 w2\n") == []  # as behind a question of a prompt file


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
    with pytest.raises(CaptureError, match=r"a: its tokenizer \(\w+ \w{8}\) has another"):
        kvsim.live(small(), trace, "tova", 2, tokenizer=other)
    kept = capture_many(
        small(), words_tokenizer(), prompts, tmp_path, max_new_tokens=4, resume=True
    )
    assert kept[0].digest == trace.digest
    kvsim.live(small(), trace, "tova", 2, tokenizer=words_tokenizer())
