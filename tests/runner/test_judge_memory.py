"""Memory of the judge: of many records of one trace together, and of its full pass."""

import json
import subprocess

import pytest

pytestmark = pytest.mark.deep

MEMORY = 160 << 20

#: Functions of both programs.
PEAK = """
import dataclasses, json, pathlib, sys
import torch, transformers
import kvsim
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel

def peak(name="VmHWM"):
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))
"""

#: What is imported and built once is measured first, by one record.
JUDGE = f"""{PEAK}
memory, count = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=99, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
)
model = transformers.LlamaForCausalLM(config).eval()
tokens = torch.randint(0, 99, (1700,)).tolist()
trace = kvsim.capture(model, None, tokens[:1500], response=tokens[1500:])
judge = Judge(RunningModel(model), trace, memory)
for policy in sys.argv[3:]:
    record = kvsim.replay(trace, policy, 1000)
    (alone,) = judge.outcomes([record])
    before = peak()
    together = judge.outcomes([record] * count)
    same = all((one.forced.kl == alone.forced.kl).all() for one in together)
    print(json.dumps([policy, peak() - before, same]))
"""

#: A trace in 16 bits does not hold the cache of a model in 32, so that the whole prompt runs.
FULL = f"""{PEAK}
import ctypes
from kvsim.recorder import forward, hooks

torch.set_num_threads(1)
ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 18)  # arrays go back to the system when they are freed
forward.PAIRS = hooks.REPEATED = 1 << 20
config = transformers.LlamaConfig(
    vocab_size=99, hidden_size=128, intermediate_size=128, num_hidden_layers=1, head_dim=64,
    num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=4096,
)
model = transformers.LlamaForCausalLM(config).eval()
for length in (300, 2000):  # what is imported and built once, then what grows
    tokens = torch.randint(0, 99, (length + 64,)).tolist()
    given = dict(response=tokens[length:], store_dtype="float16", overwrite=True)
    trace = kvsim.capture(model, None, tokens[:length], out=sys.argv[2], **given)
    records = [kvsim.replay(trace, policy, length - 10) for policy in ("snapkv", "tova")]
    judge = Judge(RunningModel(model), trace, int(sys.argv[1]))
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak("VmRSS")
    judge.outcomes(records)
print(peak() - before)
"""


def test_many_records_are_judged_in_bounded_memory(warm_python):
    """Sixty records take no more than the memory, and each has its values alone."""
    command = [warm_python, "-c", JUDGE, str(MEMORY), "60", "snapkv", "h2o+int4"]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)

    assert done.returncode == 0, done.stderr
    for policy, spent, same in map(json.loads, done.stdout.splitlines()):
        print(f"{policy}: {spent / 2**20:.0f} of {MEMORY / 2**20:.0f} MiB")
        assert spent <= MEMORY, policy
        assert same, policy


def test_the_full_pass_is_a_part_of_the_memory(tmp_path, warm_python):
    """Keys and values live once, not repeated for query heads, and batches have the rest."""
    memory = 36 << 20

    command = [warm_python, "-c", FULL, str(memory), str(tmp_path / "a.zarr")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)

    assert done.returncode == 0, done.stderr
    spent = int(done.stdout.split()[-1])
    print(f"{spent / 2**20:.0f} of {memory / 2**20:.0f} MiB")
    assert spent <= memory
