"""Plans of captures: from shapes alone, against what captures take."""

import json
import subprocess

import pytest
import recorder_models
import torch
from recorder_models import build

from kvsim.errors import OutputError
from kvsim.recorder import Options, Prompt, capture, capture_many
from kvsim.recorder import forecast as forecasts
from kvsim.recorder.loading import load_outline
from kvsim.recorder.session import Session
from kvsim.store import forecast as store_forecast
from kvsim.store.forecast import Forecast
from kvsim.studies.language import tasks


@pytest.fixture
def plans(monkeypatch):
    """The plans that captures are checked by, one after the other."""
    found = []
    monkeypatch.setattr(Forecast, "check", lambda plan, _: found.append(plan))
    return found


def took(folder):
    """Bytes and files below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files), len(files)


@pytest.mark.parametrize(
    ("family", "n", "new", "options"),
    [
        ("llama", 300, 20, {}),
        ("qwen3", 40, 4, {"layers": [0], "o_proj": False}),
        ("qwen2", 700, 0, {"residual": True, "store_dtype": "float16"}),
        ("gemma3", 150, 9, {}),
        ("llama", 256, 1, {"probe": "repeat"}),
    ],
)
def test_a_plan_has_the_bytes_and_files_of_the_capture(tmp_path, plans, family, n, new, options):
    """Bytes are within 30 percent, files are those that are written."""
    model = build(family)
    tokens = torch.randint(3, 60, (n,), generator=torch.Generator().manual_seed(0)).tolist()

    out = tmp_path / "folder" / "a.zarr"
    capture(model, None, tokens, out=out, max_new_tokens=new, **options)

    written, files = took(tmp_path / "folder")
    (plan,) = plans
    assert plan.files == files
    assert plan.written == pytest.approx(written, rel=0.3)


def test_a_plan_without_weights_is_that_of_the_loaded_model(tmp_path, plans):
    """Arrays and files of `tiny` follow from its configuration and tokenizer."""
    texts = [each.prompt for each in tasks.prompts(2, task="walk")]
    prompts = [Prompt(name, text) for name, text in zip("ab", texts, strict=True)]
    options = Options(max_new_tokens=3)

    from_outline = forecasts.planned(
        "tiny", [(each, tmp_path / f"{each.id}.zarr") for each in prompts], options
    )
    capture_many("tiny", None, prompts, tmp_path, max_new_tokens=3)

    (from_weights,) = plans
    assert from_outline.files == from_weights.files
    assert from_outline.written == pytest.approx(from_weights.written)
    assert from_outline.written == pytest.approx(took(tmp_path)[0], rel=0.3)
    assert from_outline.files == took(tmp_path)[1]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe", "gpt_oss", "deepseek"])
def test_a_plan_reads_no_numbers_of_a_model(tmp_path, family):
    """Models of experts, of sinks and of latent attention are planned from their configuration."""
    kernel = "eager" if family == "gpt_oss" else "sdpa"
    latent = family == "deepseek"
    model = recorder_models.latent("deepseek_v3") if latent else build(family, kernel)
    model.config.save_pretrained(tmp_path / "model")

    outline, _ = load_outline(tmp_path / "model", dtype=None, on_cpu=True)

    assert all(each.is_meta for each in outline.parameters())
    sessions = [
        Session(each, None, Prompt("", [1, 2]), Options(max_new_tokens=0), tmp_path / "a", {})
        for each in (outline, model)
    ]
    kept = capture(model, None, [1, 2], max_new_tokens=0)
    plans = [session.arrays(forecasts.outline(session)) for session in sessions]
    assert plans[0] == plans[1]
    for name in ("q", "k", "v"):
        assert plans[0]["shapes"][name] == tuple(kept.read(name).shape)


def test_a_capture_without_room_is_refused_before_it_runs(tmp_path, monkeypatch):
    """One line says what is free and what is planned; `force` records all the same."""
    monkeypatch.setattr(store_forecast, "free_bytes", lambda _: 20_000)
    model, out = build("llama"), tmp_path / "a.zarr"

    with pytest.raises(OutputError, match=r"has 2e-05 GB free, expected .* GB .*--force$"):
        capture(model, None, [3] * 300, out=out, max_new_tokens=0)
    assert not list(tmp_path.iterdir())

    trace = capture(model, None, [3] * 300, out=out, max_new_tokens=0, force=True)
    assert trace.n_pos == 300


#: A capture of a random model: its weights, its tokens and its given response make the peak.
CAPTURE = """
import json, pathlib, sys
import torch, transformers
import kvsim
from kvsim.store.forecast import Forecast

def memory(kind):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

sizes, prompt, response, more = json.loads(sys.argv[1])
torch.manual_seed(0)
before = memory("VmRSS")
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
plans, tokens = [], torch.randint(0, 99, (prompt + response,)).tolist()
options = more | ({"response": tokens[prompt:]} if response else {"max_new_tokens": 0})
Forecast.check = lambda plan, _: plans.append(plan)
kvsim.capture(model, None, tokens[:prompt], out=sys.argv[2], o_proj=False, **options)
print(json.dumps([before, plans[0].memory, memory("VmHWM")]))
"""
_WIDE = {"hidden_size": 128, "intermediate_size": 64, "vocab_size": 100}
_WIDE |= {"num_attention_heads": 128, "num_key_value_heads": 4, "head_dim": 128}
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("sizes", "prompt", "response", "options"),
    [
        ({"hidden_size": 512, "intermediate_size": 12_000, "vocab_size": 30_000}, 40, 0, {}),
        ({"hidden_size": 64, "intermediate_size": 8_000, "vocab_size": 100}, 3_000, 0, {}),
        ({"hidden_size": 64, "intermediate_size": 64, "vocab_size": 40_000}, 600, 1_500, {}),
        (_WIDE, 900, 0, {"chunk": 64}),
        (_WIDE | {"attn_implementation": "eager"}, 400, 0, {}),
    ],
)
def test_a_plan_has_the_peak_of_memory(tmp_path, warm_python, sizes, prompt, response, options):
    """What a process grows by, of weights, prompts, logits, and chunks, within 30 percent."""
    sizes = {**_SMALL, **sizes, "max_position_embeddings": 4096}
    given = json.dumps([sizes, prompt, response, options])
    command = [warm_python, "-c", CAPTURE, given, str(tmp_path / "a.zarr")]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)

    assert done.returncode == 0, done.stderr
    before, planned, peak = json.loads(done.stdout.splitlines()[-1])
    print(f"{sizes}: planned {planned / 2**20:.0f} MiB, peak {peak / 2**20:.0f} MiB")
    assert planned == pytest.approx(peak, rel=0.3)
    assert planned - before == pytest.approx(peak - before, rel=0.45)
