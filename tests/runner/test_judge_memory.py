"""Memory of judging many records of one trace together."""

import json
import subprocess

MEMORY = 160 << 20

#: What is imported and built once is measured first, by one record.
JUDGE = """
import dataclasses, json, pathlib, sys
import torch, transformers
import kvsim
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel

def peak():
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

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


def test_many_records_are_judged_in_bounded_memory(warm_python):
    """Sixty records take no more than the memory, and each has its values alone."""
    command = [warm_python, "-c", JUDGE, str(MEMORY), "60", "snapkv", "h2o+int4"]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)

    assert done.returncode == 0, done.stderr
    for policy, spent, same in map(json.loads, done.stdout.splitlines()):
        print(f"{policy}: {spent / 2**20:.0f} of {MEMORY / 2**20:.0f} MiB")
        assert spent <= MEMORY, policy
        assert same, policy
