"""Log-probabilities and entropies of tokens, without ever holding the logits of a whole batch."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from rlalign.models.attention import GROUPED
from rlalign.models.flat import FlatRows
from rlalign.models.head import linear_scores


class TokenScores(NamedTuple):
    """What a policy thinks of given tokens; zero outside the mask."""

    logprobs: Tensor
    """``[B, T]``, nats, float32."""
    entropy: Tensor
    """Of the distribution each token was drawn from, ``[B, T]``, nats, float32."""


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions that count real tokens only, so that left padding does not shift them, ``[B, L]``."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def adjust_logits(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """What some architectures do to the logits after the output layer (Granite, Cohere, Gemma)."""
    if scaling := getattr(config, "logits_scaling", None):
        logits = logits / scaling
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


def at_least_float32(x: Tensor) -> Tensor:
    """The same numbers, in float32 where they were shorter."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def head_scores(
    hidden: Tensor, targets: Tensor, head: nn.Module, config: PretrainedConfig, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, each ``[N]``, of ``targets [N]`` given final hidden states ``[N, H]``."""
    logits = at_least_float32(adjust_logits(head(hidden), config)) / temperature
    log_normalizer = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_normalizer
    # H = log Z - sum_v p_v l_v: one pass, no second tensor of log-probabilities.
    entropy = log_normalizer - (torch.softmax(logits, -1) * logits).sum(-1)
    return logprobs, entropy


def scalar_of_states(states: Tensor, head: nn.Module) -> Tensor:
    """One number for each final hidden state, ``[..., H] -> [...]``, in float32 or wider under any autocast."""
    with torch.autocast(states.device.type, enabled=False):
        scalar: Tensor = head(at_least_float32(states)).squeeze(-1)
    return scalar


def _first_position(mask: Tensor) -> Tensor:
    first = torch.zeros_like(mask)
    first[0, 0] = True
    return first


def cache_argument(model: PreTrainedModel) -> str:
    """What this model calls its cache: the argument is being renamed in transformers."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"


_MANY, _MULTIPLE = 512, 32
"""So many tokens or more are filled up to a multiple: products of odd numbers of rows take up to a fifth longer, and a
CPU's library keeps a kernel for each number."""


def flat_states(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, rows: FlatRows) -> Tensor:
    """Hidden states that predict the columns of the responses, ``[B, T, H]``: of padding, those of what is before it.

    Args:
        model: A causal language model of transformers, for which :func:`can_lay_flat` holds.
        input_ids: Prompt and response, ``[B, P + T]``.
        attention_mask: True on real tokens, ``[B, P + T]``.
        rows: How they are laid flat.
    """
    ids, positions = (x.flatten()[rows.tokens] for x in (input_ids, position_ids(attention_mask)))
    if len(ids) >= _MANY and (filling := -len(ids) % _MULTIPLE):
        ids, positions = (torch.cat([x, x.new_zeros(filling)]) for x in (ids, positions))
    ids, positions = ids.unsqueeze(0), positions.unsqueeze(0)
    # A mask of four dimensions is taken as it is: this one is for nobody, and the model makes none of its own.
    nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    given = {"attention_mask": nothing, "position_ids": positions, "use_cache": False, "flat_rows": rows}
    states: Tensor = model.base_model(input_ids=ids, **given).last_hidden_state[0]
    return states[rows.before]


def _flat_rows_if_it_pays(
    input_ids: Tensor, attention_mask: Tensor, num_tokens: int, with_last: bool
) -> FlatRows | None:
    """Rows laid flat where that saves a tenth of the positions or more."""
    if not attention_mask[:, : input_ids.shape[1] - num_tokens].any(1).all():
        return None
    rows = FlatRows.of(input_ids, attention_mask, num_tokens, with_last)
    return rows if len(rows.tokens) * 10 <= input_ids.numel() * 9 else None


@torch.no_grad()
def can_lay_flat(model: PreTrainedModel) -> bool:
    """Whether a model gives :class:`~rlalign.models.flat.FlatRows` to its attention, and says the same then."""
    config: Any = model.config.get_text_config()
    all_full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    if model.config._attn_implementation != GROUPED or not all_full or getattr(config, "sliding_window", None):
        return False
    if model.device.type == "meta":
        return False  # nothing can be compared
    ids = torch.arange(1, 13, device=model.device).repeat(2, 1) * 31 % config.vocab_size
    ids[1, 7:] = ids[0, 6:-1]
    mask = torch.ones_like(ids).bool()
    mask[1, -2:] = False
    want = model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
    want = want[:, 6:-1][mask[:, 7:]].float()
    try:
        got = flat_states(model, ids, mask, FlatRows.of(ids, mask, 5))[mask[:, 7:]].float()
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # another signature, or other shapes
        return False
    return float((got - want).norm() / want.norm()) < (1e-4 if model.dtype.itemsize >= 4 else 0.05)


def final_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    num_tokens: int,
    positions: Tensor | None = None,
    share_prompts: bool = False,
    with_last: bool = False,
) -> Tensor:
    """Final hidden states that predict the last ``num_tokens`` columns, ``[B, T, H]``.

    Args:
        model: A causal language model of transformers.
        input_ids: Prompt and response, ``[B, P + T]``.
        attention_mask: True on real tokens, ``[B, P + T]``; ``None`` for packed rows.
        num_tokens: Columns of the response, ``T``.
        positions: Of packed rows, ``[B, P + T]``; from 0 again with every sequence, and none sees another.
        share_prompts: Compute each distinct prompt once, and no padding, see :class:`~rlalign.models.flat.FlatRows`,
            where that saves a tenth of the positions or more.
        with_last: Also the state after the last column, ``[B, T + 1, H]``.

    Raises:
        ValueError: If the response is not shorter than the sequence (a first token has nothing to be predicted from).
    """
    if num_tokens >= input_ids.shape[1]:
        raise ValueError(f"{num_tokens} response tokens leave no prompt in sequences of {input_ids.shape[1]} tokens.")
    if attention_mask is not None:
        placed = {"attention_mask": attention_mask.long(), "position_ids": position_ids(attention_mask)}
    elif positions is not None:
        placed = {"position_ids": positions}
    else:
        raise ValueError("Give an attention mask, or the positions of packed rows.")
    if share_prompts and attention_mask is not None:
        rows = _flat_rows_if_it_pays(input_ids, attention_mask, num_tokens, with_last)
        if rows is not None:
            return flat_states(model, input_ids, attention_mask, rows)
    states = model.base_model(input_ids=input_ids, use_cache=False, **placed).last_hidden_state
    return states[:, -num_tokens - 1 :] if with_last else states[:, -num_tokens - 1 : -1]


def scores_of_states(
    model: PreTrainedModel,
    states: Tensor,
    targets: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> TokenScores:
    """Scores of tokens from the final hidden states that predict them.

    The output layer sees only the positions in the mask, ``chunk_tokens`` of them at a time. With gradients, each
    chunk's logits are computed again in the backward pass, so at most ``chunk_tokens x V`` of them exist at once.

    Args:
        model: A causal language model of transformers.
        states: ``[B, T, H]``.
        targets: Token ids, ``[B, T]``.
        mask: True on the tokens to score, ``[B, T]``.
        temperature: Of the distribution; 0 (greedy) is scored at 1.
        chunk_tokens: Positions a chunk.

    Returns:
        Log-probabilities and entropies, float32.
    """
    any_token = (keep := mask.bool()).any()
    # With nothing to score, one position keeps every parameter in the graph, with gradient zero.
    picked = keep if any_token else _first_position(keep)
    states, targets = states[picked], targets[picked]
    temperature = temperature or 1.0
    parts = _parts(model, states, targets, temperature, chunk_tokens)
    scores = []
    for values in zip(*parts, strict=True):
        packed = torch.cat(values) if any_token else torch.cat(values) * 0
        scores.append(packed.new_zeros(keep.shape).masked_scatter(picked, packed))
    return TokenScores(*scores)


def _parts(
    model: PreTrainedModel, states: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities and entropies of targets ``[N]`` given states ``[N, H]``, in parts."""
    head, config = model.get_output_embeddings(), model.config
    is_plain = type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
    if is_plain and not getattr(config, "final_logit_softcapping", None):
        scale = float(adjust_logits(torch.ones(()), config)) / temperature
        return [linear_scores(states, head.weight, head.bias, targets, scale, chunk_tokens)]
    recompute = torch.is_grad_enabled() and len(targets) > chunk_tokens
    parts = []
    for part, target in zip(states.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        arguments = (part, target, head, config, temperature)
        parts.append(checkpoint(head_scores, *arguments, use_reentrant=False) if recompute else head_scores(*arguments))
    return parts


def token_scores(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    response_mask: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    positions: Tensor | None = None,
    share_prompts: bool = False,
) -> TokenScores:
    """Scores of the response tokens, the last ``T`` columns of ``input_ids``.

    Args:
        model: A causal language model of transformers.
        input_ids: Prompt and response, ``[B, P + T]``.
        attention_mask: True on real tokens, ``[B, P + T]``; ``None`` for packed rows.
        response_mask: True on the tokens to score, ``[B, T]``.
        temperature: See :func:`scores_of_states`.
        chunk_tokens: See :func:`scores_of_states`.
        positions: See :func:`final_states`.
        share_prompts: See :func:`final_states`.

    Returns:
        Log-probabilities and entropies, float32.

    Raises:
        ValueError: As :func:`final_states`.
    """
    num_tokens = response_mask.shape[1]
    states = final_states(model, input_ids, attention_mask, num_tokens, positions, share_prompts)
    return scores_of_states(model, states, input_ids[:, -num_tokens:], response_mask, temperature, chunk_tokens)
