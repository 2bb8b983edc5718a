"""Which strategies fit, how large a minibatch may be, and what to run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlalign.planning.hardware import CONTEXT, GIB, GPU_WASTE, STRATEGIES, Gpus, StrategyKind
from rlalign.planning.memory import Estimate, Peft, Setting, Workload, estimate
from rlalign.planning.methods import METHODS, MethodParts
from rlalign.planning.shapes import ModelShape

_MOST_ROWS = 1024


@dataclass(frozen=True)
class Request:
    """What is to be trained on what."""

    shape: ModelShape
    method: str
    gpus: Gpus
    prompt: int = 512
    response: int = 1024
    group: int = 8
    step_size: int = 512
    """Items of an optimizer step over all ranks."""
    sampled: int = 256
    """Responses in flight on a rank."""
    precision: str = "bf16-mixed"
    rank: int = 16
    pefts: Sequence[Peft] = ("full", "lora", "qlora")

    @property
    def parts(self) -> MethodParts:
        """Of the method."""
        return METHODS[self.method]


@dataclass(frozen=True)
class Option:
    """One way to train it."""

    strategy: StrategyKind
    peft: Peft
    checkpointing: bool
    rows: int
    """The largest minibatch of a rank that fits, 0 if none does."""
    sampled: int
    """Responses in flight that fit."""
    found: Estimate
    """With that minibatch, or with one row."""
    ranks: int
    """Data-parallel ranks."""

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return self.rows > 0


def options_of(request: Request) -> list[Option]:
    """Every way to train it, the best first: all weights before adapters, simple strategies before others."""
    ways = []
    for peft in request.pefts:
        if peft == "qlora" and request.parts.scalar:
            continue  # a reward model has none
        for strategy in STRATEGIES:
            if peft == "qlora" and strategy.name not in ("single", "ddp"):
                continue  # four-bit weights are not spread
            for checkpointing in (False, True):
                option = _option(request, strategy, peft, checkpointing)
                if option is not None:
                    ways.append(option)
    return ways


def best(ways: Sequence[Option]) -> Option | None:
    """The first that fits, and one that computes in the host's memory only where no other does."""
    fitting = sorted((way for way in ways if way.fits), key=lambda way: "offload" in way.strategy.name)
    return fitting[0] if fitting else None


def _option(request: Request, strategy: StrategyKind, peft: Peft, checkpointing: bool) -> Option | None:
    sharding = strategy.sharding(request.gpus.count)
    if sharding is None:
        return None
    ranks = request.gpus.count // sharding.tensor
    is_wide = peft == "full" or request.precision == "32-true" or request.parts.scalar
    base = "float32" if is_wide else "bfloat16"
    rank = 64 if peft == "qlora" else request.rank
    setting = Setting(peft, rank, request.precision, base)  # type: ignore[arg-type]

    def memory(rows: int, sampled: int) -> Estimate:
        work = Workload(
            rows,
            request.prompt,
            request.response,
            request.group,
            sampled,
            rows * ranks < request.step_size,
            checkpointing,
        )
        found = estimate(request.shape, request.parts, setting, work, sharding)
        return replace(found, overhead=CONTEXT, waste=GPU_WASTE)

    limit = request.gpus.gib * GIB
    sizes = [n for n in range(1, _MOST_ROWS + 1) if request.step_size % (n * ranks) == 0]
    sampled = request.sampled
    while sampled > 1 and _sampling(memory(1, sampled)) > limit:
        sampled //= 2
    fitting = [n for n in sizes if memory(n, sampled).peak <= limit]
    rows = max(fitting, default=0)
    return Option(strategy, peft, checkpointing, rows, sampled, memory(max(rows, 1), sampled), ranks)


def _sampling(found: Estimate) -> float:
    return found.total("sampling") if "sampling" in found.phases else 0.0


def command(request: Request, option: Option) -> str:
    """The command line that runs it."""
    policy = "model.init_args" if request.parts.scalar else "model.init_args.policy"
    words = ["rlalign fit", "--config configs/base.yaml", f"--config configs/{request.method}.yaml"]
    if option.strategy.config:
        words.append(f"--config configs/strategies/{option.strategy.config}.yaml")
    if option.peft != "full" and not request.parts.scalar:
        words.append(f"--config configs/peft/{option.peft}.yaml")
    words += [f"--{policy}.model={request.shape.name}", f"--trainer.precision={request.precision}"]
    if request.gpus.count > 1:
        words.append(f"--trainer.devices={request.gpus.count}")
    if option.peft == "lora":
        words += [f"--{policy}.lora_rank={request.rank}"]
    if option.checkpointing:
        words.append(f"--{policy}.activation_checkpointing=true")
    accumulate = request.step_size // (option.rows * option.ranks)
    words += [f"--data.init_args.step_size={request.step_size}", f"--data.init_args.minibatch_size={option.rows}"]
    words.append(f"--trainer.accumulate_grad_batches={accumulate}")
    if request.parts.samples:
        words += [
            f"--data.init_args.sampling.max_new_tokens={request.response}",
            f"--data.init_args.group_size={request.group}",
        ]
        words.append(f"--data.init_args.sampler.max_rows={option.sampled}")
    return " \\\n    ".join(words)
