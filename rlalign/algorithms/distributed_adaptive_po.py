"""Distributed adaptive policy optimization: workers with strata, replay and value estimates of their own."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlalign.algorithms.grpo import GRPO
from rlalign.functional.advantages import shrunk_baselines
from rlalign.functional.off_policy import truncated_importance_loss
from rlalign.functional.reductions import Reduction
from rlalign.rollouts.batch import RolloutBatch
from rlalign.rollouts.curriculum import StratifiedWorkers
from rlalign.rollouts.replay import join_batches
from rlalign.rollouts.worker_memory import Memory, memory_of


class DistributedAdaptivePO(GRPO):
    r"""PPO's clip on what workers sample in strata, with importance weights, and what they remember beside it.

    .. math:: A_i = \frac{p_s}{q_w(s)} \big(r_i - b_i\big), \qquad
        b_i = \frac{n_0 V_w(s) + \sum_{j \ne i} r_j}{n_0 + n - 1}

    Worker :math:`w` draws prompts of stratum :math:`s` with a frequency :math:`q_w(s)` that adapts, and the weight
    :math:`p_s / q_w(s)` undoes the bias: see :class:`~rlalign.rollouts.curriculum.StratifiedWorkers`, which must be the
    curriculum. Its value estimator is light: a running mean of the rewards it has seen in each stratum, which counts as
    :math:`n_0` further responses to the prompt. Each worker replays responses that it sampled in earlier iterations;
    their tokens count by a truncated importance ratio, with the advantages that they had. Workers are places of an
    iteration: on how many ranks they are sampled changes nothing, and gradients are averaged by whatever strategy the
    trainer has. With :class:`~rlalign.rollouts.sampling.ray.RaySampler` they are processes, each with a replica of the
    policy, and its replay buffer and value estimator are there.

    This is the method that an article calls DAPO; it is not that of Yu et al. (:class:`~rlalign.algorithms.dapo.DAPO`).
    The article goes with :class:`~rlalign.algorithms.optimizers.AdamThenSGD` and an entropy coefficient that falls from
    0.1 to 0.01: see ``configs/distributed_adaptive_po.yaml``.

    Args:
        prior_samples: The weight :math:`n_0`, in responses, 0 or more; above 0 one response a prompt is enough.
        value_update: How far an iteration's mean reward moves the running one, in (0, 1].
        replay_capacity: Responses that a worker remembers; 0 for none.
        replay_share: Responses replayed for each fresh one, 0 or more.
        replay_cap: Largest importance ratio of a replayed token.
        entropy_coef: Weight of the entropy bonus.
        kl_coef: Weight of a KL term; the article has none.
        reduction: See :class:`~rlalign.algorithms.base.RolloutModule`; the article counts batches in tokens.
        kwargs: See :class:`~rlalign.algorithms.grpo.GRPO`.

    Raises:
        ValueError: If a number is out of bounds.
    """

    def __init__(
        self,
        prior_samples: float = 2.0,
        value_update: float = 0.3,
        replay_capacity: int = 1024,
        replay_share: float = 0.25,
        replay_cap: float = 1.0,
        entropy_coef: float = 0.1,
        kl_coef: float = 0.0,
        reduction: Reduction = "token",
        **kwargs: Any,
    ) -> None:
        super().__init__(entropy_coef=entropy_coef, kl_coef=kl_coef, reduction=reduction, **kwargs)
        if not (0 < value_update <= 1 and min(prior_samples, replay_capacity, replay_share) >= 0 and replay_cap > 0):
            raise ValueError(
                "Expected value_update in (0, 1], replay_cap above 0 and prior_samples, replay_capacity and "
                f"replay_share of 0 or more, got {value_update}, {replay_cap}, {prior_samples}, {replay_capacity} and "
                f"{replay_share}."
            )
        self.prior_samples, self.value_update = prior_samples, value_update
        self.replay_share, self.replay_cap, self.replay_capacity = replay_share, replay_cap, replay_capacity
        self._memories: dict[int, Memory] = {}
        self._kept: dict[int, dict[str, Any]] = {}
        """Of each worker, what a checkpoint has of its memory, until there is one to take it."""

    @property
    def memories(self) -> dict[int, Memory]:
        """Of each worker, what it has sampled and what it expects."""
        for number in range(self.data.curriculum.num_workers):
            if number not in self._memories:
                memory = memory_of(self.data.sampler, number, self.replay_capacity, self.value_update)
                memory.load_state_dict(self._kept.pop(number, {}))
                self._memories[number] = memory
        return self._memories

    @property
    def estimates(self) -> dict[tuple[int, int], float]:
        """Of each worker and stratum, the running mean of its rewards."""
        return {(w, s): value for w, memory in self.memories.items() for s, value in memory.expected().items()}

    def on_fit_start(self) -> None:
        """Check what depends on the data module.

        Raises:
            ValueError: If the curriculum has no workers, or a prompt has one response and nothing to compare it with.
        """
        if not isinstance(self.data.curriculum, StratifiedWorkers):
            raise ValueError("DistributedAdaptivePO needs workers: data.curriculum={class_path: StratifiedWorkers}.")
        if not self.prior_samples:
            super().on_fit_start()

    def advantages(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """Rewards against what the worker expected of the prompt, with its importance weight, ``[B, 1]``."""
        by, valid = self.data.curriculum, rollouts.valid
        # Of what a worker has not seen yet, the others of the iteration stand for what it expects.
        none = torch.zeros_like(rollouts.rewards)
        others = shrunk_baselines(rollouts.rewards, len(rollouts), none, 0.0, valid).tolist()
        places = [(int(by.worker[p]), int(by.stratum[p])) for p in rollouts.prompt_index.tolist()]
        estimates = self.estimates
        prior = torch.tensor([estimates.get(place, other) for place, other in zip(places, others, strict=True)])
        baseline = shrunk_baselines(rollouts.rewards, group_size, prior, self.prior_samples, valid)
        weights = by.importance(rollouts.prompt_index)
        return (weights * (rollouts.rewards - baseline)).masked_fill(~valid, 0.0).unsqueeze(1)

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """Score as ever, add what workers replay, and have them learn from what is fresh."""
        rollouts = super().annotate(rollouts, num_steps, minibatch_size)
        sampled = rollouts.sampler_logprobs if rollouts.old_logprobs is None else rollouts.old_logprobs
        no = torch.zeros(len(rollouts), dtype=torch.bool)
        fresh = replace(rollouts, old_logprobs=sampled, replayed=no)
        worker = self.data.curriculum.worker[fresh.prompt_index]
        parts = [fresh]
        for number, memory in self.memories.items() if self.replay_capacity else ():
            mine = fresh[worker == number]
            wanted = round(self.replay_share * len(mine))
            again = memory.replay(mine, wanted, self.data.seed, self.current_epoch, number)
            parts += [] if again is None else [replace(again, replayed=~torch.zeros_like(again.valid))]
        self._learn_values(fresh)
        joined = join_batches(parts)
        share = {"rollout/replayed_share": 1 - len(fresh) / len(joined)}
        return replace(joined, statistics=fresh.statistics | share)

    def _learn_values(self, fresh: RolloutBatch) -> None:
        by, seen = self.data.curriculum, defaultdict[int, dict[int, list[float]]](dict)
        for prompt, reward in zip(fresh.prompt_index[fresh.valid].tolist(), fresh.rewards[fresh.valid], strict=True):
            seen[int(by.worker[prompt])].setdefault(int(by.stratum[prompt]), []).append(float(reward))
        for worker, rewards in seen.items():
            self.memories[worker].learn(rewards)

    def token_loss(self, batch: RolloutBatch, logprobs: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The clipped surrogate where tokens are fresh, the truncated importance-weighted one where they are not."""
        loss, low, high = super().token_loss(batch, logprobs, old)
        assert batch.advantages is not None
        again = truncated_importance_loss(logprobs, old, batch.advantages, batch.loss_mask, self.replay_cap)
        fresh = batch.fresh_mask
        return torch.where(fresh, loss, again), low & fresh, high & fresh

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what workers remember, and what they expect."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["workers"] = self._kept | {number: m.state_dict() for number, m in self._memories.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with it, where the checkpoint is of this method."""
        super().on_load_checkpoint(checkpoint)
        self._kept, self._memories = dict(checkpoint.get("workers", {})), {}
