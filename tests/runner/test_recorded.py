"""Whether a model is the recorded one, by what it computes: traces without a digest of weights."""

import copy

import pytest
import torch

import kvsim
from kvsim.core.lazy import threads_for
from kvsim.errors import CaptureError
from kvsim.recorder import Prompt, capture, capture_many, load_model
from kvsim.runner.closed import ClosedLoop
from kvsim.runner.decoding import RunningModel
from kvsim.runner.recorded import unchecked
from kvsim.sweeps.driver import replay_all
from live_runs import older


def check(trace, model):
    """Run the tokens with the full cache and compare."""
    ClosedLoop(RunningModel(model), trace, None, None).check()


@pytest.fixture(scope="module")
def sample():
    """The shipped trace of `tiny`, which is older than the digest of weights."""
    return kvsim.open_trace(kvsim.sample_trace())


@pytest.fixture(scope="module")
def recorded():
    """Traces of `tiny` in each precision, of 200 tokens."""
    prompt = kvsim.open_trace(kvsim.sample_trace()).tokens[:160].tolist()
    return {
        dtype: older(capture(load_model("tiny", dtype=dtype)[0], None, prompt, max_new_tokens=40))
        for dtype in ("float32", "float16", "bfloat16")
    }


def noisy(dtype, share, *parts):
    """`tiny` with noise on weights, a share of their spread; parts: of their names, all if none."""
    model, _ = load_model("tiny", dtype=dtype)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draws) * weight.float().std()
            if not parts or any(part in name for part in parts):
                weight.add_((share * noise).to(weight.dtype))
    return model


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_is_no_difference(dtype, recorded):
    """The other kernel, one thread, and rows that were recorded one by one."""
    check(recorded[dtype], load_model("tiny", dtype=dtype)[0])
    with threads_for(torch.nn.Linear(1, 1)):
        check(recorded[dtype], load_model("tiny", dtype=dtype, attention="eager")[0])


@pytest.mark.parametrize(
    ("dtype", "share"), [("float32", 1e-4), ("float16", 5e-3), ("bfloat16", 1e-2)]
)
def test_other_weights_are_refused(dtype, share, recorded):
    """Noise of a hundredth of the spread of weights in bfloat16, of less in finer precisions."""
    with pytest.raises(CaptureError, match=r"another \w of layer 0 at 199 of 200|at 200 of 200"):
        check(recorded[dtype], noisy(dtype, share))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("layers.0.mlp", "another q of layer 2, by"),
        ("layers.1.self_attn", "another q of layer 2, by"),
        ("layers.2.self_attn.k_proj", "another k of layer 2, by"),
        ("layers.2.mlp", "another likeliest token"),
    ],
)
def test_every_layer_counts(part, words, sample):
    """Weights of a deeper layer show in the last one, those behind it in the response."""
    share = 10.0 if "layers.2.mlp" in part else 0.01
    with pytest.raises(CaptureError, match=rf"^sample: [^\n]*{words}[^\n]*$"):
        check(sample, noisy("float32", share, part))


@pytest.mark.parametrize("at", [0, 471])
def test_one_exchanged_token_is_refused(at, sample):
    """In the prompt, in the response, and at both ends; the line names the token."""
    tokens = sample.tokens.clone()
    tokens[at] = (tokens[at] + 1) % 50

    with pytest.raises(CaptureError, match=rf"at 1 of 472 tokens \(first: {at}\)"):
        check(older(sample, tokens=tokens), load_model("tiny")[0])


def scaled(model):
    """A head of half as much again."""
    model.lm_head.weight = torch.nn.Parameter(1.5 * model.lm_head.weight.detach())


def hooked(model):
    """A hook behind the head, which no digest of weights shows."""
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: 1.01 * logits)


def exchanged(model):
    """The epsilon of the norm before the head, which no layer reads."""
    model.model.norm.variance_epsilon = 0.1


@pytest.mark.parametrize("change", [scaled, hooked, exchanged])
@pytest.mark.parametrize("way", ["given", "batch"])
def test_logits_of_another_scale_are_refused(change, way, sample, tmp_path):
    """By their mean, which shows it where a model is certain of each token, however recorded."""
    model, ids, end = load_model("tiny")[0], sample.tokens.tolist(), sample.prompt_len
    if way == "batch":
        prompts = [Prompt(name, ids[:end]) for name in "ab"]
        options = {"max_new_tokens": 8, "batch": 2}
        trace = capture_many(model, None, prompts, tmp_path, **options)[0]
    else:
        given = {"response": ids[end : end + 8]} if way == "given" else {"max_new_tokens": 8}
        trace = capture(model, None, ids[:end], **given)
    assert min(trace.header.response_logprobs) > -0.01
    check(trace, model)
    trace = older(trace) if change is scaled else trace
    change(model)

    with pytest.raises(
        CaptureError, match=r"^[^\n]*another mean log-likelihood of tokens at [^\n]*$"
    ):
        check(trace, model)


def test_what_an_older_trace_cannot_show_is_said(sample):
    """A judged replay of a trace without log-likelihoods has a remark; one with them has none."""
    assert "without the log-likelihoods of its response" in unchecked(sample)
    run = replay_all(sample, "tova", 48, interval=64, metrics="response_kl", judge="tiny")
    assert unchecked(sample) in run.remarks
    trace = capture(load_model("tiny")[0], None, sample.tokens[:40].tolist(), max_new_tokens=4)
    assert unchecked(trace) == ""


def test_a_digest_of_other_weights_is_enough(recorded):
    """A model that computes the same within rounding is refused where both are known."""
    model, _ = load_model("tiny")
    trace = capture(model, None, recorded["float32"].tokens[:20].tolist(), max_new_tokens=0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        weight = other.model.layers[0].self_attn.k_proj.weight.flatten()
        weight[weight.abs().argmin()] += 1e-6

    check(trace, model)
    check(older(trace), other)
    with pytest.raises(CaptureError, match=r"^the model tiny has weights sha256:[^\n]*$"):
        check(trace, other)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ({"q": slice(0, 4), "k": slice(0, 2), "v": slice(0, 2)}, r"has q of shape \[4, "),
        ({"layer": slice(0, 2)}, "the model tiny has layers 3, expected 2"),
    ],
)
def test_a_trace_of_other_sizes_is_refused(cut, words, sample):
    """Also one that says nothing of its model: by its layers, and by its heads."""
    layers = cut.pop("layer", slice(None))
    arrays = {
        name: sample.read(name)[layers][:, cut.get(name, slice(None))] for name in ("q", "k", "v")
    }
    trace = kvsim.Trace.from_arrays(
        **arrays, prompt_len=sample.prompt_len, rope=sample.ropes[0], tokens=sample.tokens.tolist()
    )

    with pytest.raises(CaptureError, match=rf"^[^\n]*{words}[^\n]*$"):
        check(trace, load_model("tiny")[0])
