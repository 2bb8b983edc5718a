"""Advantage estimators: from rewards to how much better than expected an action was."""

from typing import Literal

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor,
    group_size: int,
    valid: Tensor | None = None,
    scale: Literal["std", "none"] = "std",
    ddof: int = 1,
    eps: float = 1e-4,
    baseline: Literal["mean", "leave_one_out"] = "mean",
) -> Tensor:
    r"""Rewards relative to the other samples of the same prompt.

    .. math:: A_i = \frac{r_i - b_i}{s + \epsilon}, \quad b_i = \frac{1}{n} \sum_j r_j \text{ or }
        \frac{1}{n - 1} \sum_{j \ne i} r_j, \quad s = \sqrt{\frac{1}{n - ddof} \sum_j (r_j - \bar r)^2}

    With ``scale="none"`` the denominator is 1. A group whose valid rewards are all equal gives exactly 0: its mean,
    rounded, may differ from its rewards, and dividing that by a tiny deviation would make noise look like an advantage.

    Sources: Shao et al. 2024, section 4.1.2 (https://arxiv.org/abs/2402.03300); without the scale, Liu et al. 2025
    (Dr. GRPO, https://arxiv.org/abs/2503.20783); leave-one-out without the scale, Ahmadian et al. 2024, eq. 6
    (RLOO, https://arxiv.org/abs/2402.14740).

    Args:
        rewards: One reward per response, ``[B]``; the samples of one prompt are adjacent.
        group_size: Samples per prompt, at least 2 and a divisor of ``B``.
        valid: False where a response has no usable reward, ``[B]``; it gets 0 and leaves the others' alone.
        scale: Whether to divide by the standard deviation of the group.
        ddof: 1 divides the squared deviations by ``n - 1`` (as torch does), 0 by ``n``.
        eps: Added to the standard deviation.
        baseline: The mean of the group, or of the others.

    Returns:
        Advantages, ``[B]``, without gradient; 0 in a group with fewer than two valid rewards.

    Raises:
        ValueError: If ``group_size`` is below 2 or does not divide ``B``, a shape disagrees, a valid reward is not
            finite, or an option is unknown.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', got {scale!r}.")
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline must be 'mean' or 'leave_one_out', got {baseline!r}.")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof}.")
    groups, is_valid = _grouped(rewards, group_size, valid)
    count = is_valid.sum(dim=1, keepdim=True)
    deviation = (groups - groups.sum(dim=1, keepdim=True) / count.clamp(min=1)).masked_fill(~is_valid, 0)
    advantages = deviation
    if baseline == "leave_one_out":  # r_i minus the mean of the others is n / (n - 1) times r_i minus the mean of all
        advantages = deviation * (count / (count - 1).clamp(min=1))
    if scale == "std":
        std = (deviation.square().sum(dim=1, keepdim=True) / (count - ddof).clamp(min=1)).sqrt()
        advantages = advantages / (std + eps)
    no_signal = constant_groups(rewards, group_size, valid)
    return advantages.masked_fill(no_signal.unsqueeze(1), 0).flatten()


def shrunk_baselines(
    rewards: Tensor, group_size: int, prior: Tensor, prior_samples: float, valid: Tensor | None = None
) -> Tensor:
    r"""What is expected of each response: the mean of the others to its prompt, drawn to an estimate from elsewhere.

    .. math:: b_i = \frac{n_0 v_i + \sum_{j \ne i} r_j}{n_0 + n - 1}

    The estimate counts as :math:`n_0` further responses: with 0 it is the leave-one-out baseline, and with one response
    a prompt the estimate itself. The baseline of a response does not depend on its own reward, so that the policy
    gradient stays without bias.

    Args:
        rewards: One reward per response, ``[B]``; the samples of one prompt are adjacent.
        group_size: Samples per prompt, a divisor of ``B``.
        prior: The estimate :math:`v` for each response's prompt, ``[B]``.
        prior_samples: The weight :math:`n_0`, 0 or more.
        valid: False where a response has no usable reward, ``[B]``; it takes no part in the others' baselines.

    Returns:
        Baselines, ``[B]``, without gradient; the estimate where there is nothing else.

    Raises:
        ValueError: If shapes disagree, ``group_size`` does not divide ``B``, or the weight is negative.
    """
    if rewards.ndim != 1 or prior.shape != rewards.shape or group_size < 1 or len(rewards) % group_size:
        shapes = f"{list(rewards.shape)} and {list(prior.shape)} with groups of {group_size}"
        raise ValueError(f"Expected rewards and estimates of one shape [B], in whole groups, got {shapes}.")
    if not prior_samples >= 0:
        raise ValueError(f"prior_samples must be 0 or more, got {prior_samples}.")
    is_valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    own = rewards.detach().masked_fill(~is_valid, 0).view(-1, group_size)
    counted = is_valid.view(-1, group_size).to(own.dtype)
    others = (own.sum(1, keepdim=True) - own).flatten()
    weight = prior_samples + (counted.sum(1, keepdim=True) - counted).flatten()
    baseline = (prior_samples * prior + others) / weight.clamp(min=torch.finfo(own.dtype).tiny)
    return torch.where(weight > 0, baseline, prior)


def constant_groups(rewards: Tensor, group_size: int, valid: Tensor | None = None) -> Tensor:
    """Which groups carry no signal: all valid rewards equal, or fewer than two of them.

    Args:
        rewards: One reward per response, ``[B]``; the samples of one prompt are adjacent.
        group_size: Samples per prompt, at least 2 and a divisor of ``B``.
        valid: False where a response has no usable reward, ``[B]``.

    Returns:
        True for a group without signal, ``[B / group_size]``.

    Raises:
        ValueError: As :func:`group_advantages`.
    """
    groups, is_valid = _grouped(rewards, group_size, valid)
    highest = groups.masked_fill(~is_valid, -torch.inf).amax(dim=1)
    lowest = groups.masked_fill(~is_valid, torch.inf).amin(dim=1)
    return highest <= lowest


def _grouped(rewards: Tensor, group_size: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards, 0 where not valid, and validity, each ``[B / group_size, group_size]``."""
    if rewards.ndim != 1 or (valid is not None and valid.shape != rewards.shape):
        shapes = f"{list(rewards.shape)} and {None if valid is None else list(valid.shape)}"
        raise ValueError(f"Expected rewards and valid of one shape [B], got {shapes}.")
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(
            f"group_size must be at least 2 and divide the {len(rewards)} rewards, got {group_size}; "
            "a group of one has no others to be compared with."
        )
    is_valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    rewards = rewards.detach() if rewards.is_floating_point() else rewards.float()
    rewards = rewards.masked_fill(~is_valid, 0)
    if not rewards.isfinite().all():
        index = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"rewards[{index}] is {rewards[index].item()} but counted as valid; mark it as not valid.")
    return rewards.view(-1, group_size), is_valid.view(-1, group_size)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Generalised advantage estimation over the tokens that count.

    .. math:: \delta_t = r_t + \gamma V_{t'} - V_t, \qquad A_t = \delta_t + \gamma \lambda A_{t'}

    where :math:`t'` is the next token inside the mask: tokens that the policy did not write (padding, tool output) are
    no time steps. After the last one :math:`V_{t'}` is ``bootstrap`` and :math:`A_{t'} = 0`.

    Source: Schulman et al. 2016, eq. 11-16 (https://arxiv.org/abs/1506.02438).

    Args:
        rewards: Reward of each token, ``[B, T]``, 0 outside the mask.
        values: Predicted value of the state before each token, ``[B, T]``; never read outside the mask.
        mask: True where the policy wrote the token, ``[B, T]``.
        gamma: Discount per token, in ``[0, 1]``.
        lam: Mixes one-step (0) and whole-return (1) estimates, in ``[0, 1]``.
        bootstrap: Predicted value of the state after the last token, ``[B]``: of a response that was cut off. It must
            be 0 for one that ended, and is 0 for all by default.

    Returns:
        Advantages and returns (advantages plus values), each ``[B, T]``, zero outside the mask, without gradient.

    Raises:
        ValueError: If shapes disagree, ``gamma`` or ``lam`` is out of bounds, or a reward stands outside the mask.
    """
    if rewards.ndim != 2 or not rewards.shape == values.shape == mask.shape:
        shapes = f"{list(rewards.shape)}, {list(values.shape)}, {list(mask.shape)}"
        raise ValueError(f"Expected rewards, values and mask of one shape [B, T], got {shapes}.")
    if bootstrap is not None and bootstrap.shape != rewards.shape[:1]:
        raise ValueError(f"Expected bootstrap of shape [{rewards.shape[0]}], got {list(bootstrap.shape)}.")
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma and lam must be in [0, 1], got {gamma} and {lam}.")
    mask = mask.bool()
    lost = (rewards != 0) & ~mask
    if lost.any():
        row, column = lost.nonzero()[0].tolist()
        raise ValueError(
            f"rewards[{row}, {column}] is outside the mask and would be lost; place it on a masked-in token."
        )

    advantages = torch.zeros_like(values)
    next_advantage = values.new_zeros(len(values))
    next_value = next_advantage if bootstrap is None else bootstrap.to(values)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = advantage.masked_fill(~mask[:, t], 0)
    return advantages, (advantages + values).masked_fill(~mask, 0)


def place_at_last_token(scores: Tensor, mask: Tensor) -> Tensor:
    """One score per response, placed on its last token inside the mask.

    Args:
        scores: One score per response, ``[B]``.
        mask: True where a token belongs to the response, ``[B, T]``.

    Returns:
        Rewards of the tokens, ``[B, T]``, zero but for one place in each row; a row with an empty mask is all zero.

    Raises:
        ValueError: If the shapes disagree.
    """
    if mask.ndim != 2 or scores.shape != mask.shape[:1]:
        raise ValueError(f"Expected scores [B] and mask [B, T], got {list(scores.shape)} and {list(mask.shape)}.")
    mask = mask.bool()
    tokens_from_here = mask.flip(1).cumsum(1).flip(1)
    is_last = mask & (tokens_from_here == 1)
    return torch.where(is_last, scores.unsqueeze(1), scores.new_zeros(()))


def token_rewards(
    scores: Tensor, mask: Tensor, logprobs: Tensor, ref_logprobs: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    r"""Rewards of single tokens: the score of the response at its last one, and a charge for leaving the reference.

    .. math:: r_t = R \cdot [t = |y|] - \beta \log\frac{\pi_{old}(y_t)}{\pi_{ref}(y_t)}

    Sources: Ziegler et al. 2019, eq. 2 (https://arxiv.org/abs/1909.08593); Ouyang et al. 2022, eq. 2
    (https://arxiv.org/abs/2203.02155).

    Args:
        scores: One score per response, ``[B]``.
        mask: True where a token belongs to the response, ``[B, T]``.
        logprobs: Log-probabilities (nats) under the policy that sampled, ``[B, T]``.
        ref_logprobs: The same under the reference, ``[B, T]``; needed where ``kl_coef`` is not 0.
        kl_coef: The charge :math:`\beta`, a reward a nat.

    Returns:
        Rewards, ``[B, T]``, zero outside the mask, without gradient.

    Raises:
        ValueError: If shapes disagree or the reference is missing.
    """
    rewards = place_at_last_token(scores.detach(), mask)
    if not kl_coef:
        return rewards
    if ref_logprobs is None or not logprobs.shape == ref_logprobs.shape == mask.shape:
        shapes = f"{list(logprobs.shape)}, {None if ref_logprobs is None else list(ref_logprobs.shape)}"
        raise ValueError(
            f"Expected log-probabilities of shape {list(mask.shape)} of policy and reference, got {shapes}."
        )
    return rewards - (kl_coef * (logprobs - ref_logprobs)).detach().masked_fill(~mask.bool(), 0)


def whiten(values: Tensor, mask: Tensor, shift: bool = True, eps: float = 1e-8) -> Tensor:
    r"""Values with variance one over the whole mask, and mean zero.

    .. math:: \hat v = \frac{v - \mu}{\sqrt{\sigma^2 + \epsilon}}

    with the variance of the population, divided by n. Give it the whole iteration: over a minibatch it would depend on
    how a step is cut.

    Sources: Ziegler et al. 2019, section 2.1, and Huang et al. 2024, "The N+ implementation details of RLHF with PPO"
    (https://arxiv.org/abs/2403.17031).

    Args:
        values: Of any shape; never read outside the mask.
        mask: True where a value counts, of the same shape.
        shift: Take the mean away; else it is left where it was.
        eps: Added to the variance.

    Returns:
        Of the shape of ``values``, zero outside the mask, without gradient. A mask with one value, or values that are
        all equal, give zeros (the values themselves without ``shift``): there is nothing to tell apart.

    Raises:
        ValueError: If the shapes disagree.
    """
    if values.shape != mask.shape:
        raise ValueError(f"Expected values and mask of one shape, got {list(values.shape)} and {list(mask.shape)}.")
    mask = mask.bool()
    kept = values.detach()[mask]
    if not len(kept):
        return torch.zeros_like(values)
    mean = kept.mean()
    deviation = kept - mean
    if kept.max() == kept.min():  # a mean, rounded, may differ from the values it is the mean of
        deviation = torch.zeros_like(kept)
    scaled = deviation / (deviation.square().mean() + eps).sqrt()
    return torch.zeros_like(values).masked_scatter(mask, scaled if shift else scaled + mean)
