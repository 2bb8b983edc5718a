"""A value function beside the policy: where it lives, how it is trained alone, and advantages from its values."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer

from rlalign.algorithms.base import PolicyModule, RolloutModule
from rlalign.functional.advantages import gae, token_rewards, whiten
from rlalign.functional.reductions import masked_mean
from rlalign.functional.value_losses import explained_variance
from rlalign.models.policy import locate_model
from rlalign.models.scalar import ScalarModel
from rlalign.models.scoring import TokenScores
from rlalign.rollouts.batch import RolloutBatch
from rlalign.rollouts.ranks import run_seed


class CriticModule(RolloutModule):
    """A policy with a value function, which says how much reward is to be expected from each token on.

    Values, returns and advantages are those of the whole iteration, from before its first step.

    Args:
        critic: A model of its own (``separate``), or a head on the policy's last hidden states (``shared``).
        critic_model: What a separate one starts from: a folder or hub name of a language model, which gets a new head,
            or of a reward model; by default what the policy starts from. All of its weights are trained.
        critic_lr: Its learning rate (of a shared one, the head's); the policy's by default. Schedules multiply both.
        critic_warmup: Iterations in which it alone is trained; the policy, a shared backbone too, stays as it is.
        gamma: Discount per token, in ``[0, 1]``.
        lam: See :func:`~rlalign.functional.advantages.gae`.
        bootstrap_truncated: The return of a response that the length limit cut goes on with the value of its last
            state. Turn it off where the reward of a cut response is the last word about it.
        whiten_advantages: Give them mean 0 and variance 1, over the iteration's tokens.
        whiten_rewards: Give the rewards of tokens variance 1, and leave their mean where it was.
        kwargs: See :class:`RolloutModule`.

    Raises:
        ValueError: If an option is out of bounds.
    """

    def __init__(
        self,
        critic: Literal["separate", "shared"] = "separate",
        critic_model: str | None = None,
        critic_lr: float | None = None,
        critic_warmup: int = 0,
        gamma: float = 1.0,
        lam: float = 0.95,
        bootstrap_truncated: bool = True,
        whiten_advantages: bool = True,
        whiten_rewards: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if critic not in ("separate", "shared") or (critic == "shared" and critic_model is not None):
            raise ValueError(
                f"critic={critic!r} with critic_model={critic_model}: a 'separate' critic may start from a model, a "
                "'shared' one is a head on the policy."
            )
        if critic_warmup < 0 or (critic_lr is not None and not critic_lr > 0):
            raise ValueError(f"Expected critic_warmup >= 0 and critic_lr > 0, got {critic_warmup} and {critic_lr}.")
        gae(one := torch.ones(1, 1), one, one, gamma, lam)
        self.needs_value_head = critic == "shared"
        self.critic_model, self.critic_lr, self.critic_warmup = critic_model, critic_lr, critic_warmup
        self.gamma, self.lam, self.bootstrap_truncated = gamma, lam, bootstrap_truncated
        self.whiten_advantages, self.whiten_rewards = whiten_advantages, whiten_rewards
        self.critic: ScalarModel | None = None

    # ---- the critic and its optimizer --------------------------------------------------------------------------------

    def build(self) -> None:
        """The policy, the reference where one is needed, and the critic.

        Raises:
            ValueError: If the critic's model comes with another vocabulary than the policy's.
        """
        super().build()
        if self.needs_value_head:
            return
        self.critic = scalar_beside(self, "critic_model", self.critic_model)

    def parameter_groups(self) -> Iterable[Any]:
        """Two groups: the policy's parameters, and the critic's with their rate."""
        assert self.policy is not None
        critic = self.critic or self.policy.value_head
        assert critic is not None
        of_critic = list(critic.parameters())
        ids = {id(p) for p in of_critic}
        of_policy = [p for p in self.parameters() if p.requires_grad and id(p) not in ids]
        rate = {} if self.critic_lr is None else {"lr": self.critic_lr}
        return [{"params": of_policy}, {"params": of_critic, **rate}]

    @property
    def trains_critic_only(self) -> bool:
        """Whether this iteration is one of the critic's warm-up."""
        return self.current_epoch < self.critic_warmup

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """A step; while the critic warms up, at a rate of 0 for the policy, so that no weight decay moves it either."""
        policy = optimizer.param_groups[0]
        rate = policy["lr"]
        policy["lr"] = 0.0 if self.trains_critic_only else rate
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        policy["lr"] = rate
        if self.trains_critic_only:
            # Adam would take moments of 0 for a mean over many steps, and the policy's first steps would be too long.
            for parameter in policy["params"]:
                optimizer.state.pop(parameter, None)

    def evaluate(self, batch: RolloutBatch) -> tuple[TokenScores, Tensor]:
        """Scores of the response tokens, and the values before each and after the last one, ``[B, T + 1]``."""
        if self.critic is not None:
            return self.score(batch), self.values(batch)
        return self._score_and_value(batch, batch.response_mask)

    def values(self, batch: RolloutBatch) -> Tensor:
        """Values of the states before each response token and after the last one, ``[B, T + 1]``."""
        if self.critic is None:
            return self._score_and_value(batch, torch.zeros_like(batch.response_mask))[1]
        values: Tensor = self.critic(batch.input_ids, batch.attention_mask)
        return values[:, -batch.response_mask.shape[1] - 1 :]

    def _score_and_value(self, batch: RolloutBatch, mask: Tensor) -> tuple[TokenScores, Tensor]:
        assert self.policy is not None
        gradient_ends_at = "head" if self.trains_critic_only else "body"
        inputs = (batch.input_ids, batch.attention_mask, mask, batch.temperature)
        both: tuple[TokenScores, Tensor] = self.policy(*inputs, values=gradient_ends_at)
        return both

    # ---- advantages --------------------------------------------------------------------------------------------------

    def prepare(self, rollouts: RolloutBatch, group_size: int) -> RolloutBatch:
        """Take from the loss what must not count; advantages need values, which :meth:`annotate` computes."""
        return self.filtered(rollouts)

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """Fill in values, returns and advantages, and the log-probabilities that they and the loss need."""
        rollouts = super().annotate(rollouts, num_steps, minibatch_size)
        rollouts = self.estimate(rollouts, minibatch_size)
        assert rollouts.values is not None
        assert rollouts.returns is not None
        mask = rollouts.loss_mask
        statistics = {
            "train/return_mean": float(masked_mean(rollouts.returns, mask)),
            "train/value_mean": float(masked_mean(rollouts.values, mask)),
        }
        explained = explained_variance(rollouts.values, rollouts.returns, mask)
        if explained is not None:
            statistics["train/explained_variance"] = explained
        return replace(rollouts, statistics={**rollouts.statistics, **statistics})

    def estimate(self, rollouts: RolloutBatch, minibatch_size: int) -> RolloutBatch:
        """Fill in values, returns and advantages, each ``[B, T]``, by the critic as it is now."""
        (values,) = self.compute_all(rollouts, minibatch_size, lambda batch: (self.values(batch),))
        before, after = values[:, :-1], values.gather(1, rollouts.response_lengths.unsqueeze(1)).squeeze(1)
        bootstrap = after * rollouts.truncated if self.bootstrap_truncated else None
        rewards = self.token_rewards(rollouts)
        _, returns = gae(rewards, before, rollouts.loss_mask, self.gamma, self.lam, bootstrap)
        rollouts = replace(rollouts, values=before, returns=returns)
        return replace(rollouts, advantages=self.advantages(rollouts, 1))

    @property
    def kl_in_reward(self) -> float:
        """What a token is charged a nat of its log-ratio to the reference: nothing."""
        return 0.0

    def token_rewards(self, rollouts: RolloutBatch) -> Tensor:
        """What each token is rewarded with, ``[B, T]``."""
        old = rollouts.sampler_logprobs if rollouts.old_logprobs is None else rollouts.old_logprobs
        assert old is not None
        mask = rollouts.loss_mask
        rewards = token_rewards(rollouts.rewards, mask, old, rollouts.ref_logprobs, self.kl_in_reward)
        return whiten(rewards, mask, shift=False) if self.whiten_rewards else rewards

    def advantages(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """Returns less values, ``[B, T]``, zero where a token does not count; no group is needed."""
        assert rollouts.values is not None
        assert rollouts.returns is not None
        advantages = (rollouts.returns - rollouts.values).masked_fill(~rollouts.loss_mask, 0.0)
        return whiten(advantages, rollouts.loss_mask) if self.whiten_advantages else advantages


def scalar_beside(module: PolicyModule, option: str, name: str | None, dropout: float = 0.0) -> ScalarModel:
    """A model with one number a token, beside a policy: placed on the ranks as that is.

    Args:
        module: Has the policy.
        option: Name of the option that says what it starts from.
        name: What it starts from; by default what the policy starts from.
        dropout: See :class:`~rlalign.models.scalar.ScalarModel`.

    Raises:
        ValueError: If it comes with another vocabulary than the policy's.
    """
    config = module.policy_config
    name, trust = name or config.model, config.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(locate_model(name), trust_remote_code=trust)
    if tokenizer.get_vocab() != module.tokenizer.get_vocab():
        raise ValueError(f"{option}={name} has another vocabulary than policy.model={config.model}.")
    model = ScalarModel(name, dropout, run_seed(module.trainer), trust)
    if module.device_mesh is not None:
        model.shard(module.device_mesh["data_parallel"])
    return model
