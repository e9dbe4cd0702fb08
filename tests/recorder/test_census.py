"""One family of each kind, examined as the census does it (`tests/recorder/census.py`)."""

import warnings

import pytest
import torch
from transformers import CONFIG_MAPPING, cache_utils

from tests.recorder import census

#: What must be recorded beside docs/families.py, by the layers in the trace: None for all.
RECORDED: dict[str, list[int] | None] = {
    "opt": None,
    "bart": None,
    "bert": None,
    "cohere2": None,
    "mixtral": None,
    "qwen2_vl#vl": None,
    "falcon_h1": None,
    "zaya": None,
    "zamba2": [1, 3],
    "qwen3_next": [3],
    "bamba": [1],
    "jamba": [1, 3],
    "lfm2": [2],
    "nemotron_h": [2],
    "olmo_hybrid": [3],
    "recurrent_gemma": [2],
    "gemma4_text": None,
    "mimo_v2_flash": None,
    "qwen4_exp_text": [3],
    "minimax_m3_vl_text": None,
    "hy_v4": None,
}

#: What may be recorded or refused in one line; by no means otherwise.
OTHERS = [
    *("mamba", "bloom", "gptj", "minimax", "diffllama", "xlnet", "deepseek_v3"),
    *("gemma3n_text", "llama4_text", "doge", "qwen4_exp_text#budget_64"),
]


@pytest.mark.deep
@pytest.mark.parametrize("name", [*RECORDED, *OTHERS])
def test_families_are_recorded_or_refused(name):
    """Each is recorded exactly or refused in one line; nothing else is raised."""
    if name.partition("#")[0] not in CONFIG_MAPPING:
        pytest.xfail("this release of transformers does not have it")
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = census.examine(name)

    assert found["result"] in ("recorded", "refused"), found
    if name in RECORDED and hasattr(cache_utils, "LinearAttentionLayer"):
        assert found["result"] == "recorded", found
        if RECORDED[name] is not None:
            assert found["layers"] == RECORDED[name]


def test_results_are_kept(tmp_path, capsys):
    """A family that was examined is not examined again; one that dies is a foreign result."""
    census.survey(tmp_path, ["llama"], redo=False)
    first = (tmp_path / "llama.json").stat().st_mtime_ns

    census.survey(tmp_path, ["llama", "blt"], redo=False)

    assert (tmp_path / "llama.json").stat().st_mtime_ns == first
    assert capsys.readouterr().out == "llama recorded\nblt not built\n"
