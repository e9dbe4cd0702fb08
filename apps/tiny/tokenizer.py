"""The tokenizer of the ledger language: one word, one token.

``tokenizer(prompt)`` begins with ``<bos>``; encode a response to append with
``add_special_tokens=False``. Decoding with ``skip_special_tokens=True`` returns the text.
A word outside the vocabulary becomes ``<unk>``.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvsim.tiny.vocabulary import BOS, EOS, ID, PAD, UNK


def save_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` to the folder of the weights."""
    words = Tokenizer(models.WordLevel(vocab=dict(ID), unk_token=UNK))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ID[BOS])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
