"""GPUs, and the strategies that spread a run over them."""

import re
from dataclasses import dataclass

from rlalign.planning.memory import Sharding

GIB = 2.0**30
CONTEXT = 0.8 * GIB
"""What a process takes on a GPU before any tensor: context, kernels, communication buffers."""
GPU_WASTE = 0.1
"""Holes of PyTorch's allocator, over what comes and goes in it: an assumption, not measured."""
KNOWN_GPUS = {
    "A100": 40,
    "A10": 24,
    "L4": 24,
    "L40S": 48,
    "H100": 80,
    "H200": 141,
    "B200": 180,
    "V100": 32,
    "T4": 16,
    "RTX4090": 24,
}
"""GiB of a GPU whose memory is not told."""


@dataclass(frozen=True)
class Gpus:
    """How many there are, of which kind."""

    count: int
    name: str
    gib: float

    def __str__(self) -> str:
        return f"{self.count}x{self.name}-{self.gib:g}GB"


def parse_gpus(text: str) -> Gpus:
    """``8xA100-40GB``, ``A100-80GB``, ``4x24GB``, ``2xH100``.

    Raises:
        ValueError: If it is something else.
    """
    found = re.fullmatch(r"(?:(\d+)x)?([A-Za-z]+\w*)?-?(?:(\d+(?:\.\d+)?)\s*Gi?B?)?", text.strip(), re.IGNORECASE)
    count, name, gib = found.groups() if found else (None, None, None)
    size = float(gib) if gib else float(KNOWN_GPUS.get((name or "").upper(), 0))
    if not found or not size or int(count or 1) < 1:
        raise ValueError(
            f"--gpus {text}: expected COUNTxNAME-MEMORY, as in 8xA100-40GB or 1x24GB; the memory may be left out of "
            f"{', '.join(KNOWN_GPUS)}."
        )
    return Gpus(int(count or 1), name or "GPU", size)


@dataclass(frozen=True)
class StrategyKind:
    """A file of ``configs/strategies``."""

    name: str
    text: str
    config: str | None
    """Its file; none for a single GPU."""

    def sharding(self, ranks: int) -> Sharding | None:
        """What it spreads over so many ranks; ``None`` where it needs more of them."""
        if self.name == "single":
            return Sharding() if ranks == 1 else None
        if ranks == 1 and "offload" not in self.name:
            return None
        spread: dict[str, dict[str, int | bool]] = {
            "ddp": {},
            "zero1": {"optimizer": ranks, "master": True},
            "zero2": {"optimizer": ranks, "gradients": ranks, "master": True},
            "zero2_offload": {"optimizer": ranks, "gradients": ranks, "master": True, "offload_optimizer": True},
            "zero3": {"optimizer": ranks, "gradients": ranks, "weights": ranks, "master": True},
            "zero3_offload": {
                "optimizer": ranks,
                "gradients": ranks,
                "weights": ranks,
                "master": True,
                "offload_optimizer": True,
                "offload_weights": True,
            },
            "fsdp2": {"optimizer": ranks, "gradients": ranks, "weights": ranks},
            "fsdp2_tp": {"optimizer": ranks, "gradients": ranks, "weights": ranks, "tensor": min(ranks, 8)},
        }
        return Sharding(**spread[self.name])  # type: ignore[arg-type]


STRATEGIES = [
    StrategyKind("single", "one GPU", None),
    StrategyKind("ddp", "a whole copy on every GPU", "ddp"),
    StrategyKind("zero1", "DeepSpeed, optimizer spread", "deepspeed_zero1"),
    StrategyKind("zero2", "DeepSpeed, optimizer and gradients spread", "deepspeed_zero2"),
    StrategyKind("fsdp2", "all weights spread, layer by layer", "fsdp2"),
    StrategyKind("zero3", "DeepSpeed, all weights spread", "deepspeed_zero3"),
    StrategyKind("fsdp2_tp", "spread, and each product shared", "fsdp2_tp"),
    StrategyKind("zero2_offload", "DeepSpeed, optimizer in the host's memory", "deepspeed_zero2_offload"),
    StrategyKind("zero3_offload", "DeepSpeed, weights and optimizer in the host's memory", "deepspeed_zero3_offload"),
]
"""From the simplest and fastest on; what fits first is recommended."""
