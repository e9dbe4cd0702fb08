"""The shards of a sweep as jobs of Slurm, through submitit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsim.errors import ClusterError, ConfigError, error_line
from kvsim.sweeps.driver import work
from kvsim.sweeps.planning import Plan
from kvsim.sweeps.shards import Shards

#: Folder of the logs and the states of jobs, in that of the sweep.
_LOGS = "slurm"


def submit(folder: Path, jobs: int, options: Mapping[str, Any]) -> list[str]:
    """Submit the sweep in a folder as an array of `jobs` jobs, and return their numbers.

    options: of submitit's AutoExecutor, such as timeout_min, slurm_partition, mem_gb; `cluster`
    is slurm where it is not among them, and may be local.

    Raises ConfigError without submitit or for an unknown option, ClusterError without Slurm.
    """
    try:
        import submitit  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise ConfigError("--slurm needs submitit; pip install 'kvsim[slurm]'") from error
    given = {"name": "kvsim", "cpus_per_task": 1, **options}
    cluster = given.pop("cluster", "slurm")
    try:
        executor = submitit.AutoExecutor(folder=folder / _LOGS, cluster=cluster)
        executor.update_parameters(**given)
        array = executor.map_array(compute_shard, [folder] * jobs, range(jobs), [jobs] * jobs)
    except (TypeError, NameError, ValueError) as error:
        raise ConfigError(f"submitit refuses the options: {error_line(error)}") from error
    except (OSError, RuntimeError) as error:
        raise ClusterError(
            f"no job can be submitted ({error_line(error)}); run this where sbatch is"
        ) from error
    return [job.job_id for job in array]


def compute_shard(folder: Path, number: int, count: int) -> int:
    """Compute shard `number` of `count` of the sweep in a folder; return how many tasks it has."""
    plan = Plan.of(Shards(folder).grid())
    work(plan, Shards(folder), shard=(number, count))
    return len(plan.share((number, count)))
