"""Strategies for tests: what runs on CPU ranks of what is meant for GPUs."""

import os
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy

from rlalign.strategies.fsdp2 import FSDP2Strategy
from rlalign.strategies.zero import ZeROStrategy


class CPUZeROStrategy(ZeROStrategy):
    """DeepSpeed on CPU ranks, which Lightning's own refuses."""

    def setup_environment(self) -> None:
        """Without the check for GPUs."""
        self.parallel_devices = [torch.device("cpu", i) for i in range(self.num_processes)]
        super(DeepSpeedStrategy, self).setup_environment()

    @property
    def num_processes(self) -> int:
        """Ranks of this node."""
        return int(os.environ["LOCAL_WORLD_SIZE"])


def make_strategy(name: str, **options: Any) -> Strategy:
    """The strategy of a file in configs/strategies, as it runs here."""
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo", **options)
    if name == "fsdp2_tp":
        return FSDP2Strategy(tensor_parallel_size=2, process_group_backend="gloo", **options)
    if name == "fsdp2":
        return FSDP2Strategy(process_group_backend="gloo", **options)
    os.environ["DS_ACCELERATOR"] = "cpu"
    return CPUZeROStrategy(stage=int(name[-1]), process_group_backend="gloo", **options)
