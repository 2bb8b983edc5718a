"""The Ray cluster that a run's workers live in."""

import importlib.util
import logging
import math
import os
from typing import Any

import torch.distributed as dist

from rlalign.rollouts.ranks import broadcast_object

NAMESPACE = "rlalign"
_QUIET: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
_AUTHENTICATION = "RAY_AUTH_MODE"
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
        ConnectionError: If there is no such cluster.
        RuntimeError: If the cluster is too small for the workers, which would wait for ever.
    """
    rank, world = rank_and_size()
    cpus, gpus = cpus * world, gpus * world
    wanted = address or os.environ.get("RAY_ADDRESS")
    told: Any = _join(wanted, cpus, object_store_mb) if rank == 0 else None
    address, mode, started = broadcast_object(told)
    if rank != 0:
        _join_started(address, mode)
    import ray

    there = ray.cluster_resources()
    for kind, needed in (("CPU", cpus), ("GPU", gpus)):
        if there.get(kind, 0.0) < needed:
            raise RuntimeError(
                f"The workers of RaySampler need {needed:g} {kind}s of the Ray cluster, which has "
                f"{there.get(kind, 0.0):g}: add machines, or lower num_workers or {kind.lower()}s_per_worker."
            )
    return started and rank == 0


def _join_started(address: str, mode: str | None) -> None:
    """Be part of the cluster that rank 0 is part of."""
    if mode is not None:
        os.environ.setdefault(_AUTHENTICATION, mode)
    import ray

    if ray.is_initialized():
        return
    if mode is not None:
        from ray import _raylet

        reread: Any = _raylet
        reread.Config.initialize("")  # Ray has read the variable when it was imported, which may be a while ago
    ray.init(address=address, **_QUIET)


def _join(wanted: str | None, cpus: float, object_store_mb: int | None) -> tuple[str, str | None, bool]:
    """Address of the cluster that rank 0 is part of, how it knows its own, and whether it was started here."""
    import ray

    started = wanted is None and not ray.is_initialized()
    if started:
        memory: dict[str, Any] = {} if object_store_mb is None else {"object_store_memory": object_store_mb << 20}
        num_cpus = max(math.ceil(cpus), os.cpu_count() or 1)
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **memory, **_QUIET)
    elif not ray.is_initialized():
        try:
            ray.init(address=wanted, **_QUIET)
        except ConnectionError as error:
            raise ConnectionError(
                f"RaySampler: no Ray cluster at address={wanted} lets this process in. One with tokens wants "
                f"{_AUTHENTICATION}=token in the environment (docs/ray.md)."
            ) from error
    return ray.get_runtime_context().gcs_address, os.environ.get(_AUTHENTICATION), started
