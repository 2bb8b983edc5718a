"""Strategies for tests: what runs on CPU ranks of what is meant for GPUs."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy

from rlalign.strategies.zero import ZeROStrategy

CONFIGS = Path(__file__).parents[1] / "configs" / "strategies"


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
    """The strategy of a file in configs/strategies, as it runs here on two ranks."""
    chosen = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["trainer"]["strategy"]
    options = {**chosen["init_args"], **options, "process_group_backend": "gloo"}
    if name.startswith("deepspeed"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        return CPUZeROStrategy(**options)
    if name.endswith("_tp"):
        options["tensor_parallel_size"] = 2
    module, _, cls = chosen["class_path"].rpartition(".")
    strategy: Strategy = getattr(import_module(module), cls)(**options)
    return strategy
