"""Held-out prompts: responses sampled, judged and counted, whoever asks for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from rlalign.metrics.validation import ValidationMetrics, validation_metrics
from rlalign.rollouts.batch import Rollout
from rlalign.rollouts.datamodule import RolloutDataModule

Rank = Callable[[Sequence[Rollout]], Sequence[float | None] | None]


def held_out_metrics(data: RolloutDataModule, device: torch.device, rank: Rank | None = None) -> ValidationMetrics:
    """The metrics that fit what a data module samples and what ranks it, by default ``data.rank``; empty."""
    compared = None if data.verifier is None else data.rewards.correct
    is_ranked = (rank or data.rank)([]) is not None
    return validation_metrics(data.val_samples, data.rewards.answers, compared, is_ranked).to(device)


def sample_ranked(data: RolloutDataModule, indices: Sequence[int], rank: Rank | None = None) -> list[Rollout]:
    """Responses to held-out prompts, ``val_samples`` to each, with their scores where something ranks them."""
    rollouts = data.sample_held_out(list(indices))
    scores = (rank or data.rank)(rollouts)
    if scores is None:
        return rollouts
    return [replace(rollout, score=score) for rollout, score in zip(rollouts, scores, strict=True)]


def sample_and_count(
    metrics: ValidationMetrics, data: RolloutDataModule, indices: Sequence[int], rank: Rank | None = None
) -> None:
    """Sample responses to held-out prompts and count the right ones."""
    rollouts = data.verify(sample_ranked(data, indices, rank))
    for start in range(0, len(rollouts), data.val_samples):
        metrics.update(rollouts[start : start + data.val_samples])


def held_out_figures(metrics: ValidationMetrics, data: RolloutDataModule) -> dict[str, Tensor]:
    """Exact figures over all ranks, by names under ``val/``; those of a second verifier only where it scored anything.

    With them the sampling of held-out prompts is over: the sampler lets go of the weights.

    Raises:
        RuntimeError: If more of the responses could not be judged than allowed.
    """
    data.sampler.release()
    figures = metrics.compute()
    share = float(figures["unavailable_share"])
    lost = f"{share:.1%} of the held-out responses could not be judged because what judges was unavailable"
    if share > data.max_unavailable_share:
        raise RuntimeError(
            f"{lost}, more than data.max_unavailable_share={data.max_unavailable_share:g} allows: they would count as "
            "wrong. The log says what was unavailable: see to it, and go on from the last checkpoint."
        )
    if share:
        rank_zero_warn(f"{lost}; they count as wrong.")
    unknown = [f"val/{name}" for name, value in figures.items() if value.isnan()]
    if unknown:
        rank_zero_warn(f"No held-out response was scored that would tell {' and '.join(unknown)}: not logged.")
    return {f"val/{k}": v for k, v in figures.items() if f"val/{k}" not in unknown}
