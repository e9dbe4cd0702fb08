"""Models on devices: maps, weights that come and go, precisions, and what is no model."""

import accelerate
import pytest
import torch
from recorder_models import four_layers

from families import ids
from kvsim.errors import CaptureError
from kvsim.recorder import capture, capture_many, load_model, loading
from small_model import words_tokenizer

ARRAYS = ("q", "k", "v", "attn_out", "lse", "o_proj", "residual")


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_a_device_map_is_passed_on(device_map, saved):
    """On a machine with one device, a model that is spread over all is recorded as any other."""
    model, tokenizer = load_model(saved, device_map=device_map, dtype="float32")

    trace = capture(model, tokenizer, ids(40), max_new_tokens=3, residual=True, o_proj=True)

    expected = capture(
        four_layers(), words_tokenizer(), ids(40), max_new_tokens=3, residual=True, o_proj=True
    )
    for name in ARRAYS:  # weights lie at other addresses
        assert torch.allclose(trace.read(name), expected.read(name), atol=1e-4)


@pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")
def test_layers_whose_weights_come_and_go(saved, tmp_path):
    """Layers that accelerate moves about are recorded; their projections, which leave, are not."""
    model, _ = load_model(saved)
    places = {name: "cpu" for name, _ in model.model.named_children() if name != "layers"}
    places = {f"model.{name}": place for name, place in places.items()} | {"lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    moved = accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=tmp_path / "off", force_hooks=True
    )
    assert moved.model.layers[1].self_attn.q_proj.weight.is_meta

    trace = capture(moved, None, ids(40), max_new_tokens=3, residual=True)

    expected = capture(four_layers(), None, ids(40), max_new_tokens=3, residual=True)
    assert trace.tokens.tolist() == expected.tokens.tolist()
    for name in ("q", "k", "v", "attn_out", "residual"):
        assert torch.allclose(trace.read(name), expected.read(name), atol=1e-4)
    with pytest.raises(CaptureError, match="o_proj of layer 1 is offloaded"):
        capture(moved, None, ids(4), max_new_tokens=0, o_proj=True)


@pytest.mark.parametrize("model", [None, 5, b"tiny", torch.nn.Sequential(torch.nn.Linear(2, 2))])
def test_what_is_no_model_is_refused(model, tmp_path):
    """Neither a model of transformers nor a name: one line, also for many prompts."""
    for call in (
        lambda: capture(model, None, [1, 2]),
        lambda: capture_many(model, None, [], tmp_path / "many"),
    ):
        with pytest.raises(CaptureError, match=r"model is of type \w+; expected a mod") as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(CaptureError, match="tokenizer is of type int; expected a tokenizer of"):
        capture(four_layers(), 5, "w1 w2")


def test_the_precision_of_a_spread_model(saved, monkeypatch):
    """Without a dtype, the CPU gets float32 and a map the checkpoint's own."""
    asked = []

    def load(place, **options):
        asked.append((options["dtype"], options.get("device_map")))
        return four_layers(), {"missing_keys": set(), "mismatched_keys": set()}

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)

    for options in ({}, {"device_map": "cpu"}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}):
        load_model(saved, **options)

    kinds = [torch.float32, torch.float32, "auto", "auto"]
    assert asked == list(zip(kinds, [None, "cpu", "auto", {"": "cpu"}], strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto", "device": "cpu"}, "device is 'cpu' and device_map 'auto'"),
        ({"device_map": "nowhere"}, "nowhere"),
        ({"device_map": {"": "cuda:99"}}, "cannot be loaded"),
    ],
)
def test_device_maps_that_are_refused(options, message, saved):
    """In one line."""
    with pytest.raises(CaptureError, match=message) as caught:
        load_model(saved, **options)

    assert "\n" not in str(caught.value)
