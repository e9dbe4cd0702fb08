"""Rows that repeat the context: what a capture records, and how a trace holds them."""

import numpy as np
import pytest
import torch
from probes import repeated

import kvsim
from damage import edit_header, flip, reseal
from kvsim.core.parts import by_query_head
from kvsim.core.probe import Chunk
from kvsim.errors import CaptureError, TraceError
from kvsim.recorder import capture
from kvsim.recorder.repetition import repetition
from kvsim.store.reader import open_trace
from kvsim.store.verification import describe, verify
from small_model import small, words_tokenizer

CONTEXT, PROMPT, NEW = 50, 56, 6
TEMPLATE = "{% for m in messages %}w1 {{ m.content }} w2 {% endfor %}w3"


def ids(n):
    """So many tokens of the vocabulary, drawn once."""
    return torch.randint(63, (n,), generator=torch.Generator().manual_seed(5)).tolist()


def record(out=None, **options):
    """Capture a prompt whose context is all but its last six tokens."""
    settings = {"max_new_tokens": NEW, "context": CONTEXT, "probe": "repeat:30", **options}
    return capture(small(), None, ids(PROMPT), out=out, **settings)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A trace with a probe, and the folder that it is in."""
    return record(tmp_path_factory.mktemp("probes") / "a.zarr")


def test_rows_are_those_of_the_model_behind_the_context(stored):
    """Queries and keys of each chunk are those of one forward over the context and its rows."""
    first, second = stored.header.probe.chunks
    assert (first, second) == (Chunk(0, 30, 30), Chunk(30, 50, 28))  # 8 tokens say where it starts
    probe, context = stored.header.probe, ids(CONTEXT)
    assert list(probe.tokens) == [*context[:30], *context[22:30], *context[30:]]

    at = 0
    for chunk in (first, second):
        rows = list(probe.tokens[at : at + chunk.rows])
        whole = capture(small(), None, [*context, *rows], max_new_tokens=0)
        for name in "qk":
            mine = stored.read(f"probe_{name}")[:, :, at : at + chunk.rows]
            assert torch.allclose(mine, whole.read(name)[:, :, CONTEXT:], atol=1e-5)
        at += chunk.rows


def test_the_trace_is_the_same_without_its_probe(stored, tmp_path):
    """Tokens, q, k, v and digest, in memory and on disk; copies keep the probe."""
    plain, memory = record(tmp_path / "b.zarr", probe=None), record()

    assert plain.digest == stored.digest == memory.digest
    assert plain.header.probe is None
    moved = open_trace(kvsim.save_trace(stored, tmp_path / "d.zarr"))
    narrow = record(tmp_path / "e.zarr", store_dtype="float16")
    for other, close in ((memory, 0), (moved, 0), (narrow, 2e-3)):
        assert other.header.probe == stored.header.probe
        for name in ("probe_q", "probe_k"):
            assert (other.read(name) - stored.read(name)).abs().max() <= close
    assert verify(moved.path, deep=True).ok
    facts = describe(moved.path)
    assert facts["arrays"]["probe_k"]["shape"] == [2, 2, 58, 8]
    assert facts["probe"] == {"kind": "repeat", "rows": 58, "chunks": [[0, 30, 30], [30, 50, 28]]}
    per_head = by_query_head(stored)
    assert per_head.read("probe_k").shape == stored.read("probe_q").shape


def test_a_request_is_what_the_tokenizer_knows():
    """A chat ends the request as its template does; without its words the repetition is alone."""
    context = ids(5)
    assert repetition(context, words_tokenizer()).tokens == tuple(context)

    class Words:
        """A tokenizer of single characters, which has them all."""

        unk_token_id, chat_template = None, "below"

        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return {"input_ids": [ord(x) for x in text]}

        def apply_chat_template(self, messages, tokenize, add_generation_prompt, **_):
            assert add_generation_prompt
            assert not tokenize
            return f"<user>{messages[0]['content']}<end><bot>"

    def text(probe):
        return "".join(map(chr, probe.tokens))

    context = [ord(x) for x in "the quick brown fox"]
    plain = repetition(context, Words(), chunk=10)
    first = "\n\nRepeat the previous context exactly.\nthe quick "
    later = "\n\nRepeat the part of the previous context exactly, starting with"
    assert text(plain) == first + later + "e quick \nbrown fox"
    chat = text(repetition(context, Words(), chat=True))
    assert chat == "\n\nRepeat the previous context exactly.<end><bot>the quick brown fox"


def test_what_was_changed_is_refused(tmp_path):
    """Another chunk or row, with a seal that fits, and an array that is gone or damaged."""
    path = record(tmp_path / "a.zarr").path
    before = (path / "zarr.json").read_text()

    edit_header(path, lambda found: found["meta"]["probe"]["chunks"][0].__setitem__(2, 31))
    reseal(path)
    with pytest.raises(TraceError, match=r"meta\.probe is"):
        open_trace(path)
    (path / "zarr.json").write_text(before)
    flip(path / "probe_k" / "c" / "1" / "0" / "0" / "0")
    assert not verify(path).ok


def test_arrays_and_their_description_must_fit():
    """A probe without its arrays, arrays without it, and another number of rows are refused."""
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 1, 9, 4)
    rope = kvsim.Rope.default(4)
    given = {"prompt_len": 6, "rope": rope, **repeated(q, k, 6)}
    trace = kvsim.Trace.from_arrays(q, k, k, **given)
    assert trace.header.probe.chunks == (Chunk(0, 6, 6),)
    wrong = (
        {"meta": {}},
        {"probe_q": None, "probe_k": None},
        {"probe_k": k[:, :, :5]},
        {"prompt_len": 7},
        {"context_len": 5},
        {"meta": {"probe": {**given["meta"]["probe"], "kind": "other"}}},
    )
    for change in wrong:
        with pytest.raises(TraceError, match=r"probe"):
            kvsim.Trace.from_arrays(q, k, k, **{**given, **change})


def test_resuming_compares_probes(stored, tmp_path):
    """The same probe is kept; another one, or none, is another capture."""
    again = record(stored.path, resume=True, probe="repeat:30")
    assert again.header.probe == stored.header.probe
    with pytest.raises(CaptureError, match=r"its probe is .repeat:30"):
        record(stored.path, resume=True, probe="repeat")
    plain = record(tmp_path / "a.zarr", probe=None)
    with pytest.raises(CaptureError, match="its probe is None"):
        record(plain.path, resume=True)
    with pytest.raises(CaptureError, match="probe is 'repeat:0', expected 'repeat', or"):
        record(probe="repeat:0")


def test_a_replay_from_disk_is_that_in_memory(stored):
    """The stored rows are what KVzip reads."""
    memory = record()
    for name in ("kvzip", "kvzip@uniform"):
        sets = [kvsim.replay(trace, name, 12).evicted_at for trace in (stored, memory)]
        assert np.array_equal(*sets)
