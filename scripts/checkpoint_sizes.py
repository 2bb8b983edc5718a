"""How large checkpoints of differences are: ``python scripts/checkpoint_sizes.py MODELS... --iterations 4``.

Takes each model (a folder, or ``embedded``) through some iterations of GRPO with each way to train, and saves every
iteration both as a whole and as what changed since the first. Everything is trained and saved as a run does it, rewards
apart: they are drawn at random, so that every iteration moves the weights whatever the model can. Every difference is
read back and compared bit by bit. Prints the table of docs/checkpoints.md: means over the iterations after the first,
and closes with ``checkpoint MODEL METHOD whole W MiB difference D MiB ratio R save S s``.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
import torch

from rlalign.algorithms.grpo import GRPO
from rlalign.assets import ARITHMETIC
from rlalign.differences import KEY, difference, read_checkpoint
from rlalign.models.policy import PolicyConfig
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora_rank": 16},
    "qlora": {"lora_rank": 64, "lora_dropout": 0.05, "dtype": "bfloat16", "quantization": {"type": "nf4"}},
}
RATES = {"full": 3e-5, "lora": 2e-4, "qlora": 2e-4}


def random_reward(example: dict[str, Any], response: str) -> float:
    """Anything."""
    return float(torch.rand(()))


class Sizes(lightning.Callback):
    """Saves every iteration both ways and notes what that takes."""

    def __init__(self, folder: Path) -> None:
        self.base, self.folder = folder / "base.ckpt", folder
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """The first is the base of all others."""
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.base, weights_only=False)
            return
        whole, part = self.folder / "whole.ckpt", self.folder / "part.ckpt"
        trainer.save_checkpoint(whole, weights_only=False)
        checkpoint = torch.load(whole, weights_only=True)
        started = time.perf_counter()
        torch.save(difference(checkpoint, self.base), part)
        saved = time.perf_counter()
        restored = read_checkpoint(part)
        read = time.perf_counter()
        told = torch.load(part, weights_only=True, mmap=True)[KEY]
        assert told["base"] == self.base.name
        assert torch.equal(flat(restored), flat(checkpoint)), "not the same bits"
        sizes = {name: path.stat().st_size / 2**20 for name, path in (("whole", whole), ("part", part))}
        self.rows.append(sizes | {"save": saved - started, "read": read - saved})


def flat(values: Any) -> torch.Tensor:
    """All bytes of the tensors in a checkpoint."""
    if isinstance(values, torch.Tensor):
        return values.contiguous().reshape(-1).view(torch.uint8)
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return torch.cat([torch.zeros(0, dtype=torch.uint8), *map(flat, parts)])


def measure(model: str, method: str, iterations: int) -> dict[str, float]:
    """Means over the iterations after the first."""
    lightning.seed_everything(0)
    policy = PolicyConfig(model, **METHODS[method])
    module = GRPO(
        policy=policy,
        kl_coef=0.0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATES[method], weight_decay=0.0),
    )
    data = RolloutDataModule(
        str(ARITHMETIC / "train.jsonl"),
        rewards={"random": random_reward},
        sampling=SamplingParams(max_new_tokens=8),
        prompts_per_iteration=4,
        group_size=4,
    )
    with tempfile.TemporaryDirectory() as folder:
        sizes = Sizes(Path(folder))
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            accelerator="cpu",
            precision="bf16-mixed",
            max_epochs=iterations + 1,
            enable_checkpointing=False,
            callbacks=[sizes],
            num_sanity_val_steps=0,
            **quiet,
        )
        trainer.fit(module, data)
    return {name: sum(row[name] for row in sizes.rows) / len(sizes.rows) for name in sizes.rows[0]}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODELS")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--iterations", type=int, default=3)
    given = parser.parse_args()
    lines = []
    for model in given.models:
        for method in given.methods:
            found = measure(model, method, given.iterations)
            name = Path(model).name
            ratio = found["part"] / found["whole"]
            cells = (name, method, *(f"{found[key]:.1f}" for key in ("whole", "part")), f"{ratio:.2f}")
            print("| " + " | ".join((*cells, f"{found['save']:.1f}", f"{found['read']:.1f}")) + " |", flush=True)
            lines.append(
                f"checkpoint {name} {method} whole {found['whole']:.1f} MiB difference {found['part']:.1f} MiB ratio "
                f"{ratio:.3f} save {found['save']:.2f} s"
            )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
