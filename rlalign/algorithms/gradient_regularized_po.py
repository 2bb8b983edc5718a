"""Gradient regularized policy optimization: the plain policy gradient with a KL to the old policy."""

from typing import Any, ClassVar, Literal

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from rlalign.algorithms.actor_critic import ActorCritic
from rlalign.functional.controllers import multiplicative_kl_coef
from rlalign.rollouts.batch import RolloutBatch

FEWEST_SAMPLES = 512


class GradientRegularizedPO(ActorCritic):
    r"""What an article calls GRPO, "gradient regularized policy optimization"; not the GRPO of DeepSeekMath.

    .. math:: L = -E[\log\pi_\theta(a|s) A] + \beta\, KL[\pi_\theta || \pi_{old}]

    Nothing is clipped: the KL to the policy that sampled is all that holds an update back. After each iteration
    :math:`\beta` is multiplied by ``kl_down`` if the KL of the iteration (``train/kl_step``, KL(old || new) by k3) is
    below ``kl_threshold``, else by ``kl_up``. Advantages are those of a value function.

    The tokens are the old policy's. By default (``from_old``) the KL is estimated by :math:`r \log r - (r - 1)` with
    :math:`r = \pi_\theta / \pi_{old}`, whose mean and mean gradient are those of :math:`KL[\pi_\theta || \pi_{old}]`.
    The article's code takes the mean of :math:`\log\pi_{old} - \log\pi_\theta` (``log_ratio``): at the old policy its
    mean gradient is 0, so that it holds nothing back in the first step of an iteration, and later it is that of the
    other direction, :math:`KL[\pi_{old} || \pi_\theta]`. Where an iteration is one step, no estimator has a mean
    gradient: let it be several.

    Args:
        gamma: Discount per token; the article's range is 0.9 to 0.95.
        kl_coef: The first :math:`\beta`; ``train/kl_coef`` is the one in force.
        kl_threshold: The KL at which the rule turns (nats a token).
        kl_down: Factor below it.
        kl_up: Factor from it on.
        kl_estimator: See above.
        kwargs: See :class:`~rlalign.algorithms.actor_critic.ActorCritic`.

    Raises:
        ValueError: If a number is out of bounds.
    """

    adapted: ClassVar[tuple[str, ...]] = ("kl_coef",)

    def __init__(
        self,
        gamma: float = 0.95,
        kl_coef: float = 0.05,
        kl_threshold: float = 0.02,
        kl_down: float = 0.99,
        kl_up: float = 1.01,
        kl_estimator: Literal["from_old", "log_ratio"] = "from_old",
        **kwargs: Any,
    ) -> None:
        super().__init__(gamma=gamma, kl_coef=kl_coef, kl_to="old", kl_in="loss", kl_estimator=kl_estimator, **kwargs)
        self.kl_rule = (kl_threshold, kl_down, kl_up)
        self.adapt(0.0)  # numbers out of bounds are told now
        self.kl_coef = kl_coef

    def on_fit_start(self) -> None:
        """Warn of steps that are too small for the KL to be measured and held."""
        super().on_fit_start()
        if self.data.step_size < FEWEST_SAMPLES:
            rank_zero_warn(
                f"data.step_size={self.data.step_size} is fewer than {FEWEST_SAMPLES} samples an optimizer step: the "
                "KL term, which alone holds the update back, may fail to."
            )

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """As ever, and log the weight of the KL in force."""
        rollouts = super().annotate(rollouts, num_steps, minibatch_size)
        rollouts.statistics["train/kl_coef"] = self.kl_coef
        return rollouts

    def adapt(self, kl: float) -> None:
        """Move the weight of the KL."""
        self.kl_coef = multiplicative_kl_coef(self.kl_coef, kl, *self.kl_rule)

    def policy_loss(
        self, batch: RolloutBatch, logprobs: Tensor, old_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy gradient's loss, without any ratio."""
        assert batch.advantages is not None
        return -logprobs * batch.advantages, {}
