"""The shipped models: ``tiny``, which reasons over a ledger, and its deeper relative ``tiny-deep``.

``MODELS`` has the folder of weights and tokenizer of each, for
``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained``; ``PATH`` is that of
``tiny``. `kvsim.tiny.tasks` writes prompts, `kvsim.tiny.ledger` solves them and judges responses;
`docs/tiny-model-card.md` and `docs/tiny-deep-model-card.md` say how the models were made and how
well they answer.
Importing this package loads neither torch nor transformers.
"""

from pathlib import Path

__all__ = ["MODELS", "PATH"]

MODELS: dict[str, Path] = {
    name: Path(__file__).parent / "weights" / name for name in ("tiny", "tiny-deep")
}
PATH: Path = MODELS["tiny"]
