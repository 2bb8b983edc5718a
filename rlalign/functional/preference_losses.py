"""Losses on preferences, one number a pair, from log-probabilities of whole responses.

``valid`` is False where a pair does not count: its values, NaN included, are never read, its loss and its gradient are
0. The caller divides by the number of pairs that count in the whole optimizer step. Dtypes below float32 are raised to
it.
"""

import difflib
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlalign.functional.odds import log_odds_ratio
from rlalign.functional.reductions import masked_mean, masked_sum
from rlalign.functional.rows import check_beta, rows_of


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
    rows, _ = rows_of(None, chosen, rejected, ref_chosen.detach(), ref_rejected.detach())
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
    check_beta(beta)
    _check_smoothing(label_smoothing)
    (margin,), is_valid = rows_of(valid, margin)
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
    check_beta(beta)
    _check_smoothing(label_smoothing)
    (margin,), is_valid = rows_of(valid, margin)
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
    check_beta(beta)
    (margin,), is_valid = rows_of(valid, margin)
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
    check_beta(beta)
    (margin,), is_valid = rows_of(valid, margin)
    return (margin - 1 / (2 * beta)).square().masked_fill(~is_valid, 0)


PAIR_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": dpo_loss,
    "hinge": hinge_loss,
    "ipo": ipo_loss,
    "robust": robust_dpo_loss,
}
"""Losses of a :func:`preference_margin` by the names that configurations use."""


def choose_pair_loss(name: str, beta: float = 0.1, label_smoothing: float = 0.0) -> Callable[..., Tensor]:
    """A loss of :data:`PAIR_LOSSES` with its options.

    Args:
        name: ``sigmoid``, ``hinge``, ``ipo`` or ``robust``.
        beta: See the loss.
        label_smoothing: Likewise.

    Returns:
        ``loss(margin, valid=None)``, one number a pair.

    Raises:
        ValueError: If there is no such loss, it ignores the smoothing that is asked for, or an option is out of bounds.
    """
    if name not in PAIR_LOSSES:
        near = difflib.get_close_matches(name, PAIR_LOSSES, n=1, cutoff=0.0)[0]
        raise ValueError(f"There is no loss '{name}' (did you mean '{near}'?); there are {', '.join(PAIR_LOSSES)}.")
    chosen, options = PAIR_LOSSES[name], {"beta": beta}
    if "label_smoothing" in inspect.signature(chosen).parameters:
        options["label_smoothing"] = label_smoothing
    elif label_smoothing:
        raise ValueError(f"loss={name} knows no label_smoothing; leave it out, or use loss=sigmoid or loss=robust.")
    chosen(torch.zeros(1), **options)  # an option out of bounds is told now
    return partial(chosen, **options)


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
    check_beta(beta)
    if not 0 <= gamma < math.inf:
        raise ValueError(f"gamma must be 0 or more, got {gamma}.")
    (chosen, rejected), is_valid = rows_of(valid, chosen, rejected)
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
    (chosen, rejected), is_valid = rows_of(valid, chosen, rejected)
    return (-chosen - weight * logsigmoid(log_odds_ratio(chosen, rejected))).masked_fill(~is_valid, 0)


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
    check_beta(beta)
    (logprobs, ref_logprobs), _ = rows_of(None, logprobs, ref_logprobs)
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
    (chosen, rejected), _ = rows_of(valid, chosen_rewards, rejected_rewards)
    margins = chosen - rejected
    return margins, margins > 0


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}.")
