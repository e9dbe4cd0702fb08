"""Tasks of reasoning-gym: questions by seed and level, and answers scored by the library."""

import inspect
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.cli import app
from kvsim.errors import ExtraError, TextError
from kvsim.recorder import Prompt, capture_many, read_prompts
from kvsim.studies.language import gym
from small_model import bytes_tokenizer, small

if find_spec("reasoning_gym"):
    from reasoning_gym import factory

pytestmark = pytest.mark.tasks

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
SOME = ("gym:chain_sum", "gym:leg_counting", "gym:spell_backward", "gym:letter_counting")


def drawn(n, *given):
    """The first lines of a seed, a task and a level."""
    return list(islice(gym.draw(*given), n))


@settings(max_examples=12)
@given(st.integers(0, 2**64), st.sampled_from(SOME), st.sampled_from([None, 1, 2, 3]))
def test_the_same_seed_gives_the_same_prompts(seed, task, level):
    """Lines are those of the seed however many are drawn, all different, and JSON keeps them."""
    lines = drawn(6, seed, task, level)

    assert drawn(3, seed, task, level) == lines[:3]
    assert drawn(6, seed + 1, task, level) != lines
    assert json.loads(json.dumps(lines)) == lines
    assert len({line["messages"][1]["content"] for line in lines}) == 6
    for line in lines:
        response = f"Step by step. <answer>{line['answer']}</answer>"
        assert gym.check("", response, {**line, "expected": line["answer"]})["right"] is True


def test_levels_are_steps_of_the_curriculum():
    """Level 3 has the third value of every setting, a level past its end the last one."""
    curriculum = factory.create_curriculum("chain_sum").attributes

    assert gym.levels("gym:chain_sum") == max(len(each.levels) for each in curriculum.values())
    for level in (1, 3, 11):
        for line in drawn(3, 0, "gym:chain_sum", level):
            for name, setting in curriculum.items():
                assert line["metadata"][name] == setting.levels[min(level, len(setting.levels)) - 1]
            assert line["level"] == level
    assert "level" not in drawn(1, 0, "gym:chain_sum")[0]


@pytest.mark.parametrize("task", SOME)
def test_the_score_is_that_of_the_library(task):
    """For right, nearly right and other answers; only the full score is right."""
    (line,) = drawn(1, 3, task, 1)
    known = {**line, "expected": line["answer"]}
    entry = {"question": line["messages"][1]["content"], **line}
    scorer = factory.get_score_answer_fn(task.removeprefix("gym:"))
    answers = [line["answer"], f" {line['answer']}\n", f"{line['answer']} apples", "no", ""]
    seen = set()
    for answer in answers:
        score = scorer(answer.strip(), entry)
        found = gym.check("", f"<answer>0?</answer> then <answer>{answer}</answer>.", known)
        assert (found["score"], found["right"]) == (score, score == 1)
        seen.add(found["right"])
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("6 + 1 is 7, so <answer>7</answer>", "7", True),
        ("<answer>+7.0</answer>", "+7.0", True),
        ("<answer>8</answer> no: <answer> 7 </answer>", "7", True),
        ("<answer>7</answer> no: <answer>8</answer>", "8", False),
        ("<answer>7</answer></think> It is 7.", None, False),
        ("The answer is 7.", None, False),
        ("<answer>7", None, False),
    ],
)
def test_the_answer_is_in_the_last_tag(response, answer, right):
    """After the last </think>; a response without a whole tag has no answer."""
    known = {"scorer": "gym:chain_sum", "expected": "7", "metadata": {}}

    found = gym.check("", response, known)

    assert (found["answer"], found["right"]) == (answer, right)
    assert {key: found[key] for key in known} == known


def test_every_scorer_that_runs_code_is_refused():
    """No task whose module evaluates text is offered, but where it is text of its own."""
    harmless = {"basic_arithmetic", "codeio", "propositional_logic"}  # not what is scored
    code = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
    running = {
        name
        for name, (task, _) in factory.DATASETS.items()
        if code.search(inspect.getsource(sys.modules[task.__module__]))
    }

    assert running - harmless == set(gym._EVALUATED)
    for name in gym._EVALUATED:
        with pytest.raises(TextError, match="its scorer runs answers as Python code; expected"):
            gym.check("", "<answer>1</answer>", {"scorer": f"gym:{name}", "expected": "1"})


@pytest.mark.deep
def test_prompts_do_not_depend_on_the_process():
    """Every task that is offered has the same first line under other hashes of strings."""
    code = (
        "import json, sys\nfrom kvsim.errors import TextError\n"
        "from kvsim.studies.language import gym\nout = {}\n"
        "for name in gym.library().factory.DATASETS:\n"
        "    try:\n        out[name] = next(gym.draw(5, 'gym:' + name))\n"
        "    except TextError as error:\n        out[name] = str(error)\n"
        "print(json.dumps(out))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "12"
    ]

    assert printed[0] == printed[1]
    lines = json.loads(printed[0])
    assert sum(isinstance(line, dict) for line in lines.values()) > 80


@pytest.mark.parametrize(
    ("task", "level", "message"),
    [
        ("gym:chain_sums", None, "'gym:chain_sums', expected .*did you mean 'gym:chain_sum'"),
        ("gym:ransom_note", None, "gym:ransom_note: one seed gives several prompts"),
        ("gym:graph_color", None, "gym:graph_color: reasoning-gym does not score its own answer"),
        ("gym:composite", None, "reasoning-gym cannot write gym:composite .Must specify at least"),
        ("gym:chain_sum", 12, "level of gym:chain_sum is 12, expected 1 to 11"),
        ("gym:chain_sum", 0, "level of gym:chain_sum is 0, expected 1 to 11"),
        ("gym:acre", 1, "level of gym:acre is 1, expected none: the task has no levels"),
        ("gym:caesar_cipher", 4, "cannot write gym:caesar_cipher at level 4"),
    ],
)
def test_what_cannot_be_written_is_one_line(task, level, message):
    """Unknown tasks with near names, levels out of range, and what the library refuses."""
    with pytest.raises(TextError, match=message) as caught:
        drawn(1, 0, task, level)

    assert "\n" not in str(caught.value)


def test_a_task_ends_where_its_questions_do():
    """Instead of repeating them."""
    with pytest.raises(TextError, match=r"level 1 has about \d+ questions; give a smaller --n"):
        drawn(300, 0, "gym:chain_sum", 1)


def test_a_missing_library_names_the_extra(monkeypatch):
    """For prompts, and for a scorer before the model runs."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    gym._scorer.cache_clear()

    for call in (lambda: drawn(1, 0, "gym:chain_sum"), lambda: record("gym:chain_sum")):
        with pytest.raises(ExtraError, match=r"needs kvsim\[tasks\]: pip install 'kvsim\[tasks\]'"):
            call()


def record(scorer):
    """Record a prompt with a scorer."""
    prompt = [{"role": "user", "content": "6 + 1"}]
    options = {"answer": "7", "scorer": scorer, "max_new_tokens": 2}
    return kvsim.capture(small(300), bytes_tokenizer(template=TEMPLATE), prompt, **options)


@pytest.mark.parametrize("scorer", ["gym", "gym:", "jim:chain_sum", "ledger:", "gym:chain_sums"])
def test_an_unknown_scorer_is_refused(scorer, monkeypatch):
    """Before the model runs."""
    monkeypatch.setattr("kvsim.recorder.session.Session.run", None)

    with pytest.raises(TextError, match=r"expected (one of .*)?gym:"):
        record(scorer)


def test_a_file_is_recorded_and_run_live(tmp_path, capsys, monkeypatch):
    """Lines of the command become traces with their scorer, which decides in the live run, too."""
    tokenizer, folder, source = bytes_tokenizer(template=TEMPLATE), tmp_path / "m", tmp_path / "p"
    model = small(300, max_position_embeddings=4000)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    task = ["--task", "gym:chain_sum,gym:leg_counting", "--level", "1,2", "--n", "4"]
    run = app()
    run(["prompts", "--model", str(folder), *task, "--out", str(source)], standalone_mode=False)
    prompts = read_prompts(source)
    written = [json.loads(line) for line in source.read_text().splitlines()]

    traces = capture_many(model, tokenizer, prompts, tmp_path / "t", max_new_tokens=3)

    assert {(p.scorer, p.labels["task"], p.labels["level"]) for p in prompts} == {
        (task, task, level) for task in ("gym:chain_sum", "gym:leg_counting") for level in (1, 2)
    }
    for line, trace in zip(written, traces, strict=True):
        check = trace.meta["answer_check"]
        assert (check["kind"], check["right"], check["score"]) == ("gym", False, 0)
        assert {"scorer": check["scorer"], "metadata": check["metadata"]} == {
            key: line[key] for key in ("scorer", "metadata")
        }
        assert check["expected"] == line["answer"]
    again = capture_many(model, tokenizer, prompts, tmp_path / "t", max_new_tokens=3, resume=True)
    assert [trace.digest for trace in again] == [trace.digest for trace in traces]
    others = [Prompt(**{**vars(each), "scorer": "gym:gcd"}) for each in prompts]
    with pytest.raises(kvsim.errors.CaptureError, match="compared with another answer"):
        capture_many(model, tokenizer, others, tmp_path / "t", max_new_tokens=3, resume=True)

    answer = written[0]["answer"]
    monkeypatch.setattr(gym.library().utils, "extract_answer", lambda _: answer)
    capsys.readouterr()
    live = ["--model", str(folder), "--policy", "tova", "--budget", "40", "--max-new-tokens", "2"]
    paths = [str(trace.path) for trace in traces]
    run(["live", *paths, *live, "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    right = {each["trace"]: each["right"] for each in document["responses"]}
    scorers = {line["id"]: factory.get_score_answer_fn(line["task"][4:]) for line in written}
    assert right == {
        line["id"]: scorers[line["id"]](answer, {"question": "", **line}) == 1 for line in written
    }
    assert right[written[0]["id"]]
    assert document["cells"][0]["answer_right"] == sum(right.values()) / 4
