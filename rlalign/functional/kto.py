"""KTO: responses that are good or bad by themselves.

As in :mod:`rlalign.functional.preference_losses`, where ``valid`` is False nothing is read and the loss is 0, and the
caller divides by the responses that count in the whole optimizer step.
"""

import math

import torch
from torch import Tensor

from rlalign.functional.reductions import masked_mean
from rlalign.functional.rows import check_beta, rows_of


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    reference_point: float | Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    valid: Tensor | None = None,
) -> Tensor:
    r"""KTO: responses that are good or bad by themselves, not in pairs.

    .. math:: L = \lambda_D (1 - \sigma(\beta (r - z_0))) \text{ if desirable, else }
        \lambda_U (1 - \sigma(\beta (z_0 - r))), \quad r = \log\frac{\pi_\theta(y)}{\pi_{ref}(y)}

    Source: Ethayarajh et al. 2024 (https://arxiv.org/abs/2402.01306).

    Args:
        logprobs: Summed log-probabilities (nats) of the responses under the policy, ``[B]``.
        ref_logprobs: The same under the reference, ``[B]``; never differentiated.
        desirable: True where a response is good, ``[B]``.
        reference_point: :math:`z_0` in nats, a scalar, never differentiated: :func:`kto_reference_point` of the whole
            optimizer step.
        beta: How fast the value saturates, above 0.
        desirable_weight: Weight of the good responses, 0 or more.
        undesirable_weight: Weight of the bad ones, 0 or more.
        valid: False where a response does not count, ``[B]``; all count by default.

    Returns:
        The loss of each response, ``[B]``, 0 where not valid.

    Raises:
        ValueError: If shapes disagree or an option is out of bounds.
    """
    check_beta(beta)
    if not (0 <= desirable_weight < math.inf and 0 <= undesirable_weight < math.inf):
        raise ValueError(f"Weights must be 0 or more, got {desirable_weight} and {undesirable_weight}.")
    if isinstance(reference_point, Tensor):
        if reference_point.ndim:
            raise ValueError(f"Expected a scalar reference_point, got shape {list(reference_point.shape)}.")
        reference_point = reference_point.detach()
    if desirable.shape != logprobs.shape:
        raise ValueError(f"Expected desirable of shape {list(logprobs.shape)}, got {list(desirable.shape)}.")
    (logprobs, ref_logprobs), is_valid = rows_of(valid, logprobs, ref_logprobs)
    gain = beta * (logprobs - ref_logprobs.detach() - reference_point)
    desirable = desirable.bool()
    # 1 - sigmoid(x) is sigmoid(-x), which does not cancel where x is large.
    loss = torch.where(desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))
    return loss.masked_fill(~is_valid, 0)


@torch.no_grad()
def kto_reference_point(logprobs: Tensor, ref_logprobs: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""KTO's reference point, estimated on mismatched pairs: responses to other prompts of the step.

    .. math:: z_0 = \max\Big(0, \frac{1}{m} \sum_i \log\frac{\pi_\theta(y'_i|x_i)}{\pi_{ref}(y'_i|x_i)}\Big)

    The bound holds for the mean: points of minibatches or ranks must not be averaged, so give all pairs of the step.

    Source: Ethayarajh et al. 2024 (https://arxiv.org/abs/2402.01306).

    Args:
        logprobs: Summed log-probabilities (nats) under the policy of responses to prompts they do not belong to,
            ``[M]``; ``M`` may be 0.
        ref_logprobs: The same under the reference, ``[M]``.
        valid: False where a pair is not mismatched (no other prompt was there) or does not count, ``[M]``.

    Returns:
        The point in nats, a scalar without gradient, 0 or more; 0 if there is no mismatched pair.

    Raises:
        ValueError: If the shapes disagree.
    """
    (logprobs, ref_logprobs), is_valid = rows_of(valid, logprobs, ref_logprobs)
    return masked_mean(logprobs - ref_logprobs, is_valid).clamp(min=0)
