"""docs/distillation.py: what it counts, and the page that it writes."""

import numpy as np
import pytest

import distillation
import kvsim
from apps.tiny.card import fill
from kvsim.recorder import load_model
from kvsim.schema import NEVER


def test_the_page_is_of_its_results():
    """The tables of the page are those of docs/distillation-results.jsonl, and nothing else."""
    text = distillation.PAGE.read_text("utf-8")
    assert fill(text, distillation.sections(distillation.lines())) == text


def test_needed_words_are_those_that_the_response_takes():
    """The last word of each retrieval is the one that the response writes next."""
    for sample in distillation.samples()[:7]:
        ids, prompt_len = distillation.encode(sample)
        for retrieval in sample.retrievals:
            row, last = 1 + retrieval.at, 1 + retrieval.path[-1]
            assert ids[row + 1] == ids[last]
            assert ((row, last) in distillation.needed(sample)) is (last < prompt_len)


def test_what_rows_see_and_read_is_counted():
    """A full cache sees all, an empty one nothing; heads that read are counted in two layers."""
    model, tokenizer = load_model("tiny")
    sample = distillation.samples()[0]
    trace = distillation.recorded(model, tokenizer, 0, sample)
    record = kvsim.replay(trace, "full", trace.n_pos)
    assert distillation.seen(record, sample) == 1.0
    rows, at = np.array(distillation.needed(sample)).T
    record.evicted_at[1:, :, at[rows == rows[-1]]] = rows[-1] - 1
    gone = np.mean(np.isin(at, at[rows == rows[-1]]) & (rows >= rows[-1]))
    assert distillation.seen(record, sample) == pytest.approx(1 - gone)
    heads = [
        sum(
            bool(trace.attention(layer, [row], [pos])[head, 0, 0] > distillation.READS)
            for layer in (1, 2)
            for head in range(trace.n_qheads)
        )
        for row, pos in distillation.needed(sample)
    ]
    assert distillation.reading_heads(trace, sample) == pytest.approx(np.mean(heads))
    assert NEVER in record.evicted_at
