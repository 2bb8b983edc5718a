"""Terms for tokens that another policy sampled: an older one, or the one from before the iteration."""

import torch
from torch import Tensor

from rlalign.functional.policy_losses import truncated_importance_weights

MAX_LOG_RATIO = 20.0


def kl_from_old(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    r"""KL(policy || old) from tokens that the *old* policy sampled, with its true gradient on average.

    .. math:: r \log r - (r - 1), \quad r = \frac{\pi_\theta(y)}{\pi_{old}(y)}

    Under the old policy's tokens its mean is :math:`E_{old}[r \log r] = KL(\pi_\theta || \pi_{old})`, and its mean
    gradient :math:`E_{old}[r \log r\, \nabla \log \pi_\theta]` that of the KL, wherever the policy has gone. It is
    never negative. The weights make its variance large where the policy has gone far.

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy, any shape.
        old_logprobs: The same under the policy that sampled them, of the same shape; never differentiated.

    Returns:
        The estimate of each token (nats), of the shape of ``logprobs``; a token whose log-ratio is beyond plus or minus
        20 is counted as there, without gradient.

    Raises:
        ValueError: If the shapes disagree.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs)
    return log_ratio.exp() * log_ratio - torch.expm1(log_ratio)


def log_ratio_to_old(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    r"""The plain :math:`\log\pi_{old} - \log\pi_\theta` of tokens that the old policy sampled.

    Its mean is KL(old || policy), the other direction. Its mean gradient, :math:`-E_{old}[\nabla \log \pi_\theta]`, is
    exactly 0 where the policy is the old one: in a loss it holds nothing back in the first step after sampling (it only
    adds noise), and in later ones it pulls by the gradient of KL(old || policy).

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy, any shape.
        old_logprobs: The same under the policy that sampled them, of the same shape; never differentiated.

    Returns:
        The estimate of each token (nats), of either sign, of the shape of ``logprobs``, limited as
        :func:`kl_from_old`.

    Raises:
        ValueError: If the shapes disagree.
    """
    return -_log_ratio(logprobs, old_logprobs)


def truncated_importance_loss(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, cap: float = 1.0
) -> Tensor:
    r"""The policy gradient of tokens that an older policy sampled, each weighed by a truncated importance ratio.

    .. math:: L_t = -\mathrm{sg}\Big(\min\Big(\frac{\pi_\theta(y_t)}{\mu(y_t)}, c\Big)\Big) A_t \log \pi_\theta(y_t)

    where sg lets no gradient through and :math:`\mu` is the policy that sampled. Weights are of single tokens: the
    product of those before is left out, so the states are those of the older policy.

    Sources: the truncation: Espeholt et al. 2018, section 4 (V-trace, with :math:`\bar\rho = 1`,
    https://arxiv.org/abs/1802.01561).

    Args:
        logprobs: Log-probabilities (nats) under the current policy, ``[B, T]``.
        behaviour_logprobs: The same under the policy that sampled, ``[B, T]``; never differentiated.
        advantages: Per token ``[B, T]`` or per sequence ``[B, 1]``; never differentiated.
        mask: True where a token counts, ``[B, T]``.
        cap: The largest weight, above 0.

    Returns:
        The loss of each token, ``[B, T]``, zero outside the mask.

    Raises:
        ValueError: If the shapes disagree or the cap is not positive.
    """
    weights = truncated_importance_weights(logprobs.detach(), behaviour_logprobs, mask, cap)
    outside = ~mask.bool()
    advantages = advantages.detach().expand_as(logprobs).masked_fill(outside, 0)
    return -weights * advantages * logprobs.masked_fill(outside, 0)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    if logprobs.shape != old_logprobs.shape:
        shapes = f"{list(logprobs.shape)} and {list(old_logprobs.shape)}"
        raise ValueError(f"Expected log-probabilities of one shape, got {shapes}.")
    return (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
