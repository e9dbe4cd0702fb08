"""Interrupted captures: what is kept, what `recover` makes of it, and what is never lost."""

import json
import shutil

import pytest
import torch
from interrupted_captures import PROMPT, check_prefix, ids, interrupted, names, record, stopping

from damage import edit_header
from kvsim.cli import main
from kvsim.errors import CaptureError, NeedsError, TraceError, TraceExistsError, TraceNotFoundError
from kvsim.recorder import Turn, capture, load_model
from kvsim.store import (
    TraceWriter,
    describe,
    draft,
    find_drafts,
    open_trace,
    publication,
    recover,
    verify,
)
from kvsim.store.draft import Group
from small_model import small


def test_a_recovered_trace_is_the_committed_prefix(tmp_path, whole):
    """An interrupt keeps the committed tokens, and recovery makes a trace of exactly these."""
    left = interrupted(tmp_path / "a.zarr")

    assert (left.tokens, left.complete, left.writing) == (512, False, False)
    assert recover(tmp_path / "a.zarr") == tmp_path / "a.zarr"
    found = open_trace(tmp_path / "a.zarr")
    assert (found.n_pos, found.prompt_len) == (512, PROMPT)
    assert torch.equal(found.o_proj, whole.o_proj)
    check_prefix(found, whole)
    assert names(tmp_path) == ["a.zarr"]
    assert names(found.path) == names(whole.path)
    assert found.meta["generation"] == {
        **whole.meta["generation"],
        "new_tokens": 512 - PROMPT,
        "stopped": "interrupted",
    }
    assert found.meta["notes"] == ["recovered: 512 of at most 560 tokens"]
    for key in ("model", "versions", "labels"):
        assert found.meta[key] == whole.meta[key]
    assert found.name == "a"


@pytest.mark.parametrize(("size", "expected"), [(3, ((500, 503),)), (15, ())])
def test_questions_that_were_committed_are_recovered(size, expected, tmp_path):
    """A later question whose answer began is one; of a question that was cut the rows remain."""
    turns = [Turn(ids(size)), Turn(ids(size))]
    options = {"prompt": 490, "max_new_tokens": 10, "turns": turns}

    interrupted(tmp_path / "t.zarr", 512 if size == 3 else 515, **options)
    recover(tmp_path / "t.zarr")

    found = open_trace(tmp_path / "t.zarr")
    assert (found.n_pos, found.prompt_len, found.questions) == (512, 490, expected)
    assert found.tokens[500:512].tolist()[:size] == ids(size)[:12]


def test_a_prompt_that_was_cut_is_shorter(tmp_path, whole, monkeypatch):
    """Where not even the prompt was committed, all that is there is prompt."""
    append = TraceWriter.append

    def stop(self, name, layer, block):
        append(self, name, layer, block)
        if (name, layer, self._committed) == ("lse", 1, 256):
            raise KeyboardInterrupt

    monkeypatch.setattr(TraceWriter, "append", stop)
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "a.zarr")
    monkeypatch.undo()

    found = open_trace(recover(tmp_path / "a.zarr"))

    assert (found.n_pos, found.prompt_len) == (256, 256)
    check_prefix(found, whole)
    assert found.meta["generation"]["new_tokens"] == 0
    assert found.meta["notes"] == [
        "recovered: 256 of at most 560 tokens",
        f"the prompt had {PROMPT} tokens, of which 256 were recovered",
        "recovered without o_proj, which was not complete",  # the last layer had not written it
    ]


def test_texts_and_the_response_are_recovered(tmp_path):
    """With a tokenizer tokens have texts, and the response is their texts together."""
    model, tokenizer = load_model("tiny")
    options = {"max_new_tokens": 300, "labels": {"task": "walk"}}
    prompt = [i % 60 for i in range(200)]
    full = capture(model, tokenizer, prompt, out=tmp_path / "full.zarr", **options)
    with pytest.raises(KeyboardInterrupt):
        capture(
            model, tokenizer, prompt, out=tmp_path / "a.zarr", progress=stopping(300), **options
        )

    found = open_trace(recover(tmp_path / "a.zarr"))

    check_prefix(found, full)
    assert found.meta["text"]["response"] == "".join(full.token_text[200:256])
    assert found.labels == {"task": "walk"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_the_capture_allowed_is_recovered(attention, tmp_path):
    """A recovered bfloat16 trace verifies: the tolerance of its kernel comes with it."""
    interrupted(tmp_path / "a.zarr", model=small(dtype=torch.bfloat16, attention=attention))

    found = open_trace(recover(tmp_path / "a.zarr"))

    assert verify(found.path).ok
    assert len(found.meta["capture_check"]["max_relative_error"]) == 2
    assert found.source_dtypes["k"] == "bfloat16"


def test_arrays_that_were_not_complete_are_left_out(tmp_path, whole):
    """Stream and projections are there with the first tokens; what comes at the end is noted."""
    interrupted(tmp_path / "a.zarr", o_proj=True, attention=True, residual=True)

    found = open_trace(recover(tmp_path / "a.zarr"))

    check_prefix(found, whole)
    assert found.residual.shape == (2, 512, 32)
    weights = [layer.self_attn.o_proj.weight.T for layer in small().model.layers]
    assert torch.equal(found.o_proj, torch.stack(weights).unflatten(1, (4, 8)))
    assert "attention" not in describe(found.path)["arrays"]
    assert found.meta["notes"][1:] == ["recovered without attention, which was not complete"]
    assert verify(found.path).ok


def test_projections_that_were_not_complete_are_left_out(tmp_path, whole, monkeypatch):
    """An interrupt between the first block of the last layer and its projection is noted."""
    write = Group.write

    def stop(group, name, values, **start):
        if (name, start) == ("o_proj", {"layer": 1}):
            raise KeyboardInterrupt
        write(group, name, values, **start)

    monkeypatch.setattr(Group, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "a.zarr", o_proj=True)
    monkeypatch.undo()

    found = open_trace(recover(tmp_path / "a.zarr"))

    assert found.n_pos == 256
    assert torch.equal(found.q, whole.q[:, :, :256])
    assert not found.has("o_proj")
    assert found.meta["notes"][-1] == "recovered without o_proj, which was not complete"
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]
    assert verify(found.path).ok


def test_what_was_written_at_the_end_is_kept_if_it_is_whole(tmp_path, whole, monkeypatch):
    """An interrupt after the last token loses nothing but what was not begun."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(TraceWriter, "publish", stop)
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "a.zarr", o_proj=True, attention=True)
    monkeypatch.setattr(TraceWriter, "write_attention", stop)
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "b.zarr", o_proj=True, attention=True)
    monkeypatch.undo()

    found, less = (open_trace(recover(tmp_path / name)) for name in ("a.zarr", "b.zarr"))

    assert found.digest == less.digest == whole.digest
    assert found.meta == whole.meta
    assert less.meta["generation"] == whole.meta["generation"]
    assert less.meta["notes"] == ["recovered without attention, which was not complete"]
    assert verify(found.path).attention_error
    assert verify(found.path).ok
    assert torch.equal(found.o_proj, less.o_proj)


def test_nothing_committed_is_a_clear_refusal(tmp_path):
    """A draft without committed tokens says how to remove it."""
    shapes = {"q": (1, 2, 300, 8), "k": (1, 1, 300, 8), "v": (1, 1, 300, 8)}
    writer = TraceWriter(
        tmp_path / "a b.zarr",
        shapes=shapes,
        source_dtypes=dict.fromkeys(shapes, "float32"),
        layer_ids=[0],
    )
    for name, shape in shapes.items():
        writer.append(name, 0, torch.ones(shape[1], 256, 8))
    writer._file.close()  # as if the process had ended
    (left,) = find_drafts(tmp_path)

    with pytest.raises(
        TraceError, match=r"no committed tokens.*remove it with `kvsim trace discard '"
    ) as caught:
        recover(tmp_path / "a b.zarr")

    assert str(left.path) in str(caught.value)
    assert left.path.exists()


def test_an_interrupt_before_the_first_commit_leaves_nothing(tmp_path):
    """Too few tokens to keep: no draft."""
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "a.zarr", prompt=20, progress=stopping(70))

    assert names(tmp_path) == []


def test_a_model_that_cannot_be_recorded_leaves_nothing(tmp_path):
    """What kvsim refuses is removed, however much was committed."""
    with pytest.raises(CaptureError):
        record(tmp_path / "a.zarr", progress=stopping(550, CaptureError("no such model")))

    assert names(tmp_path) == []


def test_an_error_of_others_keeps_the_draft_and_says_so(tmp_path, whole):
    """Memory that runs out is an interruption like any other."""
    with pytest.raises(MemoryError) as caught:
        record(tmp_path / "a.zarr", progress=stopping(550, MemoryError("device")))

    (left,) = find_drafts(tmp_path)
    (note,) = caught.value.__notes__
    assert note == (
        f"512 of at most 560 tokens are kept, `kvsim trace recover {left.path}` "
        "makes a trace of them"
    )
    check_prefix(open_trace(recover(left.path)), whole)


def test_a_draft_that_is_being_written_is_refused(tmp_path):
    """A live capture is left alone, by its path and by its folder, and ends as if nothing was."""
    refused = []

    def look(done, total):
        if done == 550:
            (left,) = find_drafts(tmp_path)
            assert left.writing
            for path in (left.path, tmp_path / "a.zarr"):
                with pytest.raises(TraceError, match="is being written or recovered"):
                    recover(path)
                refused.append(path)

    record(tmp_path / "a.zarr", progress=look)

    assert len(refused) == 2
    assert verify(tmp_path / "a.zarr").ok
    assert names(tmp_path) == ["a.zarr"]


def test_several_drafts_have_to_be_named(tmp_path, whole):
    """Two interrupted captures of one path: the error lists both, each can be recovered."""
    first = interrupted(tmp_path / "a.zarr")
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "a.zarr", prompt=300, progress=stopping(310))
    second = next(left for left in find_drafts(tmp_path) if left != first)

    with pytest.raises(TraceError, match="has several drafts") as caught:
        recover(tmp_path / "a.zarr")

    assert f"{first.path} (512 tokens)" in str(caught.value)
    assert f"{second.path} (256 tokens)" in str(caught.value)
    assert open_trace(recover(second.path, out=tmp_path / "b.zarr")).n_pos == 256
    assert open_trace(recover(tmp_path / "a.zarr")).n_pos == 512


def test_no_draft_of_this_path(tmp_path):
    """A path without a draft is named; a folder with drafts says which."""
    with pytest.raises(TraceNotFoundError, match=r"expected a hidden folder \.a\.zarr\.tmp-\*"):
        recover(tmp_path / "a.zarr")
    with pytest.raises(TraceNotFoundError, match="does not exist"):
        recover(tmp_path / ".a.zarr.tmp-1-0123abcd")
    left = interrupted(tmp_path / "a.zarr")
    with pytest.raises(
        TraceNotFoundError, match=r"it contains .*\(512 tokens\), name one"
    ) as caught:
        recover(tmp_path)
    assert str(left.path) in str(caught.value)


def test_recovery_does_not_overwrite_unasked(tmp_path, whole):
    """A path that is taken is refused, the draft stays; `overwrite` and `out` are ways on."""
    record(tmp_path / "a.zarr", max_new_tokens=0)
    left = interrupted(tmp_path / "a.zarr", overwrite=True)
    assert open_trace(tmp_path / "a.zarr").n_pos == PROMPT

    with pytest.raises(TraceExistsError, match="exists, expected a free path"):
        recover(left.path)

    with pytest.raises(TraceError, match=r"cannot be written \(.*is kept"):
        recover(left.path, out=left.path / "zarr.json" / "b.zarr")
    recover(left.path, out=tmp_path / "new" / "b.zarr")
    left = interrupted(tmp_path / "a.zarr", overwrite=True)
    recover(left.path, overwrite=True)
    check_prefix(open_trace(tmp_path / "a.zarr"), whole)
    check_prefix(open_trace(tmp_path / "new" / "b.zarr"), whole)
    assert names(tmp_path) == ["a.zarr", "new"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"committed_tokens": -256}, "has no committed tokens"),
        ({"committed_tokens": "many"}, "has no committed tokens"),
        ({"committed_tokens": 2**20}, "q has 4 of 8192 chunks"),
        ({"ropes": [{}]}, "attribute rope is not readable"),
        ({"prompt_len": None}, "attribute prompt_len is None"),
    ],
)
def test_a_changed_header_is_an_error(change, message, tmp_path):
    """What no writer writes is one line, and nothing is published."""
    left = interrupted(tmp_path / "a.zarr")
    edit_header(left.path, lambda found: found.update(change))

    with pytest.raises(TraceError, match=message):
        recover(left.path)

    assert names(tmp_path) == [left.path.name]


def test_a_draft_without_an_array_is_an_error(tmp_path):
    """A draft whose keys are gone is no trace."""
    left = interrupted(tmp_path / "a.zarr")
    shutil.rmtree(left.path / "k")

    with pytest.raises(TraceError, match="no array k, expected layer, q, k, v"):
        recover(left.path)


@pytest.mark.parametrize("name", ["attn_out", "lse", "residual"])
def test_a_draft_without_an_optional_array_is_an_error(name, tmp_path):
    """An array that the capture had begun is not silently left out of the trace."""
    left = interrupted(tmp_path / "a.zarr", residual=True)
    shutil.rmtree(left.path / name)

    with pytest.raises(TraceError, match=f"no array {name}, which the capture had begun") as caught:
        recover(left.path)

    assert f"`kvsim trace discard {left.path}`" in str(caught.value)
    assert names(tmp_path) == [left.path.name]


HIDDEN = {"tmp": ".a.zarr.tmp-1-0123abcd", "old": ".a.zarr.old-1-0123abcd"}


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("damage", ["array", "chunk", "exchanged", "flipped"])
def test_a_complete_draft_is_read_before_it_is_published(damage, kind, tmp_path, whole):
    """What a kill has left of a complete trace is no trace, whatever it lacks."""
    folder = shutil.copytree(whole.path, tmp_path / HIDDEN[kind])
    chunk = folder / "attn_out" / "c" / "1" / "0" / "1" / "0"
    if damage == "array":
        shutil.rmtree(folder / "attn_out")
    elif damage == "chunk":
        chunk.unlink()
    elif damage == "exchanged":
        shutil.copy(folder / "q" / "c" / "1" / "0" / "1" / "0", chunk)
    else:
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 1
        chunk.write_bytes(data)

    with pytest.raises(TraceError, match="attn_out") as caught:
        recover(folder)

    assert "\n" not in str(caught.value)
    assert names(tmp_path) == [HIDDEN[kind]]


def test_a_removal_that_is_killed_leaves_no_trace(tmp_path, whole, monkeypatch):
    """The root goes first, so that what is left of a replaced trace cannot pass for one."""
    path = shutil.copytree(whole.path, tmp_path / "a.zarr")

    def killed(folder, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(publication.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        record(path, prompt=20, max_new_tokens=0, overwrite=True)
    monkeypatch.undo()

    (left,) = find_drafts(tmp_path)
    assert (left.kind, (left.path / "zarr.json").exists()) == ("old", False)
    with pytest.raises(TraceError, match="the rest of a trace that was replaced") as caught:
        recover(left.path, out=tmp_path / "b.zarr")
    assert f"`kvsim trace discard {left.path}`" in str(caught.value)
    assert open_trace(path).n_pos == 20


def test_a_recovery_names_the_trace_that_was_replaced(tmp_path, whole, capsys):
    """After a kill between two renames both traces are there; the older one is not forgotten."""
    new, old = (shutil.copytree(whole.path, tmp_path / HIDDEN[kind]) for kind in ("tmp", "old"))

    with pytest.raises(SystemExit) as caught:
        main(["trace", "recover", str(new)])

    assert not caught.value.code
    assert f"`kvsim trace discard {old}` removes it" in capsys.readouterr().err
    assert names(tmp_path) == [HIDDEN["old"], "a.zarr"]


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_draft_is_an_error(damage, tmp_path):
    """A chunk that changed or went missing is named, and nothing is published."""
    left = interrupted(tmp_path / "a.zarr")
    chunk = left.path / "k" / "c" / "1" / "0" / "1" / "0"
    if damage == "flip":
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 1
        chunk.write_bytes(data)
    else:
        chunk.unlink()
    message = "chunk c/1/0/1/0 of k is damaged" if damage == "flip" else "k has 3 of 4 chunks"

    with pytest.raises(TraceError, match=message):
        recover(tmp_path / "a.zarr")

    assert names(tmp_path) == [left.path.name]


def test_a_torn_line_of_tokens_is_ignored(tmp_path, whole):
    """Tokens are there before their positions are committed, so the last line is never needed."""
    left = interrupted(tmp_path / "a.zarr")
    file = left.path / draft.TOKENS
    ahead = file.read_bytes().splitlines(keepends=True)
    assert len(ahead) == 550
    file.write_bytes(b"".join(ahead[:512]) + b'{"token": 1')

    check_prefix(open_trace(recover(left.path)), whole)


def test_without_token_ids_the_rest_is_recovered(tmp_path, whole):
    """Tokens that the disk lost are noted; queries, keys and values are what they were."""
    left = interrupted(tmp_path / "a.zarr")
    file = left.path / draft.TOKENS
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:300]))

    found = open_trace(recover(left.path))

    assert found.tokens is None
    assert torch.equal(found.q, whole.q[:, :, :512])
    assert found.meta["notes"][1:] == ["recovered without token ids, which were not on disk"]
    assert verify(found.path).ok


def test_stray_partial_files_are_swept(tmp_path, whole):
    """What a killed write leaves is no part of the trace."""
    left = interrupted(tmp_path / "a.zarr")
    stray = left.path / "k" / "c" / "0" / "0" / "0" / "0.abc.partial"
    stray.write_bytes(b"x")

    found = open_trace(recover(left.path))

    assert not list(found.path.rglob("*.partial"))
    check_prefix(found, whole)


def test_half_of_a_removed_array_is_swept(tmp_path, whole):
    """A recovery that was killed while it removed or wrote arrays leaves no part of them."""
    left = interrupted(tmp_path / "a.zarr", o_proj=True)
    (projections,) = left.path.glob("projections-*")
    (projections / "zarr.json").unlink()
    shutil.copytree(whole.path / "tokens", left.path / "tokens")
    shutil.copytree(whole.path / "q" / "c", left.path / "token_text" / "c")

    found = open_trace(recover(left.path))

    check_prefix(found, whole)
    assert sorted(found.path.iterdir()) == [found.path / name for name in names(whole.path)]
    with pytest.raises(NeedsError, match=f"expected the folder {projections.name}; copy it"):
        found.read("o_proj")


def test_the_command_recovers(tmp_path, run):
    """`kvsim trace recover` says what the trace has, as text and as JSON."""
    interrupted(tmp_path / "a.zarr")
    left = interrupted(tmp_path / "b" / "b.zarr")

    status, out, err = run("trace", "recover", tmp_path / "a.zarr")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"{tmp_path / 'a.zarr'}: 512 tokens (prompt 500, response 12)",
        "  note: recovered: 512 of at most 560 tokens",
    ]
    status, out, err = run("trace", "recover", left.path, "--out", tmp_path / "c.zarr", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["trace"] == describe(tmp_path / "c.zarr")
    status, out, _ = run("info", tmp_path / "c.zarr")
    assert "response 12, interrupted" in out
    status, out, err = run("trace", "recover", tmp_path / "d.zarr")
    assert (status, out) == (2, "")
    assert err.startswith("error: nothing to recover for ")
    assert run("verify", tmp_path / "c.zarr")[0] == 0


def test_opening_a_draft_points_to_the_command(tmp_path):
    """Who gives the hidden folder where a trace is expected learns what to do."""
    left = interrupted(tmp_path / "a.zarr")

    with pytest.raises(TraceError, match=r"incomplete \(512 tokens.*`kvsim trace recover`"):
        open_trace(left.path)
