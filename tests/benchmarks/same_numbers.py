"""Whether two versions of kvsim compute the same numbers, to the bit.

    python tests/benchmarks/same_numbers.py write OUT      # of the version on the path: minutes
    python tests/benchmarks/same_numbers.py compare A B    # what differs, and by how much

`write` replays every policy and preset, and some combinations, over the sample, over new captures
of the shipped models, over models with random weights (sliding windows, softcap, sinks) and over
random arrays; it measures every metric of every record and tabulates every other analysis. To
compare a change with what was there before::

    git worktree add /tmp/before REVISION
    PYTHONPATH=/tmp/before python tests/benchmarks/same_numbers.py write /tmp/numbers/before
    PYTHONPATH=. python tests/benchmarks/same_numbers.py write /tmp/numbers/after
    python tests/benchmarks/same_numbers.py compare /tmp/numbers/before /tmp/numbers/after
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import polars as pl
import torch

ROOT = Path(__file__).resolve().parents[2]

#: Outer parts alone, and combinations that one name by itself does not reach.
COMBINED = (
    *("global+tova", "global+expected_attention", "criticalkv+snapkv", "adakv+snapkv"),
    *("adakv@kvpress+snapkv", "chunkkv+snapkv", "chunkkv@kvpress+tova", "ams+expected_attention"),
    *("ams@release+expected_attention", "ams+global+knorm", "ams+rkv@ams", "asl+snapkv@kvpress"),
    *("fastkv+gkv", "adakv+criticalkv+h2o"),
)
CALIBRATED = {"qfilter", "triattention"}
FAMILIES = ("gemma2", "gpt_oss", "llama")


def home(name, *modules):
    """The object called `name` in the first of the modules that exists and has it."""
    for module in modules:
        try:
            return getattr(importlib.import_module(f"kvsim.{module}"), name)
        except (ImportError, AttributeError):
            continue
    raise LookupError(f"{name} is in none of {', '.join(modules)}")


def traces(folder):
    """(trace, budgets, intervals) of everything that is replayed."""
    import kvsim
    from kvsim.recorder import load_model

    sys.path.append(str(ROOT / "docs"))
    import families

    yield kvsim.open_trace(kvsim.sample_trace()), (48, "25%"), (None, 32)
    prompts = home("prompts", "tiny.tasks")
    for name, task in (("tiny", "walk"), ("tiny-deep", "walk")):
        model, tokenizer = load_model(name)
        trace = kvsim.capture(
            *(model, tokenizer, prompts(1, task=task, level=1)[0].prompt),
            max_new_tokens=128,
            o_proj=True,
            residual=True,
            out=folder / f"{name}.zarr",
        )
        yield trace, (64,), (None, 32)
    for name in FAMILIES:
        known = families.FAMILIES[name]
        model = known.build(known.kernels[0])
        yield (
            kvsim.capture(model, None, families.ids(families.PROMPT), max_new_tokens=families.NEW),
            *((40,), (16,)),
        )
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(7)
        q, k, v = (torch.randn(2, h, 200, 16, generator=generator, dtype=dtype) for h in (6, 2, 2))
        rope = kvsim.Rope.default(16)
        name = f"random-{str(dtype).removeprefix('torch.')}"
        trace = kvsim.Trace.from_arrays(q, k, v, prompt_len=90, rope=rope, name=name)
        yield trace, (40,), (None, 8)


def policies(trace):
    """Every policy, preset and combination, with calibration from the trace itself."""
    import kvsim

    names = home("names", "policies")
    outer = {"global", "criticalkv", "adakv", "chunkkv", "union"}
    for name in (*names(), *COMBINED):
        base = name.partition("@")[0]
        if base in outer and "+" not in name:
            continue
        params = {"calibration": "prefix:64"} if base in CALIBRATED else {}
        yield kvsim.policy(name, **params)


def write(folder, only=""):
    """Records, tables and analyses of every trace whose label holds `only` into a folder."""
    folder.mkdir(parents=True)
    import kvsim

    found = []
    for place, (trace, budgets, intervals) in enumerate(traces(folder)):
        label = f"{place}-{trace.name}"
        if only not in label:
            continue
        records, evicted, refused = [], {}, {}
        for policy in policies(trace):
            for budget in budgets:
                entries = int(trace.n_pos * 0.25) if budget == "25%" else budget
                for interval in intervals:
                    key = f"{policy.name}|{entries}|{interval}"
                    try:
                        record = kvsim.replay(
                            trace, policy, entries, interval=interval, internals=True
                        )
                    except kvsim.KvsimError as error:
                        refused[key] = type(error).__name__
                        continue
                    evicted[key] = record.evicted_at
                    records.append((key, record))
        np.savez(folder / f"{label}.npz", **evicted)
        (folder / f"{label}.refused.json").write_text(json.dumps(refused, indent=1))
        frames = []
        for start in range(0, len(records), 16):
            part = records[start : start + 16]
            for key, record in part:
                table = kvsim.measure(trace, record, events=True)
                frames.append(table.with_columns(key=pl.lit(key)))
        pl.concat(frames).write_parquet(folder / f"{label}.table.parquet")
        print(label, len(records), "records", sum(map(len, frames)), "values", flush=True)
        for name, table in analyses(trace, frames).items():
            table.write_parquet(folder / f"{label}.{name}.parquet")
        found.append(label)
    costs(folder)


def analyses(trace, frames):
    """Tables of everything that is no metric of a record."""
    import kvsim

    out = {}
    old, new = "diagnostics", "analysis"
    where = (new, old)

    def add(name, make):
        try:
            out[name] = make()
        except kvsim.KvsimError as error:
            out[name] = pl.DataFrame({"error": [type(error).__name__]})

    add("findings", lambda: kvsim.measure(trace))
    expected = home("expected_and_observed", *where)
    cut = max(1, trace.prompt_len)
    add("key_table", lambda: home("key_table", *where)([expected(trace, cut)]))
    add(
        "normality",
        lambda: home("normality_table", *where)([home("state_normality", *where)(trace)]),
    )
    add(
        "projections",
        lambda: home("projection_table", *where)([home("key_projections", *where)(trace)]),
    )
    add("overlap", lambda: home("overlap_table", *where)(trace, 0))
    add("sparsity", lambda: home("sparsity_table", *where)(trace))

    def diagnosis():
        ranking = home("ranking", *where)(trace)
        return [home("diagnose", *where)(trace, ranking, b) for b in (24, trace.prompt_len // 2)]

    for name in ("layer_table", "selection_table"):
        add(name, lambda name=name: home(name, *where)(diagnosis()))
    tova, snapkv = kvsim.policy("tova"), kvsim.policy("snapkv", window=8)
    add("reconstruction", lambda: home("reconstruction_table", *where)(trace, [tova, snapkv]))
    table = pl.concat(frames).drop("key")
    where = ("analysis.summaries", "statistics")
    keyed = table.filter(pl.col("event").is_null())
    add("averages", lambda: home("averages", *where)(keyed))
    add("summary", lambda: home("summarise", "sweeps", "analysis.summaries")(keyed))
    add("stages", lambda: home("averages", *where)(home("stages", *where)(keyed), ["stage"]))
    add(
        "compare",
        lambda: home("compare", *where)(
            keyed.unique(
                subset=[c for c in keyed.columns if c not in ("value", "chance", "fidelity")],
                maintain_order=True,
            ),
            "snapkv",
        ),
    )
    return out


def costs(folder):
    """What every policy costs on a model's shape."""
    import kvsim

    estimate = home("estimate", "cost")
    trace = kvsim.open_trace(kvsim.sample_trace())
    sizes = home("Model", "cost").from_trace(trace)
    out = {}
    for policy in policies(trace):
        for context, budget, prompt in ((4096, 256, 2048), (1000, 300, 1000)):
            key = f"{policy.name}|{context}|{budget}"
            try:
                out[key] = estimate(sizes, policy, budget, context, prompt=prompt).as_dict()
            except kvsim.KvsimError as error:
                out[key] = type(error).__name__
    (folder / "costs.json").write_text(json.dumps(out, indent=1, default=str))


def compare(first, second, rounding=0.0):
    """Print what differs between two folders; gives the number of places that do.

    rounding: values that differ by no more, relative to the larger of the two and 1, are counted in
    one line for each table.
    """
    names = sorted({p.name for f in (first, second) for p in f.iterdir() if p.is_file()})
    wrong = 0
    for name in names:
        a, b = first / name, second / name
        missing = [str(p) for p in (a, b) if not p.exists()]
        if missing:
            lines = [f"missing: {missing[0]}"]
        elif name.endswith(".npz"):
            lines = compare_records(np.load(a), np.load(b))
        elif name.endswith(".json"):
            lines = compare_documents(json.loads(a.read_text()), json.loads(b.read_text()))
        else:
            lines = compare_tables(pl.read_parquet(a), pl.read_parquet(b), rounding)
        for line in lines:
            print(f"{name}: {line}")
        wrong += len(lines)
    print(f"{len(names)} files, {wrong} differences")
    return wrong


def compare_records(a, b):
    """Keys that one lacks, and the overlap of what stays at the end where records differ."""
    lines = [f"only in one: {key}" for key in sorted({*a} ^ {*b})]
    for key in sorted({*a} & {*b}):
        if not np.array_equal(a[key], b[key]):
            last = 2**31 - 1
            one, two = a[key] == last, b[key] == last
            iou = (one & two).sum() / max(1, (one | two).sum())
            lines.append(f"{key}: {(a[key] != b[key]).mean():.2%} of entries, final IoU {iou:.3f}")
    return lines


def compare_documents(a, b):
    """Keys whose documents differ, and the fields that do."""
    lines = []
    for key in sorted({*a} | {*b}):
        if a.get(key) != b.get(key):
            one, two = a.get(key), b.get(key)
            fields = (
                [f for f in one if one[f] != two.get(f)]
                if isinstance(one, dict) and isinstance(two, dict)
                else [one, two]
            )
            lines.append(f"{key}: {fields}")
    return lines


def compare_tables(a, b, rounding):
    """Columns, rows and values that differ, by metric and key where there are such columns."""
    if {"policy", "params"} <= {*a.columns} & {*b.columns}:
        # a policy has one set of parameters here, and another version may know more of them
        a, b = a.drop("params"), b.drop("params")
    if a.columns != b.columns:
        odd = sorted({*a.columns} ^ {*b.columns})
        if odd:
            return [f"columns {odd}"]
        b = b.select(a.columns)
    if a.schema != b.schema:
        return [f"types {[c for c in a.columns if a.schema[c] != b.schema[c]]}"]
    if a.equals(b, null_equal=True):
        return []
    rows = f"{len(a)} and {len(b)} rows"
    index = [c for c in a.columns if not a.schema[c].is_float()]
    floats = [c for c in a.columns if a.schema[c].is_float()]
    if a.select(index).is_duplicated().any():
        index_a = a.with_columns(n=pl.int_range(pl.len()).over(index))
        index_b = b.with_columns(n=pl.int_range(pl.len()).over(index))
        index = [*index, "n"]
    else:
        index_a, index_b = a, b
    both = index_a.join(index_b, on=index, how="full", nulls_equal=True, coalesce=True, suffix="_b")
    by = [c for c in ("metric", "variant", "key") if c in index]
    lines = []
    for column in floats:
        gap = (pl.col(column) - pl.col(f"{column}_b")).abs()
        differ = ~pl.col(column).eq_missing(pl.col(f"{column}_b"))
        larger = pl.max_horizontal(pl.col(column).abs(), pl.col(f"{column}_b").abs(), pl.lit(1.0))
        little = (gap <= rounding * larger).fill_null(value=False)
        rounded = both.filter(differ & little)
        if len(rounded):
            most = rounded.select(gap.max()).item()
            lines.append(f"{column} {len(rounded)} values differ by rounding, at most {most:.1e}")
        changed = both.filter(differ & ~little)
        if not len(changed):
            continue
        grouped = (
            changed.group_by(by).agg(n=pl.len(), largest=gap.max())
            if by
            else changed.select(n=pl.len(), largest=gap.max())
        )
        lines += [f"{column} {row}" for row in grouped.sort(grouped.columns).iter_rows()]
    return lines or [f"other order or rows: {rows}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="traces whose label holds this alone")
    parser.add_argument("--rounding", default=0.0, type=float, help="relative, of what is counted")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "write":
        write(given.folders[0], given.only)
    else:
        sys.exit(min(1, compare(*given.folders, given.rounding)))
