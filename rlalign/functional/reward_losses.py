"""The loss of a reward model, one number a pair.

As in :mod:`rlalign.functional.preference_losses`, where ``valid`` is False nothing is read and the loss is 0, and the
caller divides by the pairs that count in the whole optimizer step.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlalign.functional.rows import rows_of


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
    (chosen, rejected, margin), is_valid = rows_of(valid, chosen_scores, rejected_scores, margin)
    loss = -logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()
    return loss.masked_fill(~is_valid, 0)
