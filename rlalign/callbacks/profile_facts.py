"""What is known of a run that was profiled."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from lightning import Trainer

import rlalign
from rlalign.callbacks.phases import SAMPLING, UPDATE
from rlalign.callbacks.traced import Operators
from rlalign.rollouts.ranks import data_module


@dataclass
class Facts:
    """Figures of one rank, an iteration each where nothing else is said."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of each phase."""
    calls: dict[str, float] = field(default_factory=dict)
    """Times that it began."""
    operators: dict[str, Operators] = field(default_factory=dict)
    """Of each phase of the traced iteration; none if it was not traced."""
    figures: dict[str, float] = field(default_factory=dict)
    """What was logged, and what ``Performance`` measures, by name."""
    iterations: list[int] = field(default_factory=list)
    """Those that were timed."""
    peak: float = 0.0
    """FLOPs a second of a product of two matrices."""
    about: dict[str, str] = field(default_factory=dict)
    """Machine, versions, model, work: lines for the reader."""
    device: str = "cpu"
    """Its kind."""
    precision: str = "32-true"
    tf32: bool = False
    responses: int = 0
    """Drawn on this rank; 0 where nothing is."""
    mean_tokens: float = 0.0
    longest: int = 0
    """Tokens of a response."""
    max_rows: int | None = None
    """Responses that the sampler has in flight at once, if it has such a bound."""
    steps: int = 1
    """Optimizer steps."""
    minibatches: int = 1
    """Of this rank."""
    needs_reference: bool = False
    fused: bool = True
    """Whether the optimizer is fused, or has no such form."""
    can_pack: bool = False
    """Whether the data module could pack rows, and does not."""
    leaves_out_padding: bool = False
    """Whether the policy computes minibatches without their padding."""
    validates_every: int | None = None
    """Iterations from one validation to the next."""

    @property
    def whole(self) -> float:
        """Seconds of an iteration, everything included."""
        return sum(self.seconds.values())

    def share(self, *phases: str) -> float:
        """Of phases together."""
        return sum(self.seconds.get(phase, 0.0) for phase in phases) / self.whole if self.whole else 0.0

    @property
    def sampling(self) -> float:
        """Share of what draws responses."""
        return self.share(*SAMPLING)

    @property
    def update(self) -> float:
        """Share of forward, backward and optimizer."""
        return self.share(*UPDATE)


def facts_of(
    trainer: Trainer,
    module: Any,
    iterations: list[int],
    seconds: dict[str, float],
    calls: dict[str, float],
    lengths: Sequence[int],
    figures: dict[str, float],
    operators: dict[str, Operators],
    peak: float,
) -> Facts:
    """What trainer, module and data module say of themselves, and what was recorded.

    Args:
        trainer: Whose run it is.
        module: What is trained.
        iterations: Those that were timed.
        seconds: Of each phase, an iteration.
        calls: Of each phase, an iteration.
        lengths: Tokens of the responses of all timed iterations, on all ranks.
        figures: By their logged names.
        operators: Of each phase of the traced iteration.
        peak: FLOPs a second that the device can do.
    """
    data: Any = data_module(trainer)
    minibatches = int(trainer.num_training_batches)
    optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
    drawn = round(len(lengths) / len(iterations) / max(trainer.world_size, 1))
    return Facts(
        seconds=seconds,
        calls=calls,
        operators=operators,
        figures=figures,
        iterations=iterations,
        peak=peak,
        about=_about(trainer, module, drawn),
        device=module.device.type,
        precision=str(trainer.precision),
        tf32=torch.get_float32_matmul_precision() != "highest",
        responses=drawn,
        mean_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
        longest=max(lengths, default=0),
        max_rows=getattr(getattr(data, "sampler", None), "max_rows", None),
        steps=minibatches // trainer.accumulate_grad_batches,
        minibatches=minibatches,
        needs_reference=bool(getattr(module, "needs_reference", False)),
        fused=not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or bool(optimizer.defaults.get("fused")),
        can_pack=getattr(data, "packing", True) is False,
        leaves_out_padding=bool(getattr(module, "shares_prompts", False)) and not hasattr(data, "packing"),
        validates_every=(trainer.check_val_every_n_epoch or 1) if trainer.enable_validation else None,
    )


def _about(trainer: Trainer, module: Any, drawn: int) -> dict[str, str]:
    parameters = list(module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    minibatches, ranks = int(trainer.num_training_batches), trainer.world_size
    work = f"optimizer steps: {minibatches // trainer.accumulate_grad_batches}, minibatches: {minibatches}"
    versions = {"rlalign": rlalign, "torch": torch, "lightning": lightning, "transformers": transformers}
    return {
        "machine": machine(module.device),
        "versions": ", ".join(
            [f"{name} {m.__version__}" for name, m in versions.items()] + [f"Python {platform.python_version()}"]
        ),
        "model": f"{module.model_name}: {sum(p.numel() for p in parameters):,} parameters, {trained:,} trained",
        "run": f"{type(module).__name__}, {trainer.precision}, {ranks} rank{'s' * (ranks > 1)}",
        "an iteration, on this rank": (f"responses: {drawn}, " if drawn else "") + work,
    }


def machine(device: torch.device) -> str:
    """What computes, in words."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
