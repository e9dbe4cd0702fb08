"""kvpress and kvsim on the running SmolLM2: the same tokens where both define the same policy."""

import numpy as np
import pytest
import torch
from transformers import pipeline
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvsim
from kvsim.runner.decoding import Decoding, RunningModel

pytestmark = [pytest.mark.real, pytest.mark.peers]

NEW, BUDGET = 8, 40
CONTEXT = (
    "Three friends meet in Lisbon on a Sunday. Anna brings bread and olives, Ben brings cheese and "
    "a bottle of water, and Clara brings a map of the old town. They walk from the river to the "
    "castle, eat in the shade of a fig tree, and take the last tram home at nine."
)
QUESTION = " Who brings the map?"
PAIRS = {
    "SnapKVPress": ("snapkv@kvpress", {"window_size": 8}, {"window": 8}),
    "KeyDiffPress": ("keydiff", {}, {}),
    "ExpectedAttentionPress": ("expected_attention@kvpress", {}, {}),
}


@pytest.fixture(scope="module")
def kvpress():
    """The package, and the kernels as they were before its import wrapped them."""
    import kvpress as package

    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    return package


@pytest.fixture(scope="module")
def running(smollm2):
    """The model as it runs, which is probed once."""
    return RunningModel(smollm2[0])


def live(running, policy, pieces, **schedule):
    """The Decoding of a greedy run of the pieces of the prompt, and the tokens that it writes."""
    sizes = {"prompt_len": len(pieces[0]), "n_pos": sum(map(len, pieces)) + NEW}
    decoding, out = Decoding(running, policy, BUDGET, **sizes, **schedule), []
    with decoding:
        logits = [decoding.feed(piece)[-1] for piece in pieces][-1]
        while len(out) < NEW:
            out.append(int(logits.argmax()))
            if len(out) < NEW:
                logits = decoding.feed(out[-1:])[-1]
    return decoding, out


@pytest.mark.parametrize("name", PAIRS)
def test_tokens_after_a_compressed_prompt_are_those_of_kvpress(smollm2, running, kvpress, name):
    """A prompt compressed at its end to 40 entries per head is continued alike, greedily."""
    model, tokenizer = smollm2
    preset, arguments, params = PAIRS[name]
    tokens = tokenizer.encode(CONTEXT + QUESTION)
    press = getattr(kvpress, name)(**arguments)
    press.compression_ratio = 1 - (BUDGET + 0.5) / len(tokens)
    ids = torch.tensor([tokens])
    greedy = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}

    with press(model):
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0].tolist()

    policy = kvsim.policy(preset, **params)
    decoding, ours = live(running, policy, [tokens], prefill=True)
    assert decoding.record().events == [len(tokens) - 1]
    assert (decoding.record().retained(len(tokens) - 1).sum(-1) == BUDGET).all()
    assert ours == theirs[len(tokens) :]


@pytest.mark.parametrize("name", ["ams+tova", "adakv+snapkv"])
def test_the_pipeline_of_kvpress_runs_a_policy(smollm2, running, kvpress, name):
    """The answer and the kept sets are those of the live run of context, question and answer."""
    from kvsim.studies.interop.kvpress import PolicyPress

    model, tokenizer = smollm2
    policy, schedule = kvsim.policy(name), {"interval": 16, "prefill": True}
    one = PolicyPress(policy, BUDGET, **schedule)
    run = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer, device="cpu")

    answer = run(CONTEXT, question=QUESTION, press=one, max_new_tokens=NEW)["answer"]

    pieces = run.preprocess(CONTEXT, [QUESTION], "", 8192)
    context, question = pieces["context_ids"][0].tolist(), pieces["questions_ids"][0][0].tolist()
    assert len(question) < 16
    decoding, ours = live(running, policy, [context, question], **schedule)
    stop = model.generation_config.eos_token_id
    ours = ours[: ours.index(stop) + 1] if stop in ours else ours
    assert answer == tokenizer.decode(ours, skip_special_tokens=True)
    mine, expected = one.record().evicted_at, decoding.record().evicted_at
    assert np.array_equal(mine, expected[..., : mine.shape[-1]])
