"""Log-probabilities of given tokens."""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Log-probabilities of tokens under the full tempered distribution.

    .. math:: \log\pi(y) = z_y / \tau - \log \sum_v \exp(z_v / \tau)

    "Full" means that top-p, top-k and their like play no part: renormalising over what they keep would make a ratio of
    two such numbers differ from 1 without any change of the policy.

    Args:
        logits: ``[..., V]``; raised to float32 if below it: one step of bfloat16 between 2 and 4 is a ratio of 1.0157.
        token_ids: ``[...]``, int64.
        temperature: That of sampling, above 0.

    Returns:
        Log-probabilities (nats), ``[...]``, float32 or wider.

    Raises:
        ValueError: If the shapes disagree or the temperature is not positive.
    """
    if logits.shape[:-1] != token_ids.shape:
        shapes = f"{list(logits.shape)} and {list(token_ids.shape)}"
        raise ValueError(f"Expected logits [..., V] and token_ids [...], got {shapes}.")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    tempered = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return tempered.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - tempered.logsumexp(-1)
