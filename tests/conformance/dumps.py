"""The dumps of docs/dumps: what implementations with known defects keep, on a small random model.

kvpress itself writes those of `PRESSES`, 0.5.5, with its recorder. The G-KV release has no licence,
so that dumps with its two defects are built from replays. `python tests/conformance/dumps.py`
writes all of them again; tests/studies/referee/test_dumps.py judges them.
"""

from pathlib import Path

import torch
from transformers import DynamicCache

from kvsim.recorder.cache import cache_option

FOLDER = Path(__file__).parents[2] / "docs" / "dumps"
PROMPT, INTERVAL, TARGET, LENGTH, WINDOW = 24, 12, 16, 66, 4

#: the press, its arguments, the kernel; the definition, its parameters, and the deviations named
PRESSES = {
    "knorm": ("KnormPress", {}, "sdpa", "knorm", {}, []),
    "streaming": ("StreamingLLMPress", {}, "sdpa", "streaming_llm", {}, ["top-k-order"]),
    "snapkv": (
        "SnapKVPress",
        {"window_size": WINDOW, "kernel_size": 1},
        "sdpa",
        "snapkv@kvpress",
        {"window": WINDOW, "pool_kernel": 1},
        ["window-rotated"],
    ),
    "snapkv-pooled": (
        "SnapKVPress",
        {"window_size": WINDOW, "kernel_size": 5},
        "sdpa",
        "snapkv@kvpress",
        {"window": WINDOW},
        ["window-rotated, top-k-order"],
    ),
    "snapkv-eager": (
        "SnapKVPress",
        {"window_size": WINDOW, "kernel_size": 1},
        "eager",
        "snapkv@kvpress",
        {"window": WINDOW, "pool_kernel": 1},
        ["window-of-one"],
    ),
    "expected-attention": (
        "ExpectedAttentionPress",
        {},
        "sdpa",
        "expected_attention",
        {"query_buffer": 8},
        ["expected_attention@kvpress"],
    ),
}
#: the same of dumps that other calls write
MORE = {
    "ratio": ("knorm", {}, ["one-fewer"]),
    "adakv": (
        "adakv@kvpress+expected_attention@kvpress",
        {"epsilon": 0.01},
        ["evicted-return"],
    ),
    "gkv-release": ("gkv", {"window": WINDOW}, ["event-late"]),
    "gkv-release-streaming": ("streaming_llm", {}, ["sinks-on-top"]),
}
DUMPS = {name: tuple(each[3:]) for name, each in PRESSES.items()} | MORE


def decode(model, tokens, cache, prompt):
    """Run given tokens, the first of them as a prompt and the others one by one."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        model(ids[:, :prompt], **cache_option(model, cache))
        for row in range(prompt, ids.shape[1]):
            at = torch.tensor([row])
            model(
                ids[:, row : row + 1],
                position_ids=at[None],
                cache_position=at,
                **cache_option(model, cache),
            )


def pressed_dump(model, tokens, press):
    """Record what a press in decoding keeps, row by row after the prompt."""
    import kvpress

    from kvsim.studies.referee.recording import recording

    buffer = 8 if isinstance(press, kvpress.ExpectedAttentionPress) else 256
    pressed = kvpress.DecodingPress(press, INTERVAL, TARGET, buffer)
    with pressed(model), recording(model) as tape:
        decode(model, tokens[:LENGTH], DynamicCache(), PROMPT)
    return tape.dump(budget=TARGET, interval=INTERVAL, prefill=False)


def main():
    """Write all of them."""
    import kvpress
    from conftest import random_model_of, random_tokens

    import kvsim
    from kvsim.core.policy import Schedule
    from kvsim.studies.referee.dump import Dump
    from kvsim.studies.referee.recording import recording

    tokens = random_tokens(LENGTH, 1)
    FOLDER.mkdir(exist_ok=True)

    def write(name, dump):
        dump.save(FOLDER / f"{name}.npz", overwrite=True)

    for name, (press, arguments, kernel, *_) in PRESSES.items():
        model = random_model_of("llama", 1, kernel, layers=2)
        write(name, pressed_dump(model, tokens, getattr(kvpress, press)(**arguments)))

    model = random_model_of("llama", 1, layers=2)
    press = kvpress.KnormPress(compression_ratio=0.9)  # keeps 3 of 40
    with torch.no_grad(), press(model), recording(model) as tape:
        model(torch.tensor([tokens[:40]]), past_key_values=DynamicCache())
    write("ratio", tape.dump(budget=4, prefill=True))

    kvpress.attention_patch.patch_attention_functions()
    press = kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(epsilon=0.01))
    write("adakv", pressed_dump(random_model_of("llama", 1, layers=2), tokens, press))

    model, new = random_model_of("llama", 1, layers=2), LENGTH - PROMPT
    trace = kvsim.capture(model, None, tokens[:PROMPT], max_new_tokens=new)
    schedule = Schedule(INTERVAL)

    def kept_by(policy, budget):
        return kvsim.replay(trace, policy, budget, interval=INTERVAL, prefill=True)

    def dump(kept):
        return Dump(kept, (0, 1), trace=trace, budget=TARGET, schedule=schedule)

    record = kept_by(kvsim.policy("gkv", window=WINDOW), TARGET)  # stores sets before each event
    write("gkv-release", dump({row: record.kept(row)[..., : row + 1] for row in record.events}))
    more = kept_by("streaming_llm", TARGET + 4)
    write("gkv-release-streaming", dump(Dump.of_record(more).kept))


if __name__ == "__main__":
    main()
