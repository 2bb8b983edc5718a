"""How fast a run is, and where its time goes."""

import resource
import sys
import time
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from rlalign.callbacks.coefficients import fresh_metrics
from rlalign.models.quantized import is_quantized

_SIZE, _SIZE_ON_GPU, _REPEATS = 1024, 4096, 4  # of the matrix product that measures the peak


class Performance(Callback):
    """Logs the speed of every iteration: of its parts, of the arithmetic, and what padding wastes.

    Model FLOPs count the products with weights that the work needs once: ``2 N`` a token forward and as much again for
    each of the gradients of states and weights, ``N`` being the weights that are multiplied by. Attention, padding and
    what is recomputed are left out, and so are prompts that are not computed again for each row. They are those of
    learning alone: sampling is bound by memory, and is told by its tokens a second. Logs, for this rank:

    - ``perf/iteration_seconds``, and the shares of it ``perf/sample_share``, ``perf/score_share`` (old and reference
      log-probabilities, values) and ``perf/update_share``; validation is not part of it;
    - ``perf/trained_tokens_per_second``: tokens of prompts and responses over the seconds of the update;
    - ``perf/padding_share``: positions of the minibatches that are padding, whether they are computed or not;
    - ``perf/tflops``: model FLOPs of the update over its seconds, and ``perf/mfu``, that over what a product of two
      matrices reached on this device when the run began;
    - ``perf/sent_mib`` and ``perf/sent_plain_mib``, with
      :class:`~rlalign.strategies.compressed.CompressedDDPStrategy`: what this rank sent of gradients in the iteration,
      and what it would have sent without compression;
    - ``perf/peak_memory_mib``: most memory of this process (CPU), or of the tensors on this rank's GPU.
    """

    def __init__(self) -> None:
        self.peak: float | None = None
        """FLOPs a second of a product of two large matrices."""
        self._validation = 0.0  # seconds
        self._sent = (0.0, 0.0)  # bytes of gradients until the last iteration

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure what the device can do, in the type that the run computes in."""
        short = {"bf16": torch.bfloat16, "16": torch.float16}
        dtype = short.get(str(trainer.precision).split("-")[0], torch.float32)
        self.peak = measured_peak(pl_module.device, dtype)
        self._weights = multiplied_weights(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        wait_for(pl_module.device)
        self._began = self._ready = time.perf_counter()
        self._tokens = self._positions = self._needed = 0
        self._validation = 0.0
        self._waits = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """With the first minibatch, everything has been sampled and scored."""
        if self._waits:
            wait_for(pl_module.device)
            self._ready, self._waits = time.perf_counter(), False
        mask = real_tokens(batch)
        if mask is not None:
            self._tokens += int(mask.sum())
            self._positions += mask.numel()
            self._needed += needed_tokens(batch, mask, getattr(pl_module, "shares_prompts", False))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The trainer validates within an iteration, before it ends it."""
        wait_for(pl_module.device)
        self._validation -= time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on counting."""
        wait_for(pl_module.device)
        self._validation += time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log it."""
        how: Any = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": 1}
        values = self.measured(trainer, pl_module)
        pl_module.log_dict({f"perf/{name}": float(value) for name, value in values.items()}, **how)

    def measured(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """What the iteration that ends now was like, by the names under ``perf/``."""
        wait_for(pl_module.device)
        whole = max(time.perf_counter() - self._began - self._validation, 1e-9)
        before = self._ready - self._began
        sampling = fresh_metrics(trainer).get("perf/sample_seconds", 0.0)
        update = max(whole - before, 1e-9)
        values = {
            "iteration_seconds": whole,
            "sample_share": sampling / whole,
            "score_share": max(before - sampling, 0.0) / whole,
            "update_share": update / whole,
            "peak_memory_mib": peak_memory(pl_module.device),
        }
        if (hook := getattr(trainer.strategy, "hook", None)) is not None:
            sent, self._sent = (hook.sent - self._sent[0], hook.plain - self._sent[1]), (hook.sent, hook.plain)
            values |= {"sent_mib": sent[0] / 2**20, "sent_plain_mib": sent[1] / 2**20}
        if self._positions:
            forward, backward = self._weights
            achieved = 2 * (forward + backward) * self._needed / update
            values |= {
                "trained_tokens_per_second": self._tokens / update,
                "padding_share": 1 - self._tokens / self._positions,
                "tflops": achieved / 1e12,
                "mfu": achieved / self.peak if self.peak else 0.0,
            }
        return values


def real_tokens(batch: Any) -> Tensor | None:
    """True where a minibatch is no padding, ``[B, L]``; ``None`` where that cannot be told."""
    mask, counted = getattr(batch, "attention_mask", None), getattr(batch, "loss_mask", None)
    if isinstance(mask, Tensor):
        return mask
    if isinstance(counted, Tensor) and hasattr(batch, "positions"):  # rows of demonstrations: each ends with a response
        return counted.flip(1).cummax(1).values.flip(1)
    return None


def needed_tokens(batch: Any, mask: Tensor, shares_prompts: bool) -> int:
    """Real tokens of a minibatch, those of a prompt that rows share once if it is so computed."""
    if not shares_prompts or not hasattr(batch, "prompt_index"):
        return int(mask.sum())
    once = dict(zip(batch.prompt_index.tolist(), batch.prompt_lengths.tolist(), strict=True))
    return int(batch.response_lengths.sum()) + sum(once.values())


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of a product of two square matrices, the best of a few; small ones would not fill a GPU."""
    size = _SIZE if device.type == "cpu" else _SIZE_ON_GPU
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(_REPEATS):
        wait_for(device)
        began = time.perf_counter()
        left @ right
        wait_for(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def multiplied_weights(module: nn.Module) -> tuple[int, int]:
    """Weights that a token is multiplied by forward, and as many products again backward.

    Backward, states get a gradient through every weight, and those that are trained one of their own.
    """
    forward = backward = 0
    seen: set[int] = set()
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        if "reference" in name or not isinstance(weight, Tensor) or weight.ndim < 2 or isinstance(part, nn.Embedding):
            continue
        if id(weight) not in seen:
            seen.add(id(weight))
            packed: Any = weight  # two numbers a byte where they are of four bits
            numel = packed.quant_state.shape.numel() if is_quantized(part) else weight.numel()
            forward += numel
            backward += numel * (2 if weight.requires_grad else 1)
    return forward, backward


def peak_memory(device: torch.device) -> float:
    """Most memory so far, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    units = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units


def wait_for(device: torch.device) -> None:
    """Have a GPU finish what it was told to do; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
