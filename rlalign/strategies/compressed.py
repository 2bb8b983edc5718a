"""Data-parallel training whose gradients are exchanged in fewer bytes."""

import os
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rlalign.strategies.hooks import MeanHook, OneBitHook, PowerSGDHook

NCCL = {
    "nvlink": {"NCCL_P2P_LEVEL": "NVL", "NCCL_NVLS_ENABLE": "1"},
    "infiniband": {"NCCL_IB_DISABLE": "0", "NCCL_NET_GDR_LEVEL": "PHB", "NCCL_IB_TIMEOUT": "22"},
    "ethernet": {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
    "no_peers": {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
}
"""Environment variables of NCCL for GPUs of one machine that are connected by NVLink; for machines connected by
InfiniBand, which reads memory of GPUs on the same NUMA node; for machines connected by fast Ethernet, with several
sockets; and for a machine whose GPUs cannot read each other's memory."""

_KEY = "communication"


class CompressedDDPStrategy(DDPStrategy):
    """DDP that sends gradients in fewer bytes, and counts them, on GPUs and on CPUs.

    ``powersgd`` and ``onebit`` add what they lose to the next gradient. That is part of a checkpoint, that of every
    rank, so that a run goes on to the bit; on another number of ranks it cannot.

    Args:
        compression: ``none`` sends gradients as they are; ``fp16`` and ``bf16`` round them; ``powersgd`` sends factors
            of low rank (:class:`~rlalign.strategies.hooks.PowerSGDHook`); ``onebit`` signs and scales
            (:class:`~rlalign.strategies.hooks.OneBitHook`), from when the variance of the optimizer is frozen: it needs
            :class:`~rlalign.algorithms.optimizers.OneBitAdam`.
        rank: Columns of the factors of ``powersgd``.
        warmup_steps: Optimizer steps before ``powersgd`` begins.
        bucket_cap_mb: MiB of gradients that are exchanged at once: large ones have less overhead, small ones begin
            earlier in the backward pass.
        nccl: Settings of NCCL for the machines at hand, by a name of :data:`NCCL`; variables that are set already win.
        kwargs: See :class:`lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        ValueError: If a number is out of bounds, or an option belongs to another compression.
    """

    def __init__(
        self,
        compression: Literal["none", "fp16", "bf16", "powersgd", "onebit"] = "none",
        rank: int | None = None,
        warmup_steps: int | None = None,
        bucket_cap_mb: int = 25,
        nccl: Literal["nvlink", "infiniband", "ethernet", "no_peers"] | None = None,
        **kwargs: Any,
    ) -> None:
        if compression != "powersgd" and (rank is not None or warmup_steps is not None):
            raise ValueError(f"rank and warmup_steps are those of compression=powersgd; this is {compression}.")
        self.rank, self.warmup_steps = 2 if rank is None else rank, 10 if warmup_steps is None else warmup_steps
        if self.rank < 1 or self.warmup_steps < 0 or bucket_cap_mb < 1:
            raise ValueError(
                "Expected a rank and bucket_cap_mb of at least 1 and warmup_steps of at least 0, got "
                f"{self.rank}, {bucket_cap_mb} and {self.warmup_steps}."
            )
        super().__init__(bucket_cap_mb=bucket_cap_mb, **kwargs)
        self.compression, self.nccl = compression, nccl
        self.hook: MeanHook | None = None
        """What averages the gradients, while training; it counts bytes."""
        self._restored: dict[str, Any] | None = None

    def setup_environment(self) -> None:
        """Set variables of NCCL before it begins.

        Raises:
            ValueError: If there are some, and no GPU.
        """
        if self.nccl is not None:
            if self.root_device.type != "cuda":
                raise ValueError(
                    f"strategy.nccl={self.nccl} is for GPUs, and this run is on a {self.root_device.type}."
                )
            for name, value in NCCL[self.nccl].items():
                os.environ.setdefault(name, value)
        super().setup_environment()

    def _register_ddp_hooks(self) -> None:
        """On a CPU, too, where Lightning registers none."""
        assert isinstance(self.model, DistributedDataParallel)
        self.hook = self._make_hook(self.model)
        if self._restored is not None:
            self._restore(self._restored)
        _register_ddp_comm_hook(self.model, None, self.hook.begin)

    def _make_hook(self, model: DistributedDataParallel) -> MeanHook:
        dtypes = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
        if self.compression in dtypes:
            return MeanHook(dtypes[self.compression])
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.module.named_parameters()}
        if self.compression == "powersgd":
            return PowerSGDHook(names, self.warmup_steps, self.rank)
        # Lightning has the optimizers only once this is done.
        return OneBitHook(names, lambda: self._one_bit_adam().is_frozen, lambda p: self._one_bit_adam().size_of(p))

    def _one_bit_adam(self) -> Any:
        found = [getattr(optimizer, "optimizer", optimizer) for optimizer in self.optimizers]
        if len(found) != 1 or not hasattr(found[0], "is_frozen"):
            raise ValueError(
                "strategy.compression=onebit is for one optimizer, whose variance is frozen: set model.optimizer to "
                "class_path: rlalign.algorithms.optimizers.OneBitAdam."
            )
        return found[0]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Add what the hooks of all ranks remember."""
        state = {} if self.hook is None else self.hook.state()
        if state:
            states: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
            dist.gather_object(_on_cpu(state), states)
            checkpoint[_KEY] = {"compression": self.compression, "ranks": states}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Take it out again, for the hook that there is (a rollback) or that is made later."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._restored = checkpoint.get(_KEY)
        if self.hook is not None and self._restored is not None:
            self._restore(self._restored)
        return checkpoint

    def _restore(self, restored: dict[str, Any]) -> None:
        """Go on from what the hooks of a checkpoint remembered.

        Raises:
            ValueError: If it is of another compression or number of ranks.
        """
        assert self.hook is not None
        ranks = restored["ranks"]
        if restored["compression"] != self.compression or len(ranks) != self.world_size:
            raise ValueError(
                f"The checkpoint holds what {restored['compression']} compression lost on {len(ranks)} ranks, and this "
                f"run has {self.compression} on {self.world_size}: resume it as it was, or begin from its export."
            )
        self.hook.restore(ranks[self.global_rank], self.root_device)


def _on_cpu(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _on_cpu(value) for name, value in state.items()}
    return state.detach().cpu() if isinstance(state, Tensor) else state
