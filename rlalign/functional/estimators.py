"""What several answers to one problem say about the policy."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def pass_at_k(n: int, c: int, k: int) -> float:
    r"""Unbiased estimate of the chance that at least one of ``k`` answers is right.

    .. math:: 1 - \binom{n - c}{k} \Big/ \binom{n}{k} = 1 - \prod_{j=0}^{k-1} \Big(1 - \frac{c}{n - j}\Big)

    Source: Chen et al. 2021, eq. 1 (https://arxiv.org/abs/2107.03374).

    Args:
        n: Answers sampled.
        c: Those that are right.
        k: Answers allowed, ``1 <= k <= n``.

    Returns:
        The estimate, in ``[0, 1]``.

    Raises:
        ValueError: If ``0 <= c <= n`` or ``1 <= k <= n`` does not hold.
    """
    return pass_at_k_each(torch.tensor([n]), torch.tensor([c]), k).item()


def pass_at_k_each(n: Tensor, c: Tensor, k: int) -> Tensor:
    """:func:`pass_at_k` of many problems.

    Args:
        n: Answers sampled for each problem, integers, any shape.
        c: Those that are right, of the same shape.
        k: Answers allowed, at least 1 and at most every ``n``.

    Returns:
        The estimates, float64, of the shape of ``n``.

    Raises:
        ValueError: If the shapes disagree, or ``0 <= c <= n`` or ``1 <= k <= n`` does not hold.
    """
    if n.shape != c.shape:
        raise ValueError(f"Expected n and c of one shape, got {list(n.shape)} and {list(c.shape)}.")
    if ((c < 0) | (c > n)).any():
        raise ValueError("There must be between 0 and n right answers among n.")
    if k < 1 or (n < k).any():
        raise ValueError(f"pass@{k} needs k >= 1 and at least {k} answers to each problem; sample more or lower k.")
    drawn_before = torch.arange(k, device=n.device)
    right_share = c.double().unsqueeze(-1) / (n.unsqueeze(-1) - drawn_before)
    # With too few wrong answers for k draws one factor is exactly 0, whatever follows it.
    return 1 - (1 - right_share).prod(-1)


def majority_correct(answers: Sequence[Hashable], correct: Sequence[bool], k: int | None = None) -> float:
    """How often the commonest of ``k`` answers is right, a tie counting as the share of its answers that are right.

    Source: Wang et al. 2023 (self-consistency, https://arxiv.org/abs/2203.11171).

    Args:
        answers: The answers to one problem as they are compared with each other; None is no answer and has no vote.
        correct: Whether each is right. Where equal answers are judged differently, they count by their mean.
        k: Votes of one ballot, a divisor of the number of answers; one ballot of all of them by default. The ballots
            are consecutive and share no answer, so that their mean is unbiased for ``k`` fresh answers.

    Returns:
        The mean over the ballots, in ``[0, 1]``; a ballot without any answer counts 0.

    Raises:
        ValueError: If there are no answers, their number differs from that of ``correct``, or ``k`` does not divide it.
    """
    if not answers or len(answers) != len(correct):
        raise ValueError(f"Expected one verdict for each of at least one answer, got {len(answers)}, {len(correct)}.")
    k = len(answers) if k is None else k
    if k < 1 or len(answers) % k:
        raise ValueError(f"majority@{k}: k must divide the {len(answers)} answers.")
    ballots = range(0, len(answers), k)
    return sum(_ballot(answers[i : i + k], correct[i : i + k]) for i in ballots) / len(ballots)


def _ballot(answers: Sequence[Hashable], correct: Sequence[bool]) -> float:
    votes: dict[Hashable, list[bool]] = {}
    for answer, is_right in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(bool(is_right))
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    winners = [sum(verdicts) / most for verdicts in votes.values() if len(verdicts) == most]
    return sum(winners) / len(winners)
