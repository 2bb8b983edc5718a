"""What everything that is trained shares: a model, its tokenizer, an optimizer, and what a step is."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from rlalign.algorithms.schedules import WarmupSchedule
from rlalign.assets import told_if_missing
from rlalign.functional.draws import fold_in
from rlalign.memory import keep_freed_memory
from rlalign.models.policy import locate_model
from rlalign.models.sharding import total_norm
from rlalign.rollouts.ranks import data_module, data_parallel

# Models are in evaluation mode, in training too, so that scoring is without dropout: Lightning need not worry.
warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode at the start of training.*")


def default_optimizer(parameters: Any) -> Optimizer:
    """AdamW at 1e-6 without weight decay."""
    return torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0)


class TrainedModule(LightningModule, ABC):
    """A model with its tokenizer and its optimizer; a subclass says what the model is and what its loss is.

    Args:
        model: Folder or hub name of the language model that it starts from.
        trust_remote_code: Run model code that comes with the weights.
        optimizer: Makes the optimizer from the trained parameters; AdamW at 1e-6 by default.
        schedule: Makes the schedule of its rate, counted in optimizer steps; constant by default.
    """

    def __init__(
        self,
        model: str,
        trust_remote_code: bool = False,
        optimizer: OptimizerCallable = default_optimizer,
        schedule: LRSchedulerCallable = WarmupSchedule,
    ) -> None:
        super().__init__()
        self.model_name = model
        self.make_optimizer, self.make_schedule = optimizer, schedule
        path = locate_model(model)
        with told_if_missing(path):
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code
            )
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        """Longest sequence that the model knows, prompt and response."""
        self._is_built = False
        self._skip_update = False
        self._terms: dict[str, Callable[[int], Tensor | None]] = {}

    served_by: ClassVar[type[LightningDataModule]] = LightningDataModule
    """The data module that serves what it learns from."""

    @property
    def data(self) -> Any:
        """The data module of the trainer."""
        return data_module(self.trainer)

    @abstractmethod
    def build(self) -> None:
        """Make the models; called once, when the trainer and its ranks are there."""

    @property
    def has_dropout(self) -> bool:
        """Whether the gradient pass draws random numbers."""
        return False

    def configure_model(self) -> None:
        """Build the models, once: every entry point of the trainer calls this again.

        Raises:
            ValueError: If the trainer would turn the weights themselves into short floats, or its strategy is FSDP1.
        """
        if str(self.trainer.precision).endswith("16-true"):
            raise ValueError(
                f"trainer.precision={self.trainer.precision} trains 16-bit weights, which small updates do not "
                "move, and "
                "rounds log-probabilities: use bf16-mixed; to save memory, LoRA on policy.dtype=bfloat16."
            )
        if isinstance(self.trainer.strategy, FSDPStrategy):
            raise ValueError(
                "FSDPStrategy (FSDP1) cannot clip by the norm, nor mix trained and frozen weights in a layer: use "
                "rlalign.strategies.fsdp2.FSDP2Strategy, as in configs/strategies/fsdp2.yaml."
            )
        if self.device.type == "cpu":
            keep_freed_memory()
        if not self._is_built:
            self.build()
            self._is_built = True

    def parameter_groups(self) -> Iterable[Any]:
        """What the optimizer gets: the trained parameters, or groups of them with options of their own."""
        return (p for p in self.parameters() if p.requires_grad)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimizer, and a schedule that counts its steps."""
        optimizer = self.make_optimizer(self.parameter_groups())
        if self.trainer.precision != "16-mixed" and hasattr(optimizer, "_step_supports_amp_scaling"):
            optimizer._step_supports_amp_scaling = False  # no scaler: its gradient can be clipped
        schedule: Any = self.make_schedule(optimizer)
        if isinstance(schedule, WarmupSchedule) and schedule.shape != "constant" and schedule.total_steps is None:
            steps = self.trainer.estimated_stepping_batches
            if steps == float("inf"):
                raise ValueError(f"schedule.shape={schedule.shape} needs trainer.max_epochs or schedule.total_steps.")
            schedule.total_steps = int(steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model by a sentence, before it fails parameter by parameter.

        One side may have a reference where the other has none: only training needs it.

        Raises:
            ValueError: If names or shapes of the parameters differ.
        """
        theirs, ours = checkpoint.get("state_dict", {}), self.state_dict()
        if not theirs:
            return
        for name in [n for n in theirs if ".reference." in n and n not in ours]:
            del theirs[name]
        theirs.update({n: value for n, value in ours.items() if ".reference." in n and n not in theirs})
        shapes = [{name: value.shape for name, value in each.items()} for each in (theirs, ours)]
        differing = sorted(n for n in theirs.keys() | ours.keys() if shapes[0].get(n) != shapes[1].get(n))
        if differing:
            hyper_parameters = checkpoint.get("hyper_parameters", {})
            model = hyper_parameters.get("policy", hyper_parameters).get("model", "an unknown one")
            raise ValueError(
                f"The checkpoint is of another model or another kind of run: it was trained from {model}; "
                f"this run has {self.model_name}. {len(differing)} tensors differ, {differing[0]} for one."
            )

    # ---- steps -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note whether the whole optimizer step is without a token, and log its learning rate."""
        self._skip_update = batch.step_tokens == 0
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            of_rank = float(self._skip_update) / self.trainer.world_size
            how: Any = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": 1}
            self.log("train/empty_steps", of_rank, reduce_fx="sum", **how)
            self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"], **how)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """A step without a token runs forward and backward, like any, but moves neither weights nor moments."""
        if self._skip_update and optimizer_closure is not None:
            optimizer_closure()
            return
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        engine: Any = self.trainer.model  # DeepSpeed keeps the gradients to itself
        if hasattr(engine, "get_global_grad_norm") and (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self._log_grad_norm(engine.get_global_grad_norm())

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the norm of the gradient before it is clipped."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if gradients and not self._skip_update:
            self._log_grad_norm(total_norm(gradients))

    def _log_grad_norm(self, norm: Tensor | float) -> None:
        self.log("train/grad_norm", norm, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)

    def step_scale(self) -> float:
        """What the trainer and its strategy will divide a loss by: accumulation, and data-parallel ranks."""
        accumulate = self.trainer.accumulate_grad_batches
        if self.trainer.strategy.handles_gradient_accumulation:  # DeepSpeed divides by it once more
            accumulate *= accumulate
        return float(accumulate * data_parallel(self.trainer)[1])

    def add_loss(self, name: str, term: Callable[[int], Tensor | None]) -> None:
        """Add a term to the loss of every minibatch, within the training step; called by a callback in ``setup``.

        Args:
            name: Of the term; the same name again replaces it.
            term: Given the number of the minibatch, a scalar that is scaled like the loss, see :meth:`step_scale`, or
                ``None``. Ranks must agree whether there is one.
        """
        if not self._terms:
            step = self.training_step

            def with_terms(batch: Any, batch_idx: int) -> Any:
                loss: Any = step(batch, batch_idx)
                for each in self._terms.values():
                    if (value := each(batch_idx)) is not None:
                        loss = loss + value
                return loss

            self.training_step = with_terms  # type: ignore[method-assign]
        self._terms[name] = term

    def dropout_seed(self, batch_idx: int) -> None:
        """Where dropout is asked for, make it a function of seed, iteration, minibatch and rank."""
        if self.has_dropout:
            seed = getattr(self.data, "seed", 0) or 0
            torch.manual_seed(fold_in(seed, self.current_epoch, batch_idx, data_parallel(self.trainer)[0]))

    def log_mean(self, values: dict[str, Tensor], weight: int) -> None:
        """Log means of a minibatch of this weight; an iteration's value is the weighted mean over all, on all ranks."""
        # The trainer averages weights over ranks in whole numbers: as multiples of the ranks they lose nothing.
        weight *= self.trainer.world_size
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, batch_size=weight)
