"""What commands refuse: one line that says what was found and what to do, status 2, no file."""

import json
import shlex

import pytest
from command_line import OWN, one_line
from cost_models import LLAMA

REPLAY = "replay TRACE --policy tova --budget 16"
LIVE = "live TRACE --model tiny --policy tova --budget 24"
CAPTURE = "capture --model tiny --out t.zarr"
PLOT = "plot --out x.png"
TEXTS = "prompts --out p.jsonl --model BYTES"
COST = "study cost --policy tova --budget 8"
COST_64 = f"{COST} --model-config CONFIG --context 64"

#: Commands with what their message contains. TRACE is a recorded prompt of tiny, RUN a run of seven
#: prompts, BYTES a folder with a tokenizer of bytes alone, CONFIG the configuration of a model;
#: `mine.py`, `file`, `folder` exist.
REFUSED = {
    # ---------------------------------------------------------------------------------- replay
    "replay TRACE --policy tova --budget 0": "budget is 0; the smallest budget that works is 1",
    f"{REPLAY} --budget many": "budget is 'many'; expected entries",
    f"{REPLAY} --budget 16,,32": "expected names or numbers between commas",
    f"{REPLAY} --budget 0.25": "a share (25%",
    f"{REPLAY} --metric response_kl_tokens": "give --judge, or take kvsim live",
    "info Samplle": "or give one that ships: sample, sample-smollm2; did you mean 'sample'?",
    "replay TRACE --policy tova": "--budget",
    "replay TRACE --policy snapkv --budget 8": "the smallest budget that works is 32",
    f"{REPLAY} --policy tovva": "unknown policy 'tovva'; did you mean 'tova'?",
    f"{REPLAY} --policy knorm+": "unknown policy '' in 'knorm+'; `kvsim policies` lists all",
    f"{REPLAY} --policy nomodule:x": "cannot import 'x' of 'nomodule'",
    f"{REPLAY} --policy mine:not_a_policy": "expected a kvsim.Policy",
    f"{REPLAY} --set windw=3 --policy snapkv": "did you mean 'window'?",
    f"{REPLAY} --set window": "--set is 'window'; expected KEY=VALUE",
    f"{REPLAY} --policy adakv": "such as adakv+tova",
    f"{REPLAY} --metric output_eror": "did you mean 'output_error'?",
    f"{REPLAY} --set protect.sinks=1": "expected sink, recent, prompt",
    f"{REPLAY} --sink 1": "--sink was removed: --set protect.sink=N",
    f"{REPLAY} --set protect.sink=9 --set protect.recent=9": "smallest budget that works is 18",
    f"{REPLAY} --set memory=lots": "memory is 'lots'; expected a size such as 500MB",
    f"{REPLAY} --device gpu": "--device is 'gpu'",
    f"{REPLAY} --interval 0": "interval is [0]",
    f"{REPLAY} --model tiny": "--model was removed: kvsim replay takes --judge=MODEL",
    f"{REPLAY} --out mine.py": "mine.py exists",
    f"{REPLAY} --polcy x": "see kvsim replay --help",
    f"{REPLAY} TRACE": "both called 'small'",
    f"{REPLAY} --set protect.prompt=true": "budget is 16; the smallest budget",
    "replay TRACE --policy mine:odd --set fails_at=16 --budget 16 --out x": (
        "error: odd: the trace has no gate; record it with --o-proj\n"
    ),
    "replay sample --policy tova": "budgets (--budget) is missing",
    "replay sample --budget 48": "policies (--policy) is missing",
    "replay TRACE --budget 8 --set window=8": "give --policy",
    "replay grid.yaml": "cannot be read",
    "sweep": "kvsim sweep was removed: `kvsim replay` takes the file of a grid",
    # ------------------------------------------------------------------------------------ live
    f"{LIVE} --prompts x": "--prompts was removed: kvsim capture records prompts",
    # --------------------------------------------------------------------------------- compare
    "compare RUN --metric outputerror": "'outputerror'; did you mean 'output_error'",
    "compare RUN --budget 25": "--budget 25: the run has none",
    "compare RUN --json --format csv": "--json and --format csv were both given",
    "compare TRACE": "is no run folder",
    "info nowhere.zarr": "nowhere.zarr does not exist, expected a trace",
    "compare BROKEN": "broken.parquet",
    "compare RUN --by stages": "--by is 'stages'; expected stage, layer, turn, task",
    "compare RUN --by level": "no value of entries_seen, output_error, wipeout has level",
    "compare RUN --metric regret,wipeout": "regret: the runs have no value of it; they",
    "compare RUN --metric eror,wipeout": "unknown metric 'eror'",
    "compare RUN --by layer --margin 1": "--margin is of one metric that ranks",
    "report RUN --out x.csv": "expected FILE.html, or `kvsim compare RUN --format csv`",
    # --------------------------------------------------------------------------------- capture
    f"{CAPTURE} --prompt 'facts : hello world'": "'hello', 'world', expected words of its",
    f"{CAPTURE} --prompt LONG": "5001 tokens, expected at most the model's context of 4096",
    CAPTURE: "`kvsim prompts > prompts.jsonl`",
    f"{CAPTURE} --prompt walk --prompts p.jsonl": "both --prompt and --prompts",
    f"{CAPTURE} --prompts nowhere.jsonl": "nowhere.jsonl cannot be read",
    f"{CAPTURE} --prompts WORDS --plan": "prompt 'b': ",
    f"{CAPTURE} --prompts CSV": ", line 1: ",
    f"{CAPTURE} --prompt walk --limit 2": "--limit is given without a file of prompts",
    f"{CAPTURE} --prompt walk --device tpu": "--device is 'tpu'; expected cpu, cuda",
    f"{CAPTURE} --prompt walk --seed x": "see kvsim capture --help",
    f"{CAPTURE} --prompt walk --model ./no": "no model folder at './no'",
    f"{CAPTURE} --prompt walk --out file/t.zarr": "expected a writable folder",
    f"{CAPTURE} --prompt walk --layers x": "--layers is 'x'",
    f"{CAPTURE} --prompt walk --device-map auto --device cpu": "expected one of them",
    # --------------------------------------------------------------------------------- prompts
    "prompts --level two": "--level is 'two'; expected numbers",
    "prompts --out file": "exists; give another --out, or --overwrite",
    "prompts --length 512": "error: --length is an option of models for real text, as smollm2, but",
    f"{TEXTS} --level 1": "error: --level is an option of tiny and tiny-deep, but",
    f"{TEXTS} --task walk": "error: task is 'walk', expected one of needle, needles",
    f"{TEXTS} --length x": "error: --length is 'x'; expected numbers",
    f"{TEXTS} --depth 2 --length 900": "error: depth is 2.0, expected a number",
    # ------------------------------------------------------------------------------------ plot
    f"{PLOT} parteo TRACE": "'parteo'; did you mean 'pareto'?; figures: ",
    f"{PLOT} pareto TRACE": "pareto is drawn from runs, but TRACE is no run; give one of `kv",
    f"{PLOT} pareto RUN --layer 0": "--layer was given, but pareto has none",
    f"{PLOT} iou_by RUN --metric regret": "but iou_by has",
    f"{PLOT} pareto RUN --metric regrett": "'regrett'; did you mean 'regret'",
    f"{PLOT} pareto RUN --metric sparsity": "one of sparsity; the table has entries_seen",
    f"{PLOT} overlap_curves TRACE --interval 8 --set prefill=no": "leave --interval, --set out",
    f"{PLOT} overlap_curves TRACE --layer 99": "layer is 99; small has layers 0 to",
    "plot overlap_curves TRACE --out x.jpg": "expected a file that ends in .png, .svg or .pdf",
    "plot overlap_curves TRACE --out file.png": "file.png exists; give another --out, nothing was",
    f"{PLOT} reconstruction_error TRACE --policy tova --budget 8": "leave --budget out",
    f"{PLOT} reconstruction_error TRACE --policy tova --interval 8": "leave --interval out",
    f"{PLOT} reconstruction_error TRACE": "give --policy POLICY",
    f"{PLOT} token_text TRACE --policy tova,h2o --budget 8": "one policy at one budget, but 2",
    f"{PLOT} token_text TRACE --policy tova --budget 8 --head 99": "head is 99; small has heads",
    f"{PLOT} token_text TRACE sample --policy tova --budget 8": "shows one trace, but 2 were given",
    f"{PLOT} token_text TRACE --policy snapkv --budget 16 --set window=2,4": (
        "token_text shows one policy at one budget, but 2 were given"
    ),
    f"{PLOT} middle_coverage TRACE --policy full --budget 8": "nothing left the cache",
    f"{PLOT} iou_by RUN --by task --by colour": "'colour' is not one of",
    f"{PLOT} bursts RUN": "bursts is drawn from traces, but RUN is a run; give the traces",
    f"{PLOT} pareto RUN a.zarr": "but a.zarr is no run; give one of `kvsim",
    f"{PLOT} pareto RUN --interval 8": "pareto does not replay with it; leave --interval out",
    f"{PLOT} pareto RUN --policy tofa": "--policy tofa: the run has none; did you mean 'tova'?; it",
    f"{PLOT} pareto RUN --metric regret": "one of regret; the table has entries_seen",
    f"{PLOT} pareto UNREADABLE": "unreadable",
    # ------------------------------------------------------------------------------------ cost
    COST: "no model is given; expected --model-config PATH or --trace TRACE",
    f"{COST} --model-config CONFIG": "no context is given; expected --context N",
    f"{COST} --model-config CONFIG --context much": "--context is 'much'",
    f"{COST_64} --policy asl --set first_layer=40": "layer is 40, the model has layers 0..31",
    # --------------------------------------------------------------------------------- listings
    "metrics wipout": "did you mean 'wipeout'",
    "help nonsense": "No such command 'nonsense'",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory, trace, runs, bytes_tokenizer):
    """Paths by the words that stand for them."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "words.jsonl").write_text('{"prompt": "kuga"}\n{"id": "b", "prompt": "hello"}\n')
    (folder / "table.csv").write_text("id,prompt\n")
    (folder / "broken.parquet").write_bytes(b"PAR1")
    (folder / "unreadable").mkdir()
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    (folder / "unreadable" / "run.json").write_text("{}")
    return {
        "TRACE": str(trace),
        "RUN": str(runs / "many"),
        "BYTES": str(bytes_tokenizer),
        "WORDS": str(folder / "words.jsonl"),
        "CSV": str(folder / "table.csv"),
        "BROKEN": str(folder / "broken.parquet"),
        "CONFIG": str(folder / "llama.json"),
        "UNREADABLE": str(folder / "unreadable"),
        "LONG": "walk " * 5000,
    }


@pytest.mark.parametrize("command", REFUSED)
def test_refused(run, places, own, command):
    """The message has one line, nothing is printed, and no file appears or changes."""
    (own / "folder").mkdir()
    for name in ("file", "file.png"):
        (own / name).write_text("mine")
    message = REFUSED[command]
    for word in ("RUN", "TRACE"):
        message = message.replace(f"{word} is", f"{places[word]} is")

    status, out, err = run(*(places.get(word, word) for word in shlex.split(command)))

    assert (status, out) == (2, "")
    assert one_line(err).startswith("error: ")
    assert message in err
    names = {path.relative_to(own).as_posix() for path in own.iterdir()} - {"__pycache__"}
    assert names == {"mine.py", "file", "file.png", "folder"}
    assert (own / "mine.py").read_text() == OWN
    assert (own / "file").read_text() == (own / "file.png").read_text() == "mine"
