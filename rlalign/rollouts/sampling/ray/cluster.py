"""The Ray cluster that a run's workers live in."""

import importlib.util
import logging
import math
import os
from typing import Any

import torch.distributed as dist

from rlalign.rollouts.ranks import broadcast_object

NAMESPACE = "rlalign"
NEEDS_EXTRA = "RaySampler needs Ray: pip install 'rlalign[ray]' (docs/ray.md)."


def check_installed() -> None:
    """See that Ray is there.

    Raises:
        ImportError: If it is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise ImportError(NEEDS_EXTRA)


def rank_and_size() -> tuple[int, int]:
    """Of this process among those of the run."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def connect(address: str | None, cpus: float, gpus: float, object_store_mb: int | None) -> bool:
    """Have all ranks be part of one cluster: a running one, or one that rank 0 starts on its machine.

    Args:
        address: Of a running cluster, ``auto`` for the one on this machine; by default that of the environment variable
            RAY_ADDRESS, and without it a cluster is started.
        cpus: What the workers of one rank take.
        gpus: The same.
        object_store_mb: Memory for weights and responses, where a cluster is started.

    Returns:
        Whether this process has started one.

    Raises:
        RuntimeError: If the cluster is too small for the workers, which would wait for ever.
    """
    import ray

    rank, world = rank_and_size()
    cpus, gpus = cpus * world, gpus * world
    wanted = address or os.environ.get("RAY_ADDRESS")
    starts = rank == 0 and not ray.is_initialized()
    quiet: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if starts:
        own: dict[str, Any] = {}
        if wanted is None:
            own = {"num_cpus": max(math.ceil(cpus), os.cpu_count() or 1), "include_dashboard": False}
            if object_store_mb is not None:
                own["object_store_memory"] = object_store_mb << 20
        ray.init(address=wanted or "local", **quiet, **own)
    address = broadcast_object(ray.get_runtime_context().gcs_address if rank == 0 else None)
    if not ray.is_initialized():
        ray.init(address=address, **quiet)
    there = ray.cluster_resources()
    for kind, needed in (("CPU", cpus), ("GPU", gpus)):
        if there.get(kind, 0.0) < needed:
            raise RuntimeError(
                f"The workers of RaySampler need {needed:g} {kind}s of the Ray cluster, which has "
                f"{there.get(kind, 0.0):g}: add machines, or lower num_workers or {kind.lower()}s_per_worker."
            )
    return starts and wanted is None
