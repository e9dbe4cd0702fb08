"""`python tests/same_demo.py DEMO OTHER`: whether two environments gave the same demo, rounded."""

import sys

import numpy as np
import polars as pl

from kvsim.store.records import read_records

RUNS = ("run", "smollm2-run")
KEYS = ("policy", "budget", "metric")


def means(folder: str) -> pl.DataFrame:
    """Return the mean of each metric of a run, by policy and budget."""
    table = pl.read_parquet(f"{folder}/results.parquet")
    return table.group_by(KEYS).agg(pl.col("value").mean()).sort(KEYS)


def main(demo: str, other: str) -> None:
    """Compare two folders of `kvsim demo`."""
    for run in RUNS:
        ours, theirs = (read_records(f"{folder}/{run}/records.zarr") for folder in (demo, other))
        for record, twin in zip(ours, theirs, strict=True):
            assert np.array_equal(record.evicted_at, twin.evicted_at), record
        table, twin = (means(f"{folder}/{run}") for folder in (demo, other))
        assert table.select(KEYS).equals(twin.select(KEYS))
        values = [part["value"].to_numpy() for part in (table, twin)]
        ratio = (table["metric"] == "error_distance").to_numpy()  # of small numbers
        for rows, rounding in ((ratio, 5e-3), (~ratio, 1e-3)):
            pair = (of_all[rows] for of_all in values)
            np.testing.assert_allclose(*pair, rtol=rounding, atol=1e-6)
        print(f"{run}: the kept sets of {len(ours)} records and {len(table)} means are the same")


main(*sys.argv[1:])
