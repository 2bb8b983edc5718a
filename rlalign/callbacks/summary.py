"""The table before training: what an iteration will be, and about how much memory it takes."""

from dataclasses import asdict
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table

from rlalign.rollouts.ranks import data_module, data_parallel


class RunSummary(Callback):
    """Prints sizes, parameters, sampling parameters and an estimate of memory before the first iteration.

    It only tells: no setting is changed.
    """

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table."""
        table = Table("run", "", show_header=False, title_justify="left")
        for name, value in summarize(trainer, pl_module).items():
            table.add_row(name, value)
        Console(soft_wrap=False).print(table)


def summarize(trainer: Trainer, module: Any) -> dict[str, str]:
    """What the table says, a line each."""
    data = data_module(trainer)
    minibatches = int(trainer.num_training_batches)
    steps = minibatches // trainer.accumulate_grad_batches
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total = sum(p.numel() for p in module.parameters())
    lines: dict[str, str] = {"algorithm": type(module).__name__}
    rolls_out = hasattr(data, "prompts_per_iteration")
    if rolls_out:
        prompts, completions = data.prompts_per_iteration, data.prompts_per_iteration * data.group_size
        longest = completions * data.sampling.max_new_tokens
        lines["prompts an iteration"] = f"{prompts:,}"
        lines["completions an iteration"] = f"{completions:,} ({data.group_size} a prompt)"
        lines["response tokens an iteration"] = f"at most {longest:,}"
        rounds = getattr(module, "max_rounds", 1)
        if rounds > 1:
            lines["rounds of sampling"] = f"at most {rounds}, so up to {longest * rounds:,} tokens are sampled"
        lines["prompts"] = data.train_prompts.description
        lines["sampler"] = type(data.sampler).__name__
        lines["sampling"] = ", ".join(f"{k}={v}" for k, v in asdict(data.sampling).items())
    lines["minibatches an iteration"] = f"{minibatches} a rank, on {data_parallel(trainer)[1]} rank(s)"
    lines["optimizer steps an iteration"] = f"{steps}"
    if trainer.max_epochs and trainer.max_epochs > 0:
        lines["iterations"] = f"{trainer.max_epochs} ({steps * trainer.max_epochs:,} optimizer steps)"
    reference = ", the reference included" if getattr(module, "needs_reference", False) else ""
    lines["parameters"] = f"{trained:,} trained of {total:,}{reference}"
    estimate = estimate_memory(module, data if rolls_out else None)
    parts = ", ".join(f"{name} {_size(value)}" for name, value in estimate.items())
    lines["memory, about"] = f"{_size(sum(estimate.values()))}: {parts}; activations come on top"
    return lines


def estimate_memory(module: Any, data: Any = None) -> dict[str, int]:
    """Bytes of what is sure to exist on one device: weights, gradients, optimizer (two moments), logits, cache.

    Args:
        module: What is trained; of one without a ``policy`` no logits exist.
        data: Where responses are sampled, the data module; its widest prompt and longest response bound the cache.
    """
    parameters = list(module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    reference = [p for n, p in module.named_parameters() if ".reference." in n]
    used = {
        "weights": _bytes(parameters) - _bytes(reference),
        "reference": _bytes(reference),
        "gradients": _bytes(trained),
        "optimizer": 2 * _bytes(trained),
    }
    if not hasattr(module, "policy"):
        return {name: value for name, value in used.items() if value}
    config = module.policy.model.config.get_text_config()
    # Two copies in float32: the logits of a chunk and their softmax.
    used["logits"] = 2 * 4 * module.policy_config.chunk_tokens * config.vocab_size
    if data is not None:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rows = min(getattr(data.sampler, "max_rows", 1), data.prompts_per_iteration * data.group_size)
        longest = max(len(data.train_prompts[i].ids) for i in range(min(len(data.train_prompts), 256)))
        tokens = rows * (longest + data.sampling.max_new_tokens)
        size = torch.finfo(module.policy.model.dtype).bits // 8
        used["cache"] = 2 * config.num_hidden_layers * heads * width * tokens * size
    return {name: value for name, value in used.items() if value}


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
