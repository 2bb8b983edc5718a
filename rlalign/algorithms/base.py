"""What every algorithm shares: a policy, an optimizer, and, where it learns from rollouts, how these are scored."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from lightning import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from rlalign.algorithms.schedules import WarmupSchedule
from rlalign.functional.divergences import kl_k3
from rlalign.functional.draws import fold_in
from rlalign.functional.reductions import Reduction, masked_mean, reduce_loss
from rlalign.metrics import validation_metrics
from rlalign.models.policy import Policy, PolicyConfig, locate_model
from rlalign.models.scoring import TokenScores
from rlalign.rollouts.batch import RolloutBatch
from rlalign.rollouts.ranks import data_parallel, gather_objects, run_seed, sum_over_ranks

# Policies are in evaluation mode, in training too, so that scoring is without dropout: Lightning need not worry.
warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode at the start of training.*")


def default_optimizer(parameters: Any) -> Optimizer:
    """AdamW at 1e-6 without weight decay."""
    return torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0)


class PolicyModule(LightningModule, ABC):
    """A language model and its optimizer.

    Args:
        policy: Which model, and which part of it is trained.
        optimizer: Makes the optimizer from the trained parameters; AdamW at 1e-6 by default.
        schedule: Makes the schedule of its rate, counted in optimizer steps; constant by default.
    """

    def __init__(
        self,
        policy: PolicyConfig = PolicyConfig(),  # noqa: B008  (never changed)
        optimizer: OptimizerCallable = default_optimizer,
        schedule: LRSchedulerCallable = WarmupSchedule,
    ) -> None:
        super().__init__()
        self.policy_config = policy if isinstance(policy, PolicyConfig) else PolicyConfig(**policy)
        self.save_hyperparameters(ignore=["policy", "optimizer", "schedule"])  # those of subclasses, too
        self.save_hyperparameters({"policy": asdict(self.policy_config)})
        self.make_optimizer, self.make_schedule = optimizer, schedule
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            locate_model(self.policy_config.model), trust_remote_code=self.policy_config.trust_remote_code
        )
        config = AutoConfig.from_pretrained(
            locate_model(self.policy_config.model), trust_remote_code=self.policy_config.trust_remote_code
        ).get_text_config()
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        """Longest sequence that the model knows, prompt and response."""
        self.policy: Policy | None = None
        self.needs_reference = False
        self._skip_update = False

    @property
    def data(self) -> Any:
        """The data module of the trainer."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def configure_model(self) -> None:
        """Build the policy, once: every entry point of the trainer calls this again.

        Raises:
            ValueError: If the trainer would turn the weights themselves into short floats.
        """
        if str(self.trainer.precision).endswith("16-true"):
            raise ValueError(
                f"trainer.precision={self.trainer.precision} trains 16-bit weights, which small updates do not "
                "move, and "
                "rounds log-probabilities: use bf16-mixed; to save memory, LoRA on policy.dtype=bfloat16."
            )
        if self.policy is None:
            self.policy = Policy(self.policy_config, self.needs_reference, seed=run_seed(self.trainer))
            if self.device_mesh is not None:
                self.policy.shard(self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimizer, and a schedule that counts its steps."""
        optimizer = self.make_optimizer(p for p in self.parameters() if p.requires_grad)
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
            model = checkpoint.get("hyper_parameters", {}).get("policy", {}).get("model", "an unknown one")
            raise ValueError(
                f"The checkpoint is of another model or another kind of run: it was trained from policy.model={model}; "
                f"this run has {self.policy_config.model}. {len(differing)} tensors differ, {differing[0]} for one."
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
            norm = torch.nn.utils.get_total_norm(gradients)
            self._log_grad_norm(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _log_grad_norm(self, norm: Tensor | float) -> None:
        self.log("train/grad_norm", norm, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)

    def step_scale(self) -> float:
        """What the trainer and its strategy will divide a loss by: accumulation, and data-parallel ranks."""
        accumulate = self.trainer.accumulate_grad_batches
        if self.trainer.strategy.handles_gradient_accumulation:  # DeepSpeed divides by it once more
            accumulate *= accumulate
        return float(accumulate * data_parallel(self.trainer)[1])

    def dropout_seed(self, batch_idx: int) -> None:
        """Where dropout is asked for, make it a function of seed, iteration, minibatch and rank."""
        assert self.policy is not None
        if self.policy.has_dropout:
            seed = getattr(self.data, "seed", 0) or 0
            torch.manual_seed(fold_in(seed, self.current_epoch, batch_idx, data_parallel(self.trainer)[0]))

    def log_mean(self, values: dict[str, Tensor], weight: int) -> None:
        """Log means of a minibatch of this weight; an iteration's value is the weighted mean over all, on all ranks."""
        # The trainer averages weights over ranks in whole numbers: as multiples of the ranks they lose nothing.
        weight *= self.trainer.world_size
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, batch_size=weight)


class RolloutModule(PolicyModule, ABC):
    """A policy that samples responses and learns from them.

    A subclass says what an advantage is (:meth:`advantages`) and what the loss is (:meth:`training_step`).

    Args:
        policy: See :class:`PolicyModule`, as for ``optimizer`` and ``schedule``.
        reduction: What the loss is a mean over: all ``token``s of a step (DAPO), the responses (``sequence``, GRPO), or
            responses of a ``constant`` length, ``sampling.max_new_tokens`` (Dr. GRPO).
        overlong_filter: Responses cut by the length limit take no part in the loss.
        importance_cap: Weigh each token by the policy's probability over the sampler's, at most this; off by default:
            the local sampler is the policy.
        kwargs: See :class:`PolicyModule`.
    """

    max_rounds: int = 1
    partial_batch: Literal["keep", "fill"] = "keep"

    def __init__(
        self,
        reduction: Reduction = "token",
        overlong_filter: bool = False,
        importance_cap: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.reduction: Reduction = reduction
        self.overlong_filter = overlong_filter
        self.importance_cap = importance_cap
        self.needs_kl_step = False
        """Set by a callback in ``setup``: log ``train/kl_step``."""
        self._kl_probe: RolloutBatch | None = None

    # ---- from rollouts to a batch to learn from ----------------------------------------------------------------------

    @abstractmethod
    def advantages(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """How much better each response was than expected, ``[B, 1]`` or ``[B, T]``."""

    def keep_groups(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """Which groups to learn from, ``[num_groups]``: all."""
        return torch.ones(len(rollouts) // group_size, dtype=torch.bool)

    def prepare(self, rollouts: RolloutBatch, group_size: int) -> RolloutBatch:
        """Fill in the advantages, 0 for what only fills up the batch; take from the loss what must not count."""
        loss_mask = rollouts.loss_mask
        if self.overlong_filter:
            loss_mask = loss_mask & ~rollouts.truncated.unsqueeze(1)
        advantages = self.advantages(rollouts, group_size).masked_fill(~rollouts.kept.unsqueeze(1), 0.0)
        return replace(rollouts, advantages=advantages, loss_mask=loss_mask)

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """Fill in old log-probabilities, if the policy moves within the iteration, and the reference's, if used."""
        if num_steps > 1:
            rollouts = replace(rollouts, old_logprobs=self.score_all(rollouts, minibatch_size))
        if self.needs_reference:
            rollouts = replace(rollouts, ref_logprobs=self.score_all(rollouts, minibatch_size, reference=True))
        self._kl_probe = rollouts[:64] if self.needs_kl_step else None
        return rollouts

    @torch.no_grad()
    def score_all(self, rollouts: RolloutBatch, minibatch_size: int, reference: bool = False) -> Tensor:
        """Log-probabilities of all responses ``[B, T]``, on the CPU.

        Each rank computes its share, in equally many passes.
        """
        rank, num_ranks = data_parallel(self.trainer)
        order = rollouts.response_lengths.argsort(stable=True)
        share = -(-len(order) // num_ranks)
        mine = order[rank::num_ranks]
        scored: list[tuple[Tensor, Tensor]] = []
        for start in range(0, share, minibatch_size):
            rows = mine[start : start + minibatch_size]
            batch = rollouts[rows].trimmed() if len(rows) else rollouts.emptied()
            logprobs = self.score(batch.to(self.device), reference=reference).logprobs.cpu()
            if len(rows):
                scored.append((rows, logprobs))
        parts = [part for of_rank in gather_objects(scored) for part in of_rank]
        out = torch.zeros(rollouts.response_mask.shape, dtype=parts[0][1].dtype)
        for rows, logprobs in parts:
            out[rows, : logprobs.shape[1]] = logprobs
        return out

    def score(self, batch: RolloutBatch, reference: bool = False) -> TokenScores:
        """Log-probabilities and entropies of the response tokens, each ``[B, T]``."""
        assert self.policy is not None
        scores: TokenScores = self.policy(
            batch.input_ids, batch.attention_mask, batch.response_mask, batch.temperature, reference
        )
        return scores

    # ---- the loss ----------------------------------------------------------------------------------------------------

    def reduce(self, token_loss: Tensor, batch: RolloutBatch) -> Tensor:
        """The share of this minibatch in the step's loss.

        It is scaled so that what trainer and strategy divide by leaves exactly the step's mean.
        """
        normalizer = batch.step_tokens if self.reduction == "token" else batch.step_sequences
        max_tokens = None
        if self.reduction == "constant":
            max_tokens = self.data.sampling.max_new_tokens
        return self.step_scale() * reduce_loss(token_loss, batch.loss_mask, self.reduction, normalizer, max_tokens)

    def on_train_batch_end(self, outputs: Any, batch: RolloutBatch, batch_idx: int) -> None:
        """Log what the rollouts were like, and how far the iteration took the policy."""
        if batch.statistics:
            self.log_dict(batch.statistics, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        if self._kl_probe is not None and batch_idx + 1 == self.trainer.num_training_batches:
            kl = self.kl_step(self._kl_probe)
            self.log("train/kl_step", kl, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
            self._kl_probe = None

    @torch.no_grad()
    def kl_step(self, probe: RolloutBatch) -> float:
        """KL(policy before the iteration || policy now), nats a token, estimated by k3 on these rollouts."""
        rank, num_ranks = data_parallel(self.trainer)
        mine = probe[rank::num_ranks]
        batch = (mine.trimmed() if len(mine) else probe.emptied()).to(self.device)
        with self.trainer.precision_plugin.forward_context():
            now = self.score(batch).logprobs
        before = batch.old_logprobs if batch.old_logprobs is not None else batch.sampler_logprobs
        assert before is not None
        kl = kl_k3(before, now)
        mask = batch.loss_mask
        sums = sum_over_ranks(torch.stack([kl[mask].sum(), mask.sum().to(kl.dtype)]))
        return float(sums[0] / sums[1].clamp(min=1))

    def token_metrics(self, batch: RolloutBatch, **values: Tensor) -> None:
        """Log means over the tokens that count, under ``train/``; nothing for a step without any."""
        if batch.step_tokens == 0:
            return
        weight = int(batch.loss_mask.sum())
        self.log_mean(
            {f"train/{name}": masked_mean(value.detach(), batch.loss_mask) for name, value in values.items()}, weight
        )

    # ---- validation --------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Fresh counts."""
        data = self.data
        compared = None if data.verifier is None else data.rewards.correct
        self.val_metrics = validation_metrics(data.val_samples, data.rewards.answers, compared).to(self.device)

    def validation_step(self, indices: list[int], batch_idx: int) -> None:
        """Sample responses to held-out prompts and count the right ones."""
        data = self.data
        rollouts = data.verify(data.sample_held_out(indices))
        for start in range(0, len(rollouts), data.val_samples):
            self.val_metrics.update(rollouts[start : start + data.val_samples])

    def on_validation_epoch_end(self) -> None:
        """Log exact figures over all ranks; those of a second verifier only where it could score anything.

        Raises:
            RuntimeError: If more of the responses could not be judged than ``data.max_unavailable_share`` allows.
        """
        data = self.data
        figures = self.val_metrics.compute()
        share, allowed = float(figures["unavailable_share"]), data.max_unavailable_share
        lost = f"{share:.1%} of the held-out responses could not be judged because what judges was unavailable"
        if share > allowed:
            raise RuntimeError(
                f"{lost}, more than data.max_unavailable_share={allowed:g} allows: they would count as wrong. The log "
                "says what was unavailable: see to it, and go on from the last checkpoint."
            )
        if share:
            rank_zero_warn(f"{lost}; they count as wrong.")
        unknown = [f"val/{name}" for name, value in figures.items() if value.isnan()]
        if unknown:
            rank_zero_warn(f"No held-out response was scored that would tell {' and '.join(unknown)}: not logged.")
        self.log_dict({f"val/{k}": v for k, v in figures.items() if f"val/{k}" not in unknown}, sync_dist=True)

    on_test_start = on_validation_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, indices: list[int], batch_idx: int) -> list[Any]:
        """Responses to held-out prompts."""
        return list(self.data.sample_held_out(indices))
