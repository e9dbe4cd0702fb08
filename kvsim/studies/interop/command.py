"""`kvsim study masks`: the records of a run as attention masks, for training under eviction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvsim.cli import shared, show
from kvsim.cli.shared import OptionError
from kvsim.errors import suggest
from kvsim.files import check_output


def masks(
    run: Annotated[
        Path, shared.path_argument("RUN", "Folder that `kvsim replay` or `live` wrote to --out.")
    ],
    out: Annotated[Path, shared.path_option("FILE", "A new .safetensors file.")],
    policy: Annotated[
        list[str] | None,
        shared.several(
            "NAME[,NAME...]", "The policies whose masks are written; default: all of the run."
        ),
    ] = None,
    overwrite: shared.Overwrite = False,
    as_json: shared.Json = False,
) -> None:
    """Write which entries each row sees, as training under eviction needs it.

    One number for each layer, head and position; kvsim.studies.interop.masks makes dense masks of
    it, and block masks for flex_attention.
    """
    check_output(out, overwrite=overwrite)
    from kvsim.analysis.folder import RECORDS, read_run
    from kvsim.store.records import read_records
    from kvsim.studies.interop.masks import Masks, write_masks

    read_run(run)
    records = read_records(run / RECORDS)
    names = list(dict.fromkeys(record.policy for record in records))
    if lacking := next((name for name in policy or () if name not in names), None):
        known = f"{', '.join(names)}{suggest(lacking, names)}"
        raise OptionError(f"--policy {lacking!r} is not in {run}, expected some of {known}")
    every = [Masks.of(record) for record in records if record.policy in (policy or names)]
    write_masks(out, every, overwrite=overwrite)
    if as_json:
        show.echo_json({"file": str(out), "masks": [each.labels for each in every]})
        return
    columns = ("trace", "policy", "budget")
    show.echo_rows([{name: str(each.labels[name]) for name in columns} for each in every])
    show.echo_error(f"Written to {out}.")
