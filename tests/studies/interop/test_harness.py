"""A policy behind the model interface of lm-evaluation-harness, on tasks of local files."""

import json
from importlib.util import find_spec

import pytest
import torch

from kvsim.errors import PolicyError
from small_model import bytes_tokenizer, small

if find_spec("lm_eval"):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from kvsim.studies.interop.harness import PolicyLM

pytestmark = pytest.mark.peers

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""
WRITTEN = """
task: local_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["zz"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
TASKS = ["local_choice", "local_written"]


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Two tasks of three rows: one with choices, one with responses."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "rows.jsonl"
    texts = [f"item {i} of the list: " + "abc " * (4 + i) for i in range(3)]
    rows = [
        {"question": x, "choices": [" one", " two more"], "label": i % 2, "answer": "a"}
        for i, x in enumerate(texts)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, text in zip(TASKS, (CHOICE, WRITTEN), strict=True):
        (tmp_path / f"{name}.yaml").write_text(text.format(data=data))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def model_and_tokenizer():
    """A random model, and a tokenizer of bytes with an end of text, which the harness needs."""
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    return small(300), tokenizer


def evaluated(model, tasks):
    """Results, and what the model returned for each request."""
    found = lm_eval.simple_evaluate(
        model=model, tasks=TASKS, task_manager=tasks, log_samples=True, bootstrap_iters=0
    )
    returned = {name: [x["resps"] for x in found["samples"][name]] for name in TASKS}
    return found["results"], returned


def test_the_full_cache_scores_as_the_harness_does(tasks):
    """Choices and responses are those of its own model, log-likelihoods equal it but rounding."""
    model, tokenizer = model_and_tokenizer()
    own = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)

    expected, answers = evaluated(own, tasks)
    for policy, budget in (("full", 1), ("snapkv", "100%")):
        found, same = evaluated(PolicyLM(model, tokenizer, policy, budget), tasks)

        for name, metric in zip(TASKS, ("acc,none", "exact_match,none"), strict=True):
            assert found[name][metric] == expected[name][metric]
        assert same["local_written"] == answers["local_written"]
        for got, wanted in zip(same["local_choice"], answers["local_choice"], strict=True):
            for (one,), (other,) in zip(got, wanted, strict=True):
                assert one[0] == pytest.approx(other[0], abs=1e-4)
                assert one[1] == other[1]


def test_a_budget_changes_what_follows_the_context(tasks):
    """A compressed cache has other log-likelihoods, but for the first token of a continuation."""
    model, tokenizer = model_and_tokenizer()
    whole = PolicyLM(model, tokenizer, "full", 1)
    less = PolicyLM(model, tokenizer, "tova", "25%so-far", interval=4)

    assert evaluated(whole, tasks)[1]["local_choice"] != evaluated(less, tasks)[1]["local_choice"]
    one = [(None, [5, 6, 7, 8, 9, 10, 11, 12], [4])]
    assert whole._loglikelihood_tokens(one)[0][0] == pytest.approx(
        less._loglikelihood_tokens(one)[0][0], abs=1e-4
    )
    with pytest.raises(PolicyError, match="rows of the future"):
        PolicyLM(model, tokenizer, "oracle", 8)


SETTINGS = [
    {"repetition_penalty": 1.3, "suppress_tokens": [*range(40)]},
    {"min_new_tokens": 6, "eos_token_id": [*range(0, 300, 3)]},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_generation_are_those_of_the_harness(settings):
    """With the full cache a response is that of its own model, draws included."""
    model, tokenizer = model_and_tokenizer()
    own = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    full, context, responses = PolicyLM(model, tokenizer, "full", 1), torch.arange(40, 70)[None], []

    for each in (own, full):
        torch.manual_seed(0)
        given = {"attention_mask": torch.ones_like(context), **settings}
        responses.append(each._model_generate(context, 60, [tokenizer.eos_token], **given))

    assert responses[1].tolist() == responses[0].tolist()
    assert "forward" not in vars(model)


def test_beams_are_refused():
    """In one line: a live run holds one sequence."""
    model, tokenizer = model_and_tokenizer()
    context = torch.arange(40, 70)[None]
    with pytest.raises(PolicyError, match="2 sequences run at once; expected one"):
        PolicyLM(model, tokenizer, "full", 1)._model_generate(context, 60, ["zz"], num_beams=2)
