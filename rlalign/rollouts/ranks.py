"""What the ranks of a run tell each other, and the data module that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

if TYPE_CHECKING:  # remote workers import this module, and need no Lightning
    from lightning import Trainer

T = TypeVar("T")


def data_module(trainer: Trainer) -> Any:
    """The data module of a trainer, which Lightning sets without declaring it."""
    undeclared: Any = trainer
    return undeclared.datamodule


def data_parallel(trainer: Trainer) -> tuple[int, int]:
    """Rank and size of the group that shares the data; ranks that hold parts of one layer (tensor parallel) are one."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    if not kwargs:
        return trainer.global_rank, trainer.world_size
    return int(kwargs["rank"]), int(kwargs["num_replicas"])


def run_seed(trainer: Trainer | None) -> int:
    """The seed of the run (``seed_everything``); arbitrary if nothing was seeded, but that of rank 0 on all ranks."""
    seed = torch.initial_seed() % 2**63
    return seed if trainer is None else int(trainer.strategy.broadcast(seed))


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather_objects(value: T) -> list[T]:
    """The value of every rank, in the order of ranks."""
    if not _is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum over all ranks."""
    if not _is_distributed():
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value


def broadcast_object(value: T) -> T:
    """The value of rank 0."""
    if not _is_distributed():
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0, device=torch.device("cpu") if dist.get_backend() == "gloo" else None)
    return holder[0]


@rank_zero_only
def say(text: str) -> None:
    """Print a line that the user of a run is to see, once."""
    print(text)
