"""Kullback-Leibler divergences and entropies, in nats.

Estimators of KL(policy || reference) from tokens that the policy sampled. Two questions are apart: what a value is on
average, and what its *gradient under autograd* is on average when the value stands in a loss. For a policy
softmax(0, 0) and a reference (.8, .2) the KL is .22314 and its gradient with respect to the logits [-.34657, .34657]:

==========  =======================  ==============================================================
estimator   mean value               mean gradient
==========  =======================  ==============================================================
``kl_k1``   KL(policy || reference)  0: as a loss it does nothing. For rewards and for logging.
``kl_k2``   not the KL; close near   [-.34657, .34657]: that of KL(policy || reference).
            it
``kl_k3``   KL(policy || reference)  [-.3, .3]: that of the other direction, KL(reference || policy)
==========  =======================  ==============================================================

Source: Schulman 2020 (http://joschu.net/blog/kl-approx.html).
"""

import torch
from torch import Tensor


def kl_k1(
    logprobs: Tensor, ref_logprobs: Tensor, max_log_ratio: float = 20.0, max_value: float | None = None
) -> Tensor:
    r"""The log-ratio: unbiased, of either sign. Its expected gradient is 0, so it is of no use in a loss.

    .. math:: k_1 = \log\pi_\theta - \log\pi_{ref}

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy, any shape.
        ref_logprobs: The same under the reference, of the same shape; never differentiated.
        max_log_ratio: The log-ratio is limited to plus and minus this; a token beyond it has no gradient.
        max_value: The result is limited to plus and minus this; not at all by default.

    Returns:
        The estimate of each token, of the shape of ``logprobs``.

    Raises:
        ValueError: If the shapes disagree or a limit is not positive.
    """
    return _limit(_clamped_log_ratio(logprobs, ref_logprobs, max_log_ratio), max_value)


def kl_k2(
    logprobs: Tensor, ref_logprobs: Tensor, max_log_ratio: float = 20.0, max_value: float | None = None
) -> Tensor:
    r"""Half the squared log-ratio: biased and never negative; its expected gradient is that of KL(policy || reference).

    .. math:: k_2 = \tfrac{1}{2} (\log\pi_\theta - \log\pi_{ref})^2

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy, any shape.
        ref_logprobs: The same under the reference, of the same shape; never differentiated.
        max_log_ratio: The log-ratio is limited to plus and minus this; a token beyond it has no gradient.
        max_value: The result is limited to this; not at all by default.

    Returns:
        The estimate of each token, of the shape of ``logprobs``.

    Raises:
        ValueError: If the shapes disagree or a limit is not positive.
    """
    return _limit(_clamped_log_ratio(logprobs, ref_logprobs, max_log_ratio).square() / 2, max_value)


def kl_k3(
    logprobs: Tensor, ref_logprobs: Tensor, max_log_ratio: float = 20.0, max_value: float | None = 10.0
) -> Tensor:
    r"""Unbiased and never negative; its expected gradient is that of the other direction, KL(reference || policy).

    .. math:: k_3 = e^{\delta} - 1 - \delta, \quad \delta = \log\pi_{ref} - \log\pi_\theta

    It explodes on a token that the policy drew against its odds: with log-probability -10, and -1 under the reference,
    it is 8093. The default limit is the one in common use; log the largest value with ``max_value=None`` to see what it
    hides.

    Source: Schulman 2020; in a loss, Shao et al. 2024, eq. 4 (https://arxiv.org/abs/2402.03300).

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy, any shape.
        ref_logprobs: The same under the reference, of the same shape; never differentiated.
        max_log_ratio: The log-ratio is limited to plus and minus this; a token beyond it has no gradient.
        max_value: The result is limited to this (nats); a token beyond it has no gradient. None for no limit.

    Returns:
        The estimate of each token, of the shape of ``logprobs``.

    Raises:
        ValueError: If the shapes disagree or a limit is not positive.
    """
    delta = -_clamped_log_ratio(logprobs, ref_logprobs, max_log_ratio)
    return _limit(torch.expm1(delta) - delta, max_value)


def kl_exact(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""KL(policy || reference) over the whole vocabulary, with its true gradient.

    .. math:: \sum_v \pi(v) (\log\pi(v) - \log\pi_{ref}(v)), \quad \pi = \mathrm{softmax}(z / \tau)

    Args:
        logits: Of the policy, ``[..., V]``; raised to float32 if below it.
        ref_logits: Of the reference, ``[..., V]``; never differentiated.
        temperature: Divides both logits, above 0.

    Returns:
        The divergence in nats, ``[...]``; infinite where the reference excludes what the policy allows.

    Raises:
        ValueError: If the shapes disagree or the temperature is not positive.
    """
    if logits.shape != ref_logits.shape:
        raise ValueError(f"Expected logits of one shape, got {list(logits.shape)} and {list(ref_logits.shape)}.")
    logp, ref_logp = _log_softmax(logits, temperature), _log_softmax(ref_logits.detach(), temperature)
    impossible = logp == -torch.inf
    return (logp.exp() * (logp - ref_logp).masked_fill(impossible, 0)).sum(-1)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Entropy of the policy over the whole vocabulary.

    .. math:: H = -\sum_v \pi(v) \log\pi(v), \quad \pi = \mathrm{softmax}(z / \tau)

    Args:
        logits: Of the policy, ``[..., V]``; raised to float32 if below it. Minus infinity excludes a token.
        temperature: Divides the logits, above 0.

    Returns:
        The entropy in nats, ``[...]``.

    Raises:
        ValueError: If the temperature is not positive.
    """
    logp = _log_softmax(logits, temperature)
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits / temperature).log_softmax(-1)


def _clamped_log_ratio(logprobs: Tensor, ref_logprobs: Tensor, max_log_ratio: float) -> Tensor:
    if logprobs.shape != ref_logprobs.shape:
        shapes = f"{list(logprobs.shape)} and {list(ref_logprobs.shape)}"
        raise ValueError(f"Expected log-probabilities of one shape, got {shapes}.")
    if not max_log_ratio > 0:
        raise ValueError(f"max_log_ratio must be positive, got {max_log_ratio}.")
    return (logprobs - ref_logprobs.detach()).clamp(-max_log_ratio, max_log_ratio)


def _limit(value: Tensor, max_value: float | None) -> Tensor:
    if max_value is None:
        return value
    if not max_value > 0:
        raise ValueError(f"max_value must be positive or None, got {max_value}.")
    return value.clamp(-max_value, max_value)
