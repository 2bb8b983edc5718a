"""Policy-gradient losses, per token; :func:`rlalign.functional.reductions.reduce_loss` makes one number of them."""

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: Level = "token") -> Tensor:
    r"""How much likelier the current policy makes what the old one sampled.

    .. math:: r_t = \frac{\pi_\theta(y_t)}{\pi_{old}(y_t)} \quad \text{or} \quad
        s = \exp\Big(\frac{1}{|y|} \sum_t \log \frac{\pi_\theta(y_t)}{\pi_{old}(y_t)}\Big)

    The sequence's ratio is the geometric mean of its tokens', not their product.

    Source: Zheng et al. 2025, eq. 7 (GSPO, https://arxiv.org/abs/2507.18071).

    Args:
        logprobs: Log-probabilities (nats) of the sampled tokens under the current policy, ``[B, T]``.
        old_logprobs: The same under the policy that sampled them, ``[B, T]``; never differentiated.
        mask: True where a token belongs to the response, ``[B, T]``.
        level: Of each token, or of each sequence.

    Returns:
        Ratios, ``[B, T]`` (1 outside the mask) or ``[B, 1]`` (1 where the mask is empty).

    Raises:
        ValueError: If the shapes disagree or the level is unknown.
    """
    return _log_ratio(logprobs, old_logprobs, mask, level).exp()


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    level: Level = "token",
) -> Tensor:
    r"""Clipped surrogate of PPO with DAPO's asymmetric range, per token.

    .. math:: L_t = -\min(r_t A_t,\ \mathrm{clip}(r_t, 1-\epsilon_{low}, 1+\epsilon_{high}) A_t)

    and, with a dual clip :math:`c`, no more than :math:`-c A_t` where :math:`A_t < 0`. A token beyond its bound has no
    gradient. Without a dual clip a token of negative advantage has no upper bound: its loss is infinite once ``exp``
    overflows.

    Sources: Schulman et al. 2017, eq. 7 (https://arxiv.org/abs/1707.06347); Yu et al. 2025, eq. 10
    (https://arxiv.org/abs/2503.14476); dual clip: Ye et al. 2020, eq. 5 (https://arxiv.org/abs/1912.09729);
    ``level="sequence"``: Zheng et al. 2025, eq. 5 (GSPO, https://arxiv.org/abs/2507.18071).

    Args:
        logprobs: Log-probabilities (nats) of the sampled tokens under the current policy, ``[B, T]``.
        old_logprobs: The same under the policy that sampled them, ``[B, T]``; never differentiated.
        advantages: Per token ``[B, T]`` or per sequence ``[B, 1]``; never differentiated.
        mask: True where a token belongs to the response, ``[B, T]``.
        clip_low: Lower clipping range, ``0 <= clip_low < 1``.
        clip_high: Upper clipping range, ``clip_high >= 0``.
        dual_clip: Bound on the ratio where the advantage is negative, above ``1 + clip_high``; none by default.
        level: ``"sequence"`` takes one ratio for the whole response, :func:`importance_ratio`, on each of its tokens.

    Returns:
        The loss of each token, ``[B, T]``, zero outside the mask.

    Raises:
        ValueError: If shapes disagree, a clipping range is out of bounds or the level is unknown.
    """
    advantages, low, high, capped = _cut_tokens(
        logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip, level
    )
    log_ratio = _log_ratio(logprobs, old_logprobs, mask, level).expand_as(logprobs)
    # Chosen before the exponential: a ratio that overflows and does not count would turn its zero gradient into NaN.
    ratio = log_ratio.masked_fill(low | high | capped | (advantages == 0), 0).exp()
    ratio = ratio.masked_fill(low, 1 - clip_low).masked_fill(high, 1 + clip_high)
    if dual_clip is not None:
        ratio = ratio.masked_fill(capped, dual_clip)
    return -ratio * advantages


@torch.no_grad()
def clip_fractions(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    level: Level = "token",
) -> tuple[Tensor, Tensor]:
    """Where :func:`clipped_surrogate` cuts the gradient, by side; average over the mask for the fractions.

    Args:
        logprobs: As for :func:`clipped_surrogate`, like all the others.
        old_logprobs: Likewise.
        advantages: Likewise.
        mask: Likewise.
        clip_low: Likewise.
        clip_high: Likewise.
        dual_clip: Likewise.
        level: Likewise.

    Returns:
        True where the ratio is below its lower bound and the advantage negative, and where the ratio is above its upper
        bound (the dual clip's, for a negative advantage), each ``[B, T]``, false outside the mask.

    Raises:
        ValueError: As :func:`clipped_surrogate`.
    """
    _, low, high, capped = _cut_tokens(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip, level)
    return low, high | capped


@torch.no_grad()
def truncated_importance_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, cap: float = 2.0
) -> Tensor:
    r"""Weights that correct for a sampler whose probabilities differ from the trainer's.

    .. math:: w_t = \min\Big(\frac{\pi_{trainer}(y_t)}{\pi_{sampler}(y_t)}, C\Big)

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (https://fengyao.notion.site/off-policy-rl).

    Args:
        trainer_logprobs: Log-probabilities (nats) of the sampled tokens, computed by the trainer, ``[B, T]``.
        sampler_logprobs: The same as the sampler reported them, ``[B, T]``.
        mask: True where a token belongs to the response, ``[B, T]``.
        cap: The largest weight, above 0.

    Returns:
        Weights, ``[B, T]``, zero outside the mask, without gradient.

    Raises:
        ValueError: If the shapes disagree or ``cap`` is not positive.
    """
    if not cap > 0:
        raise ValueError(f"cap must be positive, got {cap}.")
    ratio = importance_ratio(trainer_logprobs, sampler_logprobs, mask)
    return ratio.clamp(max=cap).masked_fill(~mask.bool(), 0)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Logarithm of :func:`importance_ratio`, 0 where there is nothing."""
    if logprobs.ndim != 2 or not logprobs.shape == old_logprobs.shape == mask.shape:
        shapes = f"{list(logprobs.shape)}, {list(old_logprobs.shape)}, {list(mask.shape)}"
        raise ValueError(f"Expected log-probabilities, old ones and mask of one shape [B, T], got {shapes}.")
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}.")
    mask = mask.bool()
    log_ratio = (logprobs - old_logprobs.detach()).masked_fill(~mask, 0)
    if level == "token":
        return log_ratio
    return log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _cut_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    level: Level,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Advantages, 0 outside the mask, and where the lower, the upper and the dual clip hold, each ``[B, T]``."""
    if not (0 <= clip_low < 1 and clip_high >= 0):
        raise ValueError(f"Expected 0 <= clip_low < 1 and clip_high >= 0, got {clip_low} and {clip_high}.")
    if dual_clip is not None and not dual_clip > 1 + clip_high:
        raise ValueError(f"dual_clip must be above 1 + clip_high = {1 + clip_high}, got {dual_clip}.")
    ratio = _log_ratio(logprobs.detach(), old_logprobs, mask, level).exp()
    if advantages.shape not in (logprobs.shape, (logprobs.shape[0], 1)):
        expected = f"{list(logprobs.shape)} or [{logprobs.shape[0]}, 1]"
        raise ValueError(f"Expected advantages of shape {expected}, got {list(advantages.shape)}.")
    mask = mask.bool()
    advantages = advantages.detach().expand_as(logprobs).masked_fill(~mask, 0)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    capped = (advantages < 0) & (ratio > (torch.inf if dual_clip is None else dual_clip))
    return advantages, low, high, capped
