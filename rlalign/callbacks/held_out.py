"""Held-out problems for runs that sample nothing."""

from collections.abc import Callable
from typing import Any

from lightning import Callback, LightningModule, Trainer

from rlalign.metrics.held_out import held_out_figures, held_out_metrics, sample_and_count
from rlalign.rewards.base import NamedReward
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.prompts import PromptSource
from rlalign.rollouts.ranks import data_module
from rlalign.rollouts.sampling.base import Sampler, SamplingParams
from rlalign.rollouts.template import Rendering


class HeldOutProblems(Callback):
    """Has the policy answer held-out problems when the trainer validates, also in ``rlalign validate`` and ``test``.

    For ``SFT``, ``DPO``, ``KTO`` and other runs on data that are read: it logs the figures (``val/pass@1``, ...) that
    runs on rollouts log, drawn with the same random numbers for every checkpoint.

    Args:
        problems: Prompts with their answers, as ``data.val`` of a
            :class:`~rlalign.rollouts.datamodule.RolloutDataModule`, like what follows.
        rewards: By name; the first one, or ``correct``, tells right from wrong.
        correct: Name of the reward that does.
        samples: Responses a problem.
        sampling: How they are drawn.
        sampler: What draws them.
        batch_size: Problems sampled at a time, on each rank.
        limit: Use the first so many problems only.
        columns: Where the problems have other names: ``prompt``, ``answer`` -> name of the column.
        system_prompt: Put before every problem.
        rendering: How a problem that is plain text is shown to the model.

    Raises:
        ValueError: If a number is below 1; at the start, if the run samples by itself, or never validates.
    """

    def __init__(
        self,
        problems: str | PromptSource,
        rewards: dict[str, NamedReward | Callable[..., Any]],
        correct: str | None = None,
        samples: int = 1,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (never changed)
        sampler: Sampler | None = None,
        batch_size: int = 32,
        limit: int | None = None,
        columns: dict[str, str] | None = None,
        system_prompt: str | None = None,
        rendering: Rendering = "auto",
    ) -> None:
        self.data = RolloutDataModule(
            problems,
            rewards,
            val=problems,
            correct=correct,
            sampling=sampling,
            sampler=sampler,
            val_samples=samples,
            val_batch_size=batch_size,
            val_limit=limit,
            columns=columns,
            system_prompt=system_prompt,
            rendering=rendering,
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that validation will come, and read the problems."""
        data = data_module(trainer)
        if isinstance(data, RolloutDataModule):
            raise ValueError("HeldOutProblems is for runs that sample nothing; here data.val says what is held out.")
        if not hasattr(pl_module, "policy"):
            raise ValueError(f"HeldOutProblems: {type(pl_module).__name__} has no policy that could answer problems.")
        if getattr(data, "val_source", None) is None:
            raise ValueError(
                "HeldOutProblems answers problems when the trainer validates, which it does where data are held out: "
                "give data.val or data.num_held_out."
            )
        self.data.trainer = trainer
        self.data.seed = data.seed
        self.data.setup("validate")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sample, count, and log the figures."""
        data = data_module(trainer)
        self.data.seed = data.seed  # that of the run that was resumed
        metrics = held_out_metrics(self.data, pl_module.device)
        for indices in self.data.val_dataloader():
            sample_and_count(metrics, self.data, indices)
        pl_module.log_dict(held_out_figures(metrics, self.data), sync_dist=True)

    on_test_epoch_end = on_validation_epoch_end
