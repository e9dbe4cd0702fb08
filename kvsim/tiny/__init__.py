"""The shipped model ``tiny``: three attention layers that reason step by step over a ledger.

``PATH`` is the folder of weights and tokenizer, for ``AutoModelForCausalLM.from_pretrained`` and
``AutoTokenizer.from_pretrained``. `kvsim.tiny.tasks` writes prompts, `kvsim.tiny.ledger`
solves them and judges responses; `docs/tiny-model-card.md` says how the model was made and how well
it answers.
Importing this package loads neither torch nor transformers.
"""

from pathlib import Path

__all__ = ["PATH"]

PATH: Path = Path(__file__).parent / "weights"
