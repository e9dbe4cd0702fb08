"""Output projections next to traces: written once, found, checked, and taken along."""

import shutil
from dataclasses import asdict

import pytest
import torch
import zarr

import kvsim
from damage import edit_header, flip, reseal
from kvsim.core.digest import array_fingerprint
from kvsim.errors import CaptureError, NeedsError, TraceError
from kvsim.recorder import Prompt, capture, capture_many
from kvsim.store.opening import find
from kvsim.store.projections import Facts, move_projections, store_projections
from kvsim.store.reader import open_trace
from kvsim.store.verification import describe, verify
from saved_traces import elsewhere
from small_model import small, words_tokenizer

PROMPTS = [Prompt(name, f"w1 w{i} w3 w4") for i, name in enumerate(("a", "b", "c"))]


def weights(dtype=torch.float32):
    """The output projections of the small model [layer, qhead, dim, hidden]."""
    each = [layer.self_attn.o_proj.weight.T for layer in small().model.layers]
    return torch.stack(each).unflatten(1, (4, 8)).detach().to(dtype)


def folders(folder):
    """Folders of projections in a folder."""
    return sorted(path.name for path in folder.glob("projections-*"))


@pytest.fixture
def trace(tmp_path):
    """A trace with its projections next to it."""
    return capture(
        small(), words_tokenizer(), "w1 w2 w3", max_new_tokens=5, out=tmp_path / "a.zarr"
    )


def test_a_capture_stores_them_once_for_all_traces_of_a_model(tmp_path):
    """One folder, named by its digest; every trace reads the model's weights from it."""
    traces = capture_many(small(), words_tokenizer(), PROMPTS, tmp_path, max_new_tokens=3)

    assert len(folders(tmp_path)) == 1
    for trace in traces:
        assert torch.equal(trace.read("o_proj"), weights())
        assert torch.equal(trace.read("o_proj", slice(1, 2)), weights()[1:])
        assert not (trace.path / "o_proj").exists()
        facts = describe(trace.path)["projections"]
        assert (facts["folder"], facts["present"]) == (folders(tmp_path)[0], True)
        assert facts["bytes"] > 0
        assert facts["digest"].startswith(f"sha256:{facts['folder'].removeprefix('projections-')}")
        assert verify(trace.path).ok
    assert [*find(tmp_path, "trace")] == ["a.zarr", "b.zarr", "c.zarr"]


def test_other_layers_and_types_are_other_projections(tmp_path):
    """What is stored differs, so its digest and folder do."""
    options = {"max_new_tokens": 0}
    capture(small(), words_tokenizer(), "w1 w2", out=tmp_path / "a.zarr", **options)
    half = capture(
        small(), words_tokenizer(), "w1", out=tmp_path / "b.zarr", store_dtype="float16", **options
    )
    one = capture(small(), words_tokenizer(), "w1", out=tmp_path / "c.zarr", layers=[1], **options)

    assert len(folders(tmp_path)) == 3
    assert torch.equal(half.read("o_proj"), weights().half().float())
    assert torch.equal(one.read("o_proj"), weights()[1:])


def test_another_capture_that_is_faster_is_no_error(tmp_path):
    """Both have written the folder: the first one stays."""
    drafts = [tmp_path / name for name in ("one", "two")]
    given = (2, 4, 8, 32), weights().__getitem__, "float32"
    for draft in drafts:
        store_projections(tmp_path, draft, *given)
    for draft in drafts:
        move_projections(draft, tmp_path)

    assert len(folders(tmp_path)) == 1


def test_a_capture_without_them_stores_none(tmp_path):
    """`o_proj=False` turns them off; a trace in memory has them only if told to."""
    out = tmp_path / "a.zarr"
    options = {"max_new_tokens": 0}
    trace = capture(small(), words_tokenizer(), "w1 w2", out=out, o_proj=False, **options)

    assert folders(tmp_path) == []
    assert not trace.has("o_proj")
    assert describe(out)["projections"] is None
    assert trace.has("residual_norm")
    assert not capture(small(), words_tokenizer(), "w1", **options).has("o_proj")
    assert capture(small(), words_tokenizer(), "w1", o_proj=True, **options).has("o_proj")


def test_a_trace_without_its_folder_opens_and_says_what_is_missing(trace, tmp_path):
    """Replay and verification work; what needs projections names the folder to copy."""
    (folder,) = folders(tmp_path)
    shutil.rmtree(tmp_path / folder)

    bare = open_trace(trace.path)

    assert verify(trace.path).ok
    assert describe(trace.path)["projections"]["present"] is False
    record = kvsim.replay(bare, kvsim.policy("tova"), 3)
    assert "layer_error" not in set(kvsim.measure(bare, record)["metric"])
    for needs in (
        lambda: kvsim.measure(bare, record, ["layer_error"]),
        lambda: kvsim.replay(bare, kvsim.policy("criticalkv+tova"), 3),
        lambda: bare.read("o_proj"),
    ):
        with pytest.raises(NeedsError, match=f"expected the folder {folder}; copy it there too"):
            needs()


def other_values(folder):
    """Other weights under the same name, with a manifest that fits."""
    zarr.open_group(folder, mode="r+", use_consolidated=False)["o_proj"][1] = (
        weights()[1].numpy() + 1e-3
    )
    reseal(folder)


def test_changed_projections_are_refused_when_they_are_read(trace, tmp_path):
    """The layer that changed, and by `verify`; the other layer, and the trace, still work."""
    flip(tmp_path / folders(tmp_path)[0] / "o_proj/c/1/0/0/0")
    fresh = open_trace(trace.path)

    assert torch.equal(fresh.read("o_proj", slice(0, 1)), weights()[:1])
    with pytest.raises(TraceError, match="'o_proj/c/1/0/0/0' is damaged"):
        fresh.read("o_proj", slice(1, 2))
    assert "'o_proj/c/1/0/0/0' is damaged" in verify(trace.path).problems[0]


def test_projections_with_a_missing_part_are_written_again(trace, tmp_path):
    """By the next capture of the model, so that traces that name them can be read."""
    (tmp_path / folders(tmp_path)[0] / "o_proj/c/1/0/0/0").write_bytes(b"")
    with pytest.raises(TraceError, match="has 0 bytes"):
        open_trace(trace.path)

    capture(small(), words_tokenizer(), "w1 w5", max_new_tokens=5, out=tmp_path / "b.zarr")

    assert verify(trace.path, deep=True).ok
    assert torch.equal(open_trace(trace.path).read("o_proj"), weights())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_other_projections_are_found_by_verify(trace, tmp_path):
    """By the checksum that the trace names; another array is refused when the trace is opened."""
    folder = tmp_path / folders(tmp_path)[0]
    other_values(folder)
    assert "layer 1 has another checksum than the trace names" in verify(trace.path).problems[0]
    edit_header(folder, lambda found: found["projections"].update(dtype="float16"))
    reseal(folder)
    with pytest.raises(TraceError, match="not the output projections of the trace"):
        open_trace(trace.path)


def test_facts_that_do_not_fit_their_digest_are_refused():
    """Whatever is in the place of the facts of a trace."""
    content = {"shape": [2, 4, 8, 32], "dtype": "float32", "source_dtype": "bfloat16"}
    facts = asdict(Facts.of(**content, checksums=["0" * 64] * 2))

    assert asdict(Facts.named({"projections": facts}, "t")) == facts
    assert Facts.named({}, "t") is None
    for change in ({"digest": "sha256:" + "0" * 64}, {"shape": [3, 4, 8, 32]}, {"more": 1}):
        with pytest.raises(TraceError, match=r"t: meta\.projections is .*, expected shape, types"):
            Facts.named({"projections": {**facts, **change}}, "t")
    for wrong in (7, [], "sha256", {}):
        with pytest.raises(TraceError, match=r"t: meta\.projections is"):
            Facts.named({"projections": wrong}, "t")


def test_saved_traces_take_them_along(trace, tmp_path):
    """A copy in another folder has the same folder next to it, and the same weights."""
    copy = open_trace(kvsim.save_trace(trace, tmp_path / "saved" / "a.zarr"))

    assert folders(copy.path.parent) == folders(tmp_path)
    assert torch.equal(copy.read("o_proj"), weights())
    assert (copy.meta, copy.digest) == (trace.meta, trace.digest)
    assert verify(copy.path).ok
    assert not (copy.path / "o_proj").exists()


def test_traces_behind_a_link_or_url_have_them_next_to_them(trace, tmp_path):
    """Read from a store, or next to what the link points to; without them the rest opens."""
    link = tmp_path / "elsewhere"
    link.mkdir()
    (link / "b.zarr").symlink_to(trace.path)
    assert torch.equal(open_trace(link / "b.zarr").read("o_proj"), weights())
    with elsewhere(trace.path.parent) as folder, elsewhere(trace.path) as alone:
        found = open_trace(f"{folder}/a.zarr")
        assert torch.equal(found.read("o_proj"), weights())
        assert verify(found.path).ok
        assert not open_trace(alone).has("o_proj")


def test_a_trace_with_an_array_of_its_own_keeps_it(tmp_path):
    """As before: arrays in memory are stored in the trace, and older traces have them there."""
    trace = capture(small(), words_tokenizer(), "w1 w2", max_new_tokens=2, o_proj=True)

    stored = open_trace(kvsim.save_trace(trace, tmp_path / "a.zarr"))

    assert folders(tmp_path) == []
    assert (stored.path / "o_proj").is_dir()
    assert torch.equal(stored.read("o_proj"), weights())
    facts = stored.source, stored.header, stored.dtype, stored.token_text
    assert array_fingerprint(*facts) == stored.fingerprint == trace.fingerprint


@pytest.mark.parametrize("stored", [True, False])
def test_a_model_whose_layers_change_the_stream_between_them_has_no_norm(stored, tmp_path):
    """With a note by default, on disk and in memory; an error where the stream is asked for."""
    small.cache_clear()
    model, out = small(), tmp_path / "a.zarr" if stored else None
    hook = model.model.layers[1].register_forward_pre_hook(
        lambda _, args: (args[0] * 1.5, *args[1:]), prepend=True
    )

    trace = capture(model, words_tokenizer(), "w1 w2 w3", max_new_tokens=3, out=out)

    assert not trace.has("residual_norm")
    (note,) = trace.meta["notes"]
    assert note.startswith("recorded without residual_norm: the input of decoder layer 1 is not")
    with pytest.raises(CaptureError, match="the input of decoder layer 1 is not"):
        capture(model, words_tokenizer(), "w1 w2", out=tmp_path / "b.zarr", residual=True)
    hook.remove()
    small.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_norm_is_that_of_the_input_of_each_layer(dtype, tmp_path):
    """In float32, of every row of prompt and response, with or without the stream itself."""
    small.cache_clear()
    model = small().to(dtype)
    prompt, options = "w1 w2 w3 " * 100, {"max_new_tokens": 4}
    out = tmp_path / "a.zarr"
    trace = capture(model, words_tokenizer(), prompt, out=out, residual=True, **options)
    memory = capture(model, words_tokenizer(), prompt, **options)

    expected = trace.read("residual").double().norm(dim=-1)
    small.cache_clear()

    norm = trace.read("residual_norm")
    assert norm.shape == (2, 304)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(norm, memory.read("residual_norm"))
    assert describe(out)["arrays"]["residual_norm"]["dtype"] == "float32"
