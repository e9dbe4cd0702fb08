"""`kvsim capture` and `info`, and traces that are damaged."""

import json
import re
import shutil
import zipfile

import pytest
import torch
import zarr
from command_line import one_line

import kvsim
from damage import edit_header, flip
from kvsim import tiny
from kvsim.studies.language.tasks import prompts


def test_capture_prints_what_was_recorded(printed, tmp_path, prompt):
    """A captured trace is described in one line, with the verdict on the answer."""
    out = tmp_path / "new" / "t.zarr"

    text = printed("capture", "--model", "tiny", "--prompt", prompt, "--out", out)

    assert one_line(text).startswith(f"{out}: ")
    assert text.rstrip().endswith(" right")
    assert kvsim.open_trace(out).meta["answer_check"]["right"]


@pytest.mark.parametrize(("limit", "cut"), [(4, True), (0, False), (200, False)])
def test_capture_says_that_a_response_was_cut(run, printed, tmp_path, prompt, limit, cut):
    """With the option, and `info` says so; not of a response that ended, or of none."""
    out = tmp_path / "t.zarr"

    text = printed(
        "capture", "--model", "tiny", "--prompt", prompt, "--max-new-tokens", limit, "--out", out
    )

    assert text.count("\n") == 1
    assert (", cut by --max-new-tokens)" in text) == cut
    assert ("response 4, cut by --max-new-tokens)" in run("info", out)[1]) == cut


def test_capture_with_output_projections(run, printed, tmp_path, prompt, trace):
    """They lie next to the trace, `info` shows their size; with `--no-o-proj` there are none."""
    out = tmp_path / "t.zarr"
    arguments = ["--prompt", prompt, "--max-new-tokens", "2"]

    printed("capture", "--model", "tiny", *arguments, "--out", out)

    own = kvsim.open_trace(out)
    assert own.read("o_proj").shape[:3] == (own.n_layers, own.n_qheads, own.dim)
    _, text, _ = run("info", out)
    (line,) = (line for line in text.splitlines() if line.startswith("projections "))
    assert ", ".join(map(str, own.read("o_proj").shape)) in line
    assert run("info", out, "--deep")[0] == 0
    (folder,) = tmp_path.glob("projections-*")
    assert f'folder "{folder.name}"' in line
    shutil.rmtree(folder)
    assert "present False" in run("info", out)[1]
    without = tmp_path / "without.zarr"
    run("capture", "--model", "tiny", *arguments, "--no-o-proj", "--out", without)
    assert not kvsim.open_trace(without).has("o_proj")
    assert "\nprojections" not in run("info", without)[1]


def test_capture_of_a_file_of_prompts(printed, tmp_path):
    """Several prompts give a folder of traces; `--limit` takes the first; JSON describes them."""
    file = tmp_path / "prompts.jsonl"
    samples = prompts(3, task="walk", facts=4, lines=2, kinds=2)
    file.write_text(
        "".join(
            json.dumps({"id": f"p{i}", "prompt": s.prompt}) + "\n" for i, s in enumerate(samples)
        )
    )
    arguments = ["capture", "--model", "tiny", "--prompts", file, "--max-new-tokens", "4", "--json"]

    out = printed(*arguments, "--limit", "2", "--out", tmp_path / "many")

    assert [t["name"] for t in json.loads(out)["traces"]] == ["p0", "p1"]
    assert sorted(p.name for p in (tmp_path / "many").glob("*.zarr")) == ["p0.zarr", "p1.zarr"]
    assert len(list((tmp_path / "many").iterdir())) == 3  # and the projections of both

    out = printed(*arguments, "--limit", "1", "--out", tmp_path / "one.zarr")

    assert json.loads(out)["traces"][0]["path"] == str(tmp_path / "one.zarr")


def test_a_folder_of_traces_may_have_the_name_of_a_trace(run, printed, tmp_path):
    """Several prompts under one name that ends in `.zarr` are read like any folder of traces."""
    file, many = tmp_path / "prompts.jsonl", tmp_path / "above" / "many.zarr"
    samples = prompts(2, task="walk", facts=4, lines=2, kinds=2)
    file.write_text("".join(json.dumps(s.row(f"p{i}")) + "\n" for i, s in enumerate(samples)))
    run("capture", "--model", "tiny", "--prompts", file, "--max-new-tokens", "4", "--out", many)
    policy = ["--policy", "tova", "--budget", "16"]

    for command in (
        ["info", many],
        ["replay", many, *policy],
        ["live", many, "--model", "tiny", *policy],
        ["info", many.parent],
    ):
        out = printed(*command)
        assert all(f"p{i}" in out for i in range(2))
    status, _, err = run("plot", "retention_map", many, *policy, "--out", tmp_path / "a.png")
    assert (status, one_line(err)) == (2, "error: retention_map shows one trace, but 2 were given")
    shutil.rmtree(many / "p0.zarr" / "q")
    assert "p0.zarr: " in run("info", many)[1]


def test_capture_refuses_what_exists(run, printed, tmp_path, trace, prompt):
    """Something at the output path is kept, unless it is a trace and may be overwritten."""
    target = tmp_path / "t.zarr"
    shutil.copytree(trace, target)
    before = kvsim.open_trace(target).digest
    arguments = ["capture", "--model", "tiny", "--prompt", prompt, "--max-new-tokens", "2"]

    status, _, err = run(*arguments, "--out", target)
    assert status == 2
    assert "exists, expected a free path" in one_line(err)
    assert kvsim.open_trace(target).digest == before

    printed(*arguments, "--out", target, "--overwrite")
    assert kvsim.open_trace(target).digest != before


def chunk(trace, name):
    """A chunk of an array of a stored trace."""
    return min(p for p in (trace / name / "c").rglob("*") if p.is_file())


DAMAGE = {
    "newer": (lambda t: edit_header(t, lambda a: a.update(kvsim_format=99)), "99"),
    "missing chunk": (lambda t: chunk(t, "k").unlink(), "k/c/0/0/0/0"),
    "damaged chunk": (lambda t: flip(chunk(t, "k")), "k"),
    "missing array": (lambda t: shutil.rmtree(t / "v"), "v/c/0/0/0/0"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_traces_are_refused(run, tmp_path, trace, kind):
    """A check says what is wrong, replay refuses; both with status 2 and without a traceback."""
    path = tmp_path / "t.zarr"
    shutil.copytree(trace, path)
    damage, expected = DAMAGE[kind]
    damage(path)

    status, out, err = run("info", path, "--deep")
    assert status == 2
    assert expected in one_line(err)
    assert ("undamaged" in out) is False

    arguments = ["--policy", "tova,h2o", "--budget", "16", "--out", tmp_path / "run"]
    status, out, err = run("replay", path, *arguments)
    assert (status, out) == (2, "")
    assert one_line(err).startswith("error: ")
    assert expected in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.zarr"]


@pytest.mark.parametrize("kind", ["empty", "foreign", "file", "zip"])
def test_what_is_no_trace(run, tmp_path, kind):
    """A folder or a file that never was a trace is called none, in one line, and not damaged."""
    given = tmp_path / "t.zarr"
    if kind == "file":
        given.write_text("no trace")
    elif kind == "zip":
        with zipfile.ZipFile(given, "w") as archive:
            archive.writestr("notes.txt", "no trace")
    else:
        zarr.create_group(given) if kind == "foreign" else given.mkdir()

    status, out, err = run("info", given)

    assert (status, out) == (2, "")
    assert re.match(r"error: \S+t\.zarr is not a kvsim trace", one_line(err))
    assert "damaged" not in err


def test_a_plan_is_that_of_the_capture_and_records_nothing(run, tmp_path, prompt):
    """`--plan` prints disk and memory of what the capture writes."""
    out = tmp_path / "folder" / "a.zarr"
    arguments = ["capture", "--model", "tiny", "--prompt", prompt, "--max-new-tokens", 2]
    arguments += ["--out", out]

    shown, planned = run(*arguments, "--plan"), run(*arguments, "--plan", "--json")
    assert not out.parent.exists()
    assert [line.split()[0] for line in shown[1].splitlines()] == ["disk", "memory"]

    assert run(*arguments)[0] == 0
    files, plan = [x for x in out.parent.rglob("*") if x.is_file()], json.loads(planned[1])
    assert plan["files"] == len(files)
    assert plan["bytes"] == pytest.approx(sum(x.stat().st_size for x in files), rel=0.3)


def test_a_plan_needs_neither_weights_nor_the_device(run, tmp_path):
    """A configuration and token ids are enough, and memory is said of the CPU and of the GPU."""
    (tmp_path / "model").mkdir()
    config = (tiny.MODELS["tiny"] / "config.json").read_text("utf-8")
    (tmp_path / "model" / "config.json").write_text(config, "utf-8")
    (tmp_path / "p.jsonl").write_text('{"id": "a", "tokens": [1, 2, 3]}\n', "utf-8")
    prompts = ["--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "out"]
    commands = [
        ["capture", "--model", tmp_path / "model", *prompts],
        ["replay", "sample", "--policy", "tova", "--budget", 64],
        ["replay", "sample", "--policy", "tova", "--budget", 64, "--judge"],
        ["live", "sample", "--model", "tiny", "--policy", "tova", "--budget", 64],
    ]
    for command in commands:
        of_cpu = json.loads(run(*command, "--plan", "--json")[1])
        status, shown, _ = run(*command, "--device", "cuda", "--plan")
        of_gpu = json.loads(run(*command, "--device", "cuda", "--plan", "--json")[1])

        assert status == 0
        assert re.search(r"memory +[\d.]+ \wB of the CPU, [\d.]+ \wB of the GPU\n", shown)
        assert of_cpu["device_memory"] == 0 < of_gpu["device_memory"]
        if not torch.cuda.is_available():
            assert run(*command, "--device", "cuda")[0] == 2
