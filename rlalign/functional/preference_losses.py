"""Losses on preferences, one number a pair or a labelled response, from log-probabilities of whole responses.

``valid`` is False where a pair does not count: its values, NaN included, are never read, its loss and its gradient are
0. The caller divides by the number of pairs that count in the whole optimizer step. Dtypes below float32 are raised to
it.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlalign.functional.reductions import masked_mean, masked_sum


def sequence_logprobs(logprobs: Tensor, mask: Tensor, reduction: Literal["sum", "mean"] = "sum") -> Tensor:
    r"""Log-probabilities of responses from those of their tokens.

    .. math:: \log\pi(y) = \sum_t m_t \log\pi(y_t) \quad \text{or} \quad \frac{1}{|y|} \sum_t m_t \log\pi(y_t)

    The mean divides by the tokens inside the mask, never by the padded width.

    Args:
        logprobs: Log-probabilities (nats) of the tokens, ``[B, T]``; never read outside the mask.
        mask: True where a token belongs to the response, ``[B, T]``.
        reduction: ``"sum"`` for the losses with a reference, ``"mean"`` for :func:`simpo_loss`, :func:`orpo_loss` and
            the averaged variant of :func:`ipo_loss`.

    Returns:
        Nats per response or per token, ``[B]``, float32 or wider; 0 where the mask is empty: mark such a pair as not
        valid.

    Raises:
        ValueError: If the shapes disagree or the reduction is unknown.
    """
    if logprobs.ndim != 2 or logprobs.shape != mask.shape:
        shapes = f"{list(logprobs.shape)} and {list(mask.shape)}"
        raise ValueError(f"Expected log-probabilities and mask of one shape [B, T], got {shapes}.")
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be 'sum' or 'mean', got {reduction!r}.")
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    return (masked_sum if reduction == "sum" else masked_mean)(logprobs, mask, dim=1)


def preference_margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    r"""How much more the policy prefers one response to another than the reference does.

    .. math:: h = \log\frac{\pi_\theta(y_w)}{\pi_{ref}(y_w)} - \log\frac{\pi_\theta(y_l)}{\pi_{ref}(y_l)}

    Args:
        chosen: Log-probabilities (nats) of the preferred responses under the policy, ``[B]``; sums over their tokens,
            or means for the averaged variant of :func:`ipo_loss`.
        rejected: Those of the others, ``[B]``.
        ref_chosen: As ``chosen``, under the reference, ``[B]``; never differentiated.
        ref_rejected: As ``rejected``, under the reference, ``[B]``; never differentiated.

    Returns:
        Margins in nats, ``[B]``; 0 as long as the policy is the reference.

    Raises:
        ValueError: If the shapes disagree.
    """
    rows, _ = _rows(None, chosen, rejected, ref_chosen.detach(), ref_rejected.detach())
    chosen, rejected, ref_chosen, ref_rejected = rows
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def dpo_loss(margin: Tensor, beta: float = 0.1, label_smoothing: float = 0.0, valid: Tensor | None = None) -> Tensor:
    r"""DPO, and conservative DPO where labels are smoothed.

    .. math:: L = -(1 - \epsilon) \log\sigma(\beta h) - \epsilon \log\sigma(-\beta h)

    It is :math:`\ln 2` as long as the policy is the reference.

    Sources: Rafailov et al. 2023, eq. 7 (https://arxiv.org/abs/2305.18290); smoothing: Mitchell 2023, "A note on DPO
    with noisy preferences" (cDPO, https://ericmitchell.ai/cdpo.pdf).

    Args:
        margin: :func:`preference_margin` of sums, ``[B]``.
        beta: Strength of the pull to the reference, above 0.
        label_smoothing: The share of labels taken to be the wrong way round, ``0 <= label_smoothing < 0.5``.
        valid: False where a pair does not count, ``[B]``; all count by default.

    Returns:
        The loss of each pair, ``[B]``, 0 where not valid.

    Raises:
        ValueError: If shapes disagree or an option is out of bounds.
    """
    _check_beta(beta)
    _check_smoothing(label_smoothing)
    (margin,), is_valid = _rows(valid, margin)
    loss = -(1 - label_smoothing) * logsigmoid(beta * margin) - label_smoothing * logsigmoid(-beta * margin)
    return loss.masked_fill(~is_valid, 0)


def robust_dpo_loss(
    margin: Tensor, beta: float = 0.1, label_smoothing: float = 0.0, valid: Tensor | None = None
) -> Tensor:
    r"""Robust DPO: its mean over randomly flipped labels is the loss of :func:`dpo_loss` on the true ones.

    .. math:: L = \frac{-(1 - \epsilon) \log\sigma(\beta h) + \epsilon \log\sigma(-\beta h)}{1 - 2 \epsilon}

    It can be negative, and has no lower bound.

    Source: Chowdhury et al. 2024 (rDPO, https://arxiv.org/abs/2403.00409).

    Args:
        margin: As for :func:`dpo_loss`, like the others.
        beta: Likewise.
        label_smoothing: The rate at which labels are flipped, ``0 <= label_smoothing < 0.5``.
        valid: As for :func:`dpo_loss`.

    Returns:
        The loss of each pair, ``[B]``, 0 where not valid.

    Raises:
        ValueError: As :func:`dpo_loss`.
    """
    _check_beta(beta)
    _check_smoothing(label_smoothing)
    (margin,), is_valid = _rows(valid, margin)
    loss = -(1 - label_smoothing) * logsigmoid(beta * margin) + label_smoothing * logsigmoid(-beta * margin)
    return (loss / (1 - 2 * label_smoothing)).masked_fill(~is_valid, 0)


def hinge_loss(margin: Tensor, beta: float = 0.1, valid: Tensor | None = None) -> Tensor:
    r"""Hinge of the margin of DPO; no gradient once :math:`\beta h > 1`.

    .. math:: L = \max(0, 1 - \beta h)

    Sources: Zhao et al. 2023 (SLiC-HF, https://arxiv.org/abs/2305.10425), whose margin has no reference; with one,
    Liu et al. 2023 (RSO, "hinge-norm", https://arxiv.org/abs/2309.06657).

    Args:
        margin: As for :func:`dpo_loss`, like the others.
        beta: One over the margin asked for, above 0.
        valid: As for :func:`dpo_loss`.

    Returns:
        The loss of each pair, ``[B]``, 0 where not valid.

    Raises:
        ValueError: As :func:`dpo_loss`.
    """
    _check_beta(beta)
    (margin,), is_valid = _rows(valid, margin)
    return torch.relu(1 - beta * margin).masked_fill(~is_valid, 0)


def ipo_loss(margin: Tensor, beta: float = 0.1, valid: Tensor | None = None) -> Tensor:
    r"""IPO: the margin is drawn to one number, from either side.

    .. math:: L = \Big(h - \frac{1}{2 \beta}\Big)^2

    The paper's :math:`h` is of whole responses, hence of sums over tokens. The margin of means (policy and reference
    alike) makes the length-averaged variant, whose target is in nats per token: its ``beta`` means something else.

    Source: Azar et al. 2023, eq. 17 (https://arxiv.org/abs/2310.12036), with ``beta`` for its tau.

    Args:
        margin: :func:`preference_margin` of sums, or of means, ``[B]``.
        beta: Half of one over the margin asked for, above 0.
        valid: As for :func:`dpo_loss`.

    Returns:
        The loss of each pair, ``[B]``, 0 where not valid.

    Raises:
        ValueError: As :func:`dpo_loss`.
    """
    _check_beta(beta)
    (margin,), is_valid = _rows(valid, margin)
    return (margin - 1 / (2 * beta)).square().masked_fill(~is_valid, 0)


def simpo_loss(
    chosen: Tensor, rejected: Tensor, beta: float = 2.0, gamma: float = 1.0, valid: Tensor | None = None
) -> Tensor:
    r"""SimPO: mean log-probabilities, a target margin and no reference.

    .. math:: L = -\log\sigma\Big(\frac{\beta}{|y_w|} \log\pi_\theta(y_w)
        - \frac{\beta}{|y_l|} \log\pi_\theta(y_l) - \gamma\Big)

    Source: Meng et al. 2024, eq. 6 (https://arxiv.org/abs/2405.14734).

    Args:
        chosen: Mean log-probabilities (nats per token) of the preferred responses under the policy, ``[B]``.
        rejected: Those of the others, ``[B]``.
        beta: Scale of the difference, above 0.
        gamma: Target margin, after the scale, 0 or more; the authors start from half of ``beta``.
        valid: False where a pair does not count, ``[B]``; all count by default.

    Returns:
        The loss of each pair, ``[B]``, 0 where not valid.

    Raises:
        ValueError: If shapes disagree or an option is out of bounds.
    """
    _check_beta(beta)
    if not 0 <= gamma < math.inf:
        raise ValueError(f"gamma must be 0 or more, got {gamma}.")
    (chosen, rejected), is_valid = _rows(valid, chosen, rejected)
    return -logsigmoid(beta * (chosen - rejected) - gamma).masked_fill(~is_valid, 0)


def orpo_loss(chosen: Tensor, rejected: Tensor, weight: float = 0.1, valid: Tensor | None = None) -> Tensor:
    r"""ORPO: likelihood of the preferred response and a term on the odds ratio; no reference.

    .. math:: L = -\log P(y_w) - \lambda \log\sigma\Big(\log\frac{\mathrm{odds}(y_w)}{\mathrm{odds}(y_l)}\Big),
        \quad \log P(y) = \frac{1}{|y|} \sum_t \log\pi_\theta(y_t)

    Source: Hong et al. 2024, eq. 6 and 7 (https://arxiv.org/abs/2403.07691).

    Args:
        chosen: Mean log-probabilities (nats per token) of the preferred responses under the policy, ``[B]``.
        rejected: Those of the others, ``[B]``.
        weight: Of the odds ratio term, the paper's lambda, 0 or more.
        valid: False where a pair does not count, ``[B]``; all count by default.

    Returns:
        The loss of each pair, ``[B]``, 0 where not valid.

    Raises:
        ValueError: If shapes disagree or the weight is negative.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be 0 or more, got {weight}.")
    (chosen, rejected), is_valid = _rows(valid, chosen, rejected)
    return (-chosen - weight * logsigmoid(log_odds_ratio(chosen, rejected))).masked_fill(~is_valid, 0)


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    r"""How much better the odds of one response are than those of another, in nats.

    .. math:: \log\frac{P_w}{1 - P_w} - \log\frac{P_l}{1 - P_l}

    A probability that rounds to 1 has infinite odds. A log-probability is no more exact than the rounding step at 1 of
    its dtype (1.2e-7 in float32), so that :math:`1 - P` is taken to be at least that: value and gradient stay finite.

    Source: Hong et al. 2024, eq. 4 (https://arxiv.org/abs/2403.07691).

    Args:
        chosen: Mean log-probabilities (nats per token) of the preferred responses, ``[B]``.
        rejected: Those of the others, ``[B]``.

    Returns:
        Log-ratios, ``[B]``.

    Raises:
        ValueError: If the shapes disagree.
    """
    (chosen, rejected), _ = _rows(None, chosen, rejected)
    highest = -torch.finfo(chosen.dtype).eps
    return (chosen - rejected) - (log1mexp(chosen.clamp(max=highest)) - log1mexp(rejected.clamp(max=highest)))


def log1mexp(x: Tensor) -> Tensor:
    r"""The logarithm of :math:`1 - e^x` for :math:`x < 0`, exact at both ends, with exact gradients.

    Source: Mächler 2012, "Accurately Computing log(1 - exp(-|a|))"
    (https://cran.r-project.org/web/packages/Rmpfr/vignettes/log1mexp-note.pdf).

    Args:
        x: Numbers below 0, of any shape.

    Returns:
        Of the shape of ``x``; minus infinity at 0 and NaN above.
    """
    is_near_zero = x > -math.log(2)
    near = torch.log(-torch.expm1(x))
    # Near 0 this branch has an infinite gradient, which times zero would be NaN: it never sees such an x.
    far = torch.log1p(-torch.exp(x.masked_fill(is_near_zero, -1.0)))
    return torch.where(is_near_zero, near, far)


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
    _check_beta(beta)
    if not (0 <= desirable_weight < math.inf and 0 <= undesirable_weight < math.inf):
        raise ValueError(f"Weights must be 0 or more, got {desirable_weight} and {undesirable_weight}.")
    if isinstance(reference_point, Tensor):
        if reference_point.ndim:
            raise ValueError(f"Expected a scalar reference_point, got shape {list(reference_point.shape)}.")
        reference_point = reference_point.detach()
    if desirable.shape != logprobs.shape:
        raise ValueError(f"Expected desirable of shape {list(logprobs.shape)}, got {list(desirable.shape)}.")
    (logprobs, ref_logprobs), is_valid = _rows(valid, logprobs, ref_logprobs)
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
    (logprobs, ref_logprobs), is_valid = _rows(valid, logprobs, ref_logprobs)
    return masked_mean(logprobs - ref_logprobs, is_valid).clamp(min=0)


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margin: Tensor | None = None,
    centering: float = 0.0,
    valid: Tensor | None = None,
) -> Tensor:
    r"""Loss of a reward model that is to score one response above the other.

    .. math:: L = -\log\sigma(s_w - s_l - m) + c (s_w + s_l)^2

    Scores are determined but for a constant, which the second term sets: they get mean zero.

    Sources: Ouyang et al. 2022, eq. 1 (https://arxiv.org/abs/2203.02155); margin: Touvron et al. 2023, eq. 2 (Llama 2,
    https://arxiv.org/abs/2307.09288); centring: Eisenstein et al. 2023, eq. 2 (https://arxiv.org/abs/2312.09244).

    Args:
        chosen_scores: Scores of the preferred responses, ``[B]``.
        rejected_scores: Scores of the others, ``[B]``.
        margin: How much better each preferred response is said to be, ``[B]``, never differentiated; 0 by default.
        centering: Coefficient :math:`c`, 0 or more; 0.01 is usual.
        valid: False where a pair does not count, ``[B]``; all count by default.

    Returns:
        The loss of each pair, ``[B]``, 0 where not valid.

    Raises:
        ValueError: If shapes disagree or the coefficient is negative.
    """
    if not 0 <= centering < math.inf:
        raise ValueError(f"centering must be 0 or more, got {centering}.")
    margin = torch.zeros_like(chosen_scores) if margin is None else margin.detach()
    (chosen, rejected, margin), is_valid = _rows(valid, chosen_scores, rejected_scores, margin)
    loss = -logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()
    return loss.masked_fill(~is_valid, 0)


@torch.no_grad()
def implicit_rewards(logprobs: Tensor, ref_logprobs: Tensor, beta: float = 0.1) -> Tensor:
    r"""The rewards that a policy trained by DPO stands for, up to a number that depends on the prompt alone.

    .. math:: r = \beta \log\frac{\pi_\theta(y)}{\pi_{ref}(y)}

    Source: Rafailov et al. 2023, eq. 5 (https://arxiv.org/abs/2305.18290).

    Args:
        logprobs: Summed log-probabilities (nats) of responses under the policy, ``[B]``.
        ref_logprobs: The same under the reference, ``[B]``.
        beta: That of the loss, above 0.

    Returns:
        Rewards, ``[B]``, without gradient.

    Raises:
        ValueError: If the shapes disagree or ``beta`` is not positive.
    """
    _check_beta(beta)
    (logprobs, ref_logprobs), _ = _rows(None, logprobs, ref_logprobs)
    return beta * (logprobs - ref_logprobs)


@torch.no_grad()
def preference_margins(
    chosen_rewards: Tensor, rejected_rewards: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """By how much the preferred response has the higher reward, and whether it has; average over the valid pairs.

    Args:
        chosen_rewards: Rewards (:func:`implicit_rewards`) or scores of the preferred responses, ``[B]``.
        rejected_rewards: Those of the others, ``[B]``.
        valid: False where a pair does not count, ``[B]``; all count by default.

    Returns:
        Differences, 0 where not valid, and True where they are above 0 (a tie is no success: the accuracy of a policy
        that is its own reference is 0), each ``[B]``, without gradient.

    Raises:
        ValueError: If the shapes disagree.
    """
    (chosen, rejected), _ = _rows(valid, chosen_rewards, rejected_rewards)
    margins = chosen - rejected
    return margins, margins > 0


def _rows(valid: Tensor | None, *values: Tensor) -> tuple[list[Tensor], Tensor]:
    """The values, float32 or wider and 0 where not valid, and validity, each ``[B]``."""
    shapes = [list(tensor.shape) for tensor in (*values, *([] if valid is None else [valid]))]
    if len(shapes[0]) != 1 or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"Expected one number per pair or response, all of one shape [B], got {shapes}.")
    is_valid = torch.ones_like(values[0], dtype=torch.bool) if valid is None else valid.bool()
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in values]
    return [tensor.masked_fill(~is_valid, 0) for tensor in wide], is_valid


def _check_beta(beta: float) -> None:
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be positive, got {beta}.")


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}.")
