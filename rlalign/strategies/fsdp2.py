"""Weights, gradients and moments spread over all ranks (FSDP2), and products shared by some (tensor parallel)."""

from datetime import timedelta

import torch
from lightning import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from rlalign.models.sharding import total_norm


class FSDP2Strategy(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy``, whose data-parallel ranks are all that no product is shared among.

    Lightning's own takes the number of nodes for that, and on a single node spreads nothing.

    Args:
        tensor_parallel_size: Ranks that share the products of every layer, and see the same data; 1 for none. It
            divides the ranks of a node, and the heads of the model.
        save_distributed_checkpoint: Every rank writes its own part of a checkpoint, which is then a folder; else rank 0
            gathers everything into a file.
        process_group_backend: By default NCCL for GPUs, Gloo for CPUs.
        timeout: Of a collective.

    Raises:
        ValueError: If the ranks cannot be divided so.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be at least 1, got {tensor_parallel_size}.")
        super().__init__("auto", tensor_parallel_size, save_distributed_checkpoint, process_group_backend, timeout)
        self.tensor_parallel_size = tensor_parallel_size

    def setup_environment(self) -> None:
        """Divide the ranks, once it is known how many there are."""
        if self.num_processes % self.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} does not divide the {self.num_processes} ranks of a "
                "node: those that share a product should be on one."
            )
        self._data_parallel_size = self.num_nodes * self.num_processes // self.tensor_parallel_size
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Set the model up, and let gradients that are spread over different ranks be clipped together."""
        super().setup(trainer)
        if self.tensor_parallel_size > 1:
            self.precision_plugin.clip_grad_by_norm = _clip  # type: ignore[method-assign]


@torch.no_grad()
def _clip(optimizer: Optimizer, clip_val: float) -> None:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    scale = float(clip_val / (total_norm(gradients) + 1e-6))
    if scale < 1:
        for gradient in gradients:
            gradient.mul_(scale)
