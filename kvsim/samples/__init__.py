"""The sample traces that ship with kvsim, one of the model `tiny` and one of SmolLM2."""

from __future__ import annotations

from pathlib import Path

from kvsim.errors import TraceNotFoundError, local_path, suggest
from kvsim.schema import is_url

__all__ = ["SAMPLES", "locate", "sample_trace"]

#: The names that commands take, and the model that each was recorded from.
SAMPLES = {"sample": "tiny", "sample-smollm2": "smollm2"}

_PACKAGE = Path(__file__).parents[1]


def sample_trace(model: str = "tiny") -> Path:
    """Return the path of a sample trace, for `kvsim.open_trace`.

    A wheel has it inside the package, a checkout under ``traces/``.

    Args:
        model: ``"tiny"``, all of its layers; or ``"smollm2"``, three of the 30 layers of
            SmolLM2-135M-Instruct, recorded on Python's documentation. No model is needed.

    Raises:
        TraceNotFoundError: there is no sample of this model.

    Example:
        >>> kvsim.sample_trace("smollm2").name
        'sample-smollm2.zarr'
    """
    names = {model: name for name, model in SAMPLES.items()}
    if model not in names:
        raise TraceNotFoundError(
            f"there is no sample trace of {model!r}{suggest(str(model), names)}; "
            f"expected one of {', '.join(names)}"
        )
    installed = _PACKAGE / f"_{names[model]}.zarr"
    checkout = _PACKAGE.parent / "traces" / f"{names[model]}.zarr"
    return installed if installed.is_dir() else checkout


def locate(path: str | Path) -> Path | str:
    """Return the path of a trace, or its URL; of a name in `SAMPLES` the path of what ships."""
    if isinstance(path, str) and is_url(path):
        return path
    path = local_path(path, TraceNotFoundError)
    shipped = str(path) in SAMPLES and not path.exists()
    return sample_trace(SAMPLES[str(path)]) if shipped else path
