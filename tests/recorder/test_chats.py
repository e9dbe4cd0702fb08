"""Chats: what templates read, open thoughts, and the settings of generation of a response."""

import copy

import pytest
import torch
from transformers import GenerationConfig

import kvsim
from kvsim.errors import CaptureError
from kvsim.recorder import Options, Prompt, Turn, capture, capture_many
from kvsim.recorder.choice import Choice
from kvsim.recorder.encoding import encode
from kvsim.runner.closed import ClosedLoop, Writing
from kvsim.runner.decoding import RunningModel
from kvsim.text.answers import REASONING
from small_model import bytes_tokenizer, small

PARTS = "{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
TEXT = "{{ m.content | trim }}"
BY_ROLE = "{% if m.role == 'system' %}{{ m.content[0]['text'] }}{% else %}" + TEXT + "{% endif %}"
OPENS = "{% if no_thought is not defined %}<think>{% endif %}"


def chat_template(content, opens=""):
    """A template of messages that render their content so."""
    begins = "{% if add_generation_prompt %}<assistant>" + opens + "{% endif %}"
    return "{% for m in messages %}<{{ m.role }}>" + content + ";{% endfor %}" + begins


SWITCH = "{{ m.content | replace('/no_think', '') | trim }}"


@pytest.mark.parametrize("content", [PARTS, TEXT, BY_ROLE, SWITCH])
@pytest.mark.parametrize("question", ["a?", "user", [{"type": "text", "text": "a?"}]])
def test_a_template_has_the_content_that_it_reads(content, question):
    """Text or lists of parts, of each message; what is recorded has the text of all."""
    system = "s /no_think" if content == SWITCH else "s"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    tokenizer = bytes_tokenizer(template=chat_template(content))

    found = encode(Prompt("a", messages), small(300), tokenizer, Options())

    text = question if isinstance(question, str) else "a?"
    assert found.text == f"<system>s;<user>{text};<assistant>"
    assert tokenizer.decode(found.ids) == found.text
    assert found.notes == []


def test_a_last_message_of_the_assistant_is_continued():
    """As in pipelines of transformers; a thought that it begins is one."""
    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>So"}]
    tokenizer = bytes_tokenizer(template=chat_template(TEXT, OPENS))

    prompt = Prompt("a", begun, turns=[Turn("r")])
    found = encode(prompt, small(300), tokenizer, Options(max_new_tokens=4))

    assert found.text == "<user>q;<assistant><think>So"
    assert found.opened == "<think>"
    assert tokenizer.decode(found.turns[0].ids) == ";<user>r;<assistant><think>"
    assert found.turns[0].opened == "<think>"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("opens", ["[THINK]", "<|channel|>analysis<|message|>", "<think>"])
def test_a_response_that_stays_in_its_thought_is_wrong(opens, special):
    """In the trace, with a note, and in a live run; marks may be special tokens."""
    model = copy.deepcopy(small(300))
    tokenizer = bytes_tokenizer(template=chat_template(TEXT, opens))
    marks = [
        *opens.replace("analysis", " ").split(),
        *REASONING[opens].replace("final", " ").split(),
    ]
    tokenizer.add_tokens(list(dict.fromkeys(marks)), special_tokens=special)
    ends = tokenizer(f"no{REASONING[opens]}A", add_special_tokens=False)["input_ids"]
    other = tokenizer("no", add_special_tokens=False)["input_ids"]

    for ids, right in ((other, False), (ends, True)):
        prompt = Prompt("a", "q", answer="A" if right else "no", response=ids, writer="me")
        trace = capture(model, tokenizer, prompt, chat=True)
        check = trace.meta["answer_check"]
        assert (check["right"], check["opened"]) == (right, opens)
        note = f"the response does not leave its reasoning ({opens}): it has no answer"
        assert (note in trace.meta["notes"]) is not right
        choice = Choice(model, ())
        loop = ClosedLoop(RunningModel(model), trace, tokenizer, Writing(4, choice))
        assert loop._right(ids, 0) is right


def test_variables_of_a_template_are_given(tmp_path):
    """They are noted in the trace; a prompt that is no chat has no use for them."""
    model, tokenizer = small(300), bytes_tokenizer(template=chat_template(TEXT, OPENS))
    options = {"chat_template_kwargs": {"no_thought": True}, "max_new_tokens": 0}

    trace = capture(model, tokenizer, "q", chat=True, **options)

    assert trace.meta["text"]["prompt"] == "<user>q;<assistant>"
    assert trace.meta["text"]["template"] == {"no_thought": True}
    with pytest.raises(CaptureError, match="the prompt is no chat, expected messages"):
        capture(model, tokenizer, "q", **options)


IDS = [*range(40, 70)]
SETTINGS = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[6], [34, 255]]},
    {"suppress_tokens": [6, 27]},
    {"begin_suppress_tokens": [6]},
    {"sequence_bias": [[[27], -50.0]]},
    {"min_new_tokens": 9, "eos_token_id": [*range(0, 300, 3)]},
    {"min_length": 36, "eos_token_id": 27},
    {"forced_eos_token_id": 9},
    {"exponential_decay_length_penalty": (3, 2.0), "eos_token_id": 7},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_generation_are_applied(settings, tmp_path):
    """As in the model's own `generate`; alone, in a batch and live with the full cache."""
    model = copy.deepcopy(small(300))
    free = capture(model, None, IDS, max_new_tokens=24)
    model.generation_config = GenerationConfig(**settings)
    how = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(torch.tensor([IDS]), **how)[0].tolist()

    trace = capture(model, None, IDS, max_new_tokens=24)
    prompts = [Prompt(name, IDS) for name in "ab"]
    both = capture_many(model, None, prompts, tmp_path, max_new_tokens=24, batch=2)
    live = kvsim.live(model, [free], ["full", "tova"], 64, max_new_tokens=24, batch=2)

    assert [each.tokens.tolist() for each in (trace, *both)] == [expected] * 3
    assert expected != free.tokens.tolist()
    assert not any("not applied" in note for note in trace.meta["notes"])
    assert min(settings.keys() - {"eos_token_id"}) in trace.meta["generation"]
    record = live.records.find(policy="full") if hasattr(live.records, "find") else live.records[0]
    assert [*IDS, *record.response.tokens] == expected
    assert record.response.full_tokens == record.response.tokens


def test_draws_are_among_the_likeliest_tokens():
    """top_k and top_p cut what is drawn from, by the option or else by the model's settings."""
    model = copy.deepcopy(small(300))
    greedy = capture(model, None, IDS, max_new_tokens=8).tokens.tolist()
    model.generation_config = GenerationConfig(top_k=1, do_sample=True)

    def drawn(**options):
        return capture(model, None, IDS, max_new_tokens=8, temperature=5.0, **options)

    assert drawn().tokens.tolist() == drawn(top_p=1e-9, top_k=50).tokens.tolist() == greedy
    assert drawn(top_k=50).tokens.tolist() != greedy
    assert drawn(top_k=50).meta["generation"]["top_k"] == 50
    with pytest.raises(CaptureError, match=r"^top_p cannot be applied, .* temperature above 0"):
        capture(model, None, IDS, top_p=0.5)
    model.generation_config.repetition_penalty = -1.0
    with pytest.raises(CaptureError, match=r"^a setting of generation_config.json \(.*penalty"):
        capture(model, None, IDS)
