"""What every algorithm shares: a policy and, where it learns from rollouts, how these are scored."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal

import torch
from lightning import LightningDataModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from rlalign.algorithms.module import TrainedModule
from rlalign.functional.divergences import kl_k3
from rlalign.functional.reductions import Reduction, masked_mean, reduce_loss
from rlalign.metrics.held_out import held_out_figures, held_out_metrics, sample_and_count, sample_ranked
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.models.scoring import TokenScores
from rlalign.rollouts.batch import Rollout, RolloutBatch
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.ranks import data_parallel, gather_objects, run_seed, sum_over_ranks


class PolicyModule(TrainedModule):
    """A language model and its optimizer.

    Args:
        policy: Which model, and which part of it is trained.
        kwargs: ``optimizer`` and ``schedule``: see :class:`~rlalign.algorithms.module.TrainedModule`.
    """

    def __init__(
        self,
        policy: PolicyConfig = PolicyConfig(),  # noqa: B008  (never changed)
        **kwargs: Any,
    ) -> None:
        config = policy if isinstance(policy, PolicyConfig) else PolicyConfig(**policy)
        super().__init__(model=config.model, trust_remote_code=config.trust_remote_code, **kwargs)
        self.policy_config = config
        self.save_hyperparameters(ignore=["policy", "optimizer", "schedule", "annotator"])  # those of subclasses, too
        self.save_hyperparameters({"policy": asdict(config)})
        self.policy: Policy | None = None
        self.needs_reference = False
        self.moves_reference = False
        """Set by a callback in ``setup``: the reference is to be moved."""
        self.needs_value_head = False

    def build(self) -> None:
        """The policy, and the reference where one is needed."""
        self.policy = Policy(
            self.policy_config,
            self.needs_reference,
            run_seed(self.trainer),
            with_value_head=self.needs_value_head,
            moves_reference=self.moves_reference,
        )
        if self.device_mesh is not None:
            self.policy.shard(self.device_mesh)
        elif getattr(self.trainer.strategy, "zero_stage_3", False):
            self.policy.keep_mirror()

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt that rows of a minibatch have in common is computed once."""
        return self.policy is not None and self.policy.shares_prompts

    @property
    def has_dropout(self) -> bool:
        """Whether the gradient pass draws random numbers."""
        return self.policy is not None and self.policy.has_dropout


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

    served_by: ClassVar[type[LightningDataModule]] = RolloutDataModule
    max_rounds: int = 1
    rows_together: int = 1
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

    def on_fit_start(self) -> None:
        """Say so where a KL to the old policy does nothing, or what is sampled from is not quite the policy."""
        assert self.policy is not None
        computes = torch.bfloat16 if str(self.trainer.precision).startswith("bf16") else self.policy.model.dtype
        if self.importance_cap is None and self.data.sampler.is_approximate(computes):
            rank_zero_warn(
                f"{type(self.data.sampler).__name__} draws from what differs from the policy, as if it were the "
                "policy: give importance_cap (2, say) to correct for that."
            )
        is_to_old = getattr(self, "kl_to", "reference") == "old" and getattr(self, "kl_coef", 0.0) > 0
        if is_to_old and self.data.plan.num_steps == 1:
            rank_zero_warn(
                "kl_to=old does nothing with one step an iteration: the policy is the old one. Lower step_size."
            )

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether responses whose advantages are all 0 are left out of the minibatches."""
        return False

    # ---- from rollouts to a batch to learn from ----------------------------------------------------------------------

    @abstractmethod
    def advantages(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """How much better each response was than expected, ``[B, 1]`` or ``[B, T]``."""

    def keep_groups(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """Which groups to learn from, ``[num_groups]``: all."""
        return torch.ones(len(rollouts) // group_size, dtype=torch.bool)

    def prepare(self, rollouts: RolloutBatch, group_size: int) -> RolloutBatch:
        """Fill in the advantages, 0 for what only fills up the batch; take from the loss what must not count."""
        advantages = self.advantages(rollouts, group_size).masked_fill(~rollouts.kept.unsqueeze(1), 0.0)
        return self.filtered(replace(rollouts, advantages=advantages))

    def filtered(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Take from the loss the responses that were cut, if that was asked for."""
        if not self.overlong_filter:
            return rollouts
        return replace(rollouts, loss_mask=rollouts.loss_mask & ~rollouts.truncated.unsqueeze(1))

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """Fill in old log-probabilities, if the policy moves within the iteration, and the reference's, if used."""
        if num_steps > 1:
            rollouts = replace(rollouts, old_logprobs=self.score_all(rollouts, minibatch_size))
        if self.needs_reference:
            rollouts = replace(rollouts, ref_logprobs=self.score_all(rollouts, minibatch_size, reference=True))
        self._kl_probe = rollouts[:64] if self.needs_kl_step else None
        return rollouts

    def score_all(self, rollouts: RolloutBatch, minibatch_size: int, reference: bool = False) -> Tensor:
        """Log-probabilities of all responses ``[B, T]``, on the CPU."""
        (logprobs,) = self.compute_all(
            rollouts, minibatch_size, lambda batch: (self.score(batch, reference=reference).logprobs,)
        )
        return logprobs

    @torch.no_grad()
    def compute_all(
        self, rollouts: RolloutBatch, minibatch_size: int, compute: Callable[[RolloutBatch], tuple[Tensor, ...]]
    ) -> list[Tensor]:
        """What a function makes of all rollouts, on the CPU of every rank.

        Each rank computes its share, in equally many passes.

        Args:
            rollouts: ``B`` rows of up to ``T`` response tokens.
            minibatch_size: Rows a pass.
            compute: From some rows, trimmed to ``t`` tokens, to tensors ``[b, t + k]``, each with a constant ``k``.

        Returns:
            Tensors ``[B, T + k]``, zero beyond a pass's columns.
        """
        rank, num_ranks = data_parallel(self.trainer)
        order = rollouts.response_lengths.argsort(stable=True)
        share = -(-len(order) // num_ranks)
        mine = order[rank::num_ranks]
        computed: list[tuple[Tensor, int, list[Tensor]]] = []
        for start in range(0, share, minibatch_size):
            rows = mine[start : start + minibatch_size]
            batch = rollouts[rows].trimmed() if len(rows) else rollouts.emptied()
            results = [result.cpu() for result in compute(batch.to(self.device))]
            if len(rows):
                computed.append((rows, batch.response_mask.shape[1], results))
        parts = [part for of_rank in gather_objects(computed) for part in of_rank]
        _, narrow, examples = parts[0]
        width = rollouts.response_mask.shape[1]
        out = [e.new_zeros(len(rollouts), width + e.shape[1] - narrow) for e in examples]
        for rows, _, results in parts:
            for whole, result in zip(out, results, strict=True):
                whole[rows, : result.shape[1]] = result
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
        """Log means over the fresh tokens that count, under ``train/``; nothing for a step without any."""
        self._log_over(batch.fresh_mask, batch.step_tokens - batch.step_replayed_tokens, values)

    def replay_metrics(self, batch: RolloutBatch, **values: Tensor) -> None:
        """The same over the tokens that are replayed."""
        self._log_over(batch.loss_mask & ~batch.fresh_mask, batch.step_replayed_tokens, values)

    def _log_over(self, mask: Tensor, step_tokens: float, values: dict[str, Tensor]) -> None:
        if step_tokens:  # alike on all ranks; of none there is no mean
            means = {f"train/{name}": masked_mean(value.detach(), mask) for name, value in values.items()}
            self.log_mean(means, int(mask.sum()))

    def log_advantages(self, batch: RolloutBatch) -> None:
        """Log how large those of fresh responses are: a mean over the tokens of each, then over responses."""
        if batch.advantages is None or batch.step_tokens == batch.step_replayed_tokens:
            return
        of_response = masked_mean(batch.advantages.abs().expand_as(batch.loss_mask), batch.fresh_mask, dim=1)
        rows = batch.fresh_mask.any(-1)
        self.log_mean({"train/advantage_abs": masked_mean(of_response, rows)}, int(rows.sum()))

    # ---- validation --------------------------------------------------------------------------------------------------

    def rank(self, rollouts: Sequence[Rollout]) -> Sequence[float | None] | None:
        """How good responses to held-out prompts look to what chooses among them: to ``data.ranker``.

        A method that learns a value function overrides this. Every rank calls it equally often, if need be without
        rollouts.

        Returns:
            A number for each, higher is better, ``None`` where it could not be scored; ``None`` alone where nothing
            ranks, whatever the rollouts.
        """
        scores: Sequence[float | None] | None = self.data.rank(rollouts)
        return scores

    def on_validation_start(self) -> None:
        """Fresh counts."""
        self.val_metrics = held_out_metrics(self.data, self.device, self.rank)

    def validation_step(self, indices: list[int], batch_idx: int) -> None:
        """Sample responses to held-out prompts and count the right ones."""
        sample_and_count(self.val_metrics, self.data, indices, self.rank)

    def on_validation_epoch_end(self) -> None:
        """Log exact figures over all ranks.

        Raises:
            RuntimeError: If more of the responses could not be judged than ``data.max_unavailable_share`` allows.
        """
        self.log_dict(held_out_figures(self.val_metrics, self.data), sync_dist=True)

    on_test_start = on_validation_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, indices: list[int], batch_idx: int) -> list[Any]:
        """Responses to held-out prompts, with their scores where something ranks them."""
        return list(sample_ranked(self.data, indices, self.rank))
