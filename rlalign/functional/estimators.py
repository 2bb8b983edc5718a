"""What several answers to one problem say about the policy."""

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
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


def best_of_n_correct(scores: Sequence[float | None], correct: Sequence[bool], n: int | None = None) -> float:
    r"""How often the best-scored of ``n`` answers is right, exactly: the mean over all subsets of ``n`` of those given.

    With the answers in groups of equal score, ``N_s`` of them scored at most ``s``, and ``c_s`` the share of those
    scored exactly ``s`` that are right:

    .. math:: \sum_s c_s \Big[\binom{N_s}{n} - \binom{N_{s-}}{n}\Big] \Big/ \binom{N}{n}

    Sources: best-of-n by a verifier, Cobbe et al. 2021 (https://arxiv.org/abs/2110.14168); its estimate from more than
    ``n`` samples, Nakano et al. 2021 (https://arxiv.org/abs/2112.09332).

    Args:
        scores: Of each answer, higher is better, ``[N]``. ``None``, NaN and ``-inf`` stand for answers that could not
            be scored: one is only picked where none of the ``n`` was.
        correct: Whether each answer is right, ``[N]``.
        n: Answers to choose from, ``1 <= n <= N``; all of them by default.

    Returns:
        The expected share of right picks, in ``[0, 1]``; of answers that tie for the best each is picked equally often.

    Raises:
        ValueError: If there are no answers, their number differs from that of ``correct``, or ``n`` is out of range.
    """
    n = _size("best@", scores, correct, n)
    verdicts: dict[float, list[bool]] = {}
    for score, is_right in zip(scores, correct, strict=True):
        key = -math.inf if score is None or math.isnan(score) else float(score)
        verdicts.setdefault(key, []).append(bool(is_right))
    expected, below = Fraction(0), 0
    for score in sorted(verdicts):
        group = verdicts[score]
        chosen = math.comb(below + len(group), n) - math.comb(below, n)
        expected += Fraction(chosen * sum(group), len(group))
        below += len(group)
    return float(expected / math.comb(len(correct), n))


def majority_correct(answers: Sequence[Hashable], correct: Sequence[bool], n: int | None = None) -> float:
    r"""How often the commonest of ``n`` answers is right, exactly: the mean over all subsets of ``n`` of those given.

    A tie counts as the mean of the answers that tie. Where equal answers are judged differently, they count by their
    mean. A subset is drawn as one where every answer takes part with probability ``n / N``, given that ``n`` do: then
    the answers' votes are independent, and their numbers follow from one product of polynomials for each number of
    votes that can win.

    Source of the vote: Wang et al. 2023 (self-consistency, https://arxiv.org/abs/2203.11171).

    Args:
        answers: The answers to one problem as they are compared with each other, ``[N]``; None is no answer and has no
            vote.
        correct: Whether each is right, ``[N]``.
        n: Answers that vote, ``1 <= n <= N``; all of them by default.

    Returns:
        The expected share of right winners, in ``[0, 1]``; a vote without any answer counts 0.

    Raises:
        ValueError: If there are no answers, their number differs from that of ``correct``, or ``n`` is out of range.
    """
    n = _size("majority@", answers, correct, n)
    verdicts: dict[Hashable, list[bool]] = {}
    for answer, is_right in zip(answers, correct, strict=True):
        if answer is not None:
            verdicts.setdefault(answer, []).append(bool(is_right))
    shares = {answer: sum(group) / len(group) for answer, group in verdicts.items()}
    if not verdicts:
        return 0.0
    if n == len(answers):
        most = max(map(len, verdicts.values()))
        winners = [shares[answer] for answer, group in verdicts.items() if len(group) == most]
        return sum(winners) / len(winners)
    silent = len(answers) - sum(map(len, verdicts.values()))
    counts = [(len(group), shares[answer]) for answer, group in verdicts.items()]
    most = min(n, max(size for size, _ in counts))
    won = math.fsum(_won_with(votes, counts, silent, n, n / len(answers)) for votes in range(1, most + 1))
    return min(won / _binomial(len(answers), n / len(answers))[n], 1.0)


def _size(what: str, answers: Sequence[Any], correct: Sequence[bool], n: int | None) -> int:
    if not answers or len(answers) != len(correct):
        raise ValueError(f"Expected one verdict for each of at least one answer, got {len(answers)}, {len(correct)}.")
    n = len(answers) if n is None else n
    if not 1 <= n <= len(answers):
        raise ValueError(f"{what}{n} needs at least 1 and at most the {len(answers)} answers that there are.")
    return n


def _won_with(votes: int, counts: Sequence[tuple[int, float]], silent: int, n: int, share: float) -> float:
    """Chance that ``n`` answers take part and the most votes of any are so many, times the winners' share of right.

    Args:
        votes: Of the winner.
        counts: Of each answer, how often it was given and how often that is right.
        silent: Answers without a vote.
        n: Answers that take part.
        share: Chance of each to take part.
    """
    ties = n // votes
    # By number of winners and of answers that take part: the chance, and that times the winners' summed shares.
    chance, right = np.zeros((ties + 1, n + 1)), np.zeros((ties + 1, n + 1))
    chance[0, : min(silent, n) + 1] = _binomial(silent, share)[: n + 1]
    for size, right_share in counts:
        of_size = _binomial(size, share)
        new_chance, new_right = np.zeros_like(chance), np.zeros_like(right)
        for taken in range(min(size, votes - 1, n) + 1):
            new_chance[:, taken:] += of_size[taken] * chance[:, : n + 1 - taken]
            new_right[:, taken:] += of_size[taken] * right[:, : n + 1 - taken]
        if size >= votes:
            before = chance[:-1, : n + 1 - votes]
            new_chance[1:, votes:] += of_size[votes] * before
            new_right[1:, votes:] += of_size[votes] * (right[:-1, : n + 1 - votes] + right_share * before)
        chance, right = new_chance, new_right
    return float((right[1:, n] / np.arange(1, ties + 1)).sum())


@lru_cache(maxsize=4096)
def _binomial(size: int, share: float) -> np.ndarray:
    """Chance that 0, 1, ..., ``size`` of so many take part, ``[size + 1]``."""
    log_factorial = [math.lgamma(i + 1) for i in range(size + 1)]
    return np.array(
        [
            math.exp(
                log_factorial[size]
                - log_factorial[i]
                - log_factorial[size - i]
                + i * math.log(share)
                + (size - i) * math.log1p(-share)
            )
            for i in range(size + 1)
        ]
    )
