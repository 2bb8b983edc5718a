"""Log-probabilities and entropies of tokens, without ever holding the logits of a whole batch."""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel


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


def _first_position(mask: Tensor) -> Tensor:
    first = torch.zeros_like(mask)
    first[0, 0] = True
    return first


def cache_argument(model: PreTrainedModel) -> str:
    """What this model calls its cache: the argument is being renamed in transformers."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"


def shared_prompt_states(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, num_tokens: int) -> Tensor:
    """Hidden states that predict the last ``num_tokens`` columns, ``[B, T, H]``, each distinct prompt computed once.

    The responses are computed on the prompts' cache, which gradients flow through. But for rounding, the states are
    those of whole rows.

    Args:
        model: A causal language model of transformers.
        input_ids: Prompt and response, ``[B, P + T]``.
        attention_mask: True on real tokens, ``[B, P + T]``.
        num_tokens: Columns of the response, ``T``.
    """
    positions, mask = position_ids(attention_mask), attention_mask.long()
    width = input_ids.shape[1] - num_tokens
    prompts, prompt_of_row = torch.cat([input_ids[:, :width], mask[:, :width]], 1).unique(dim=0, return_inverse=True)
    cache = DynamicCache(config=model.config)
    cached = {"use_cache": True, cache_argument(model): cache}
    ids, prompt_mask = prompts.split(width, dim=1)
    placed = {"attention_mask": prompt_mask, "position_ids": position_ids(prompt_mask)}
    before = model.base_model(input_ids=ids, **placed, **cached).last_hidden_state[prompt_of_row, -1:]
    if num_tokens == 1:
        return before
    cache.batch_select_indices(prompt_of_row)
    placed = {"attention_mask": mask[:, :-1], "position_ids": positions[:, width:-1]}
    after = model.base_model(input_ids=input_ids[:, width:-1], **placed, **cached).last_hidden_state
    return torch.cat([before, after], 1)


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

    The output layer sees only the positions in the mask, ``chunk_tokens`` of them at a time. With gradients, each
    chunk's logits are computed again in the backward pass, so at most ``chunk_tokens x V`` of them exist at once.

    Args:
        model: A causal language model of transformers.
        input_ids: Prompt and response, ``[B, P + T]``.
        attention_mask: True on real tokens, ``[B, P + T]``; ``None`` for packed rows.
        response_mask: True on the tokens to score, ``[B, T]``.
        temperature: Of the distribution; 0 (greedy) is scored at 1.
        chunk_tokens: Positions a chunk.
        positions: Of packed rows, ``[B, P + T]``; from 0 again with every sequence, and none sees another.
        share_prompts: Compute each distinct prompt once, see :func:`shared_prompt_states`.

    Returns:
        Log-probabilities and entropies, float32.

    Raises:
        ValueError: If the response is not shorter than the sequence (a first token has nothing to be predicted from).
    """
    num_tokens = response_mask.shape[1]
    if num_tokens >= input_ids.shape[1]:
        raise ValueError(f"{num_tokens} response tokens leave no prompt in sequences of {input_ids.shape[1]} tokens.")
    if attention_mask is not None:
        placed = {"attention_mask": attention_mask.long(), "position_ids": position_ids(attention_mask)}
    elif positions is not None:
        placed = {"position_ids": positions}
    else:
        raise ValueError("Give an attention mask, or the positions of packed rows.")
    if share_prompts and attention_mask is not None:
        hidden = shared_prompt_states(model, input_ids, attention_mask, num_tokens)
    else:
        output = model.base_model(input_ids=input_ids, use_cache=False, **placed)
        hidden = output.last_hidden_state[:, -num_tokens - 1 : -1]
    any_token = (keep := response_mask.bool()).any()
    # With nothing to score, one position keeps every parameter in the graph, with gradient zero.
    picked = keep if any_token else _first_position(keep)
    states, targets = hidden[picked], input_ids[:, -num_tokens:][picked]
    head, temperature = model.get_output_embeddings(), temperature or 1.0
    recompute = torch.is_grad_enabled() and len(targets) > chunk_tokens
    parts = []
    for part, target in zip(states.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        arguments = (part, target, head, model.config, temperature)
        parts.append(checkpoint(head_scores, *arguments, use_reentrant=False) if recompute else head_scores(*arguments))
    scores = []
    for values in zip(*parts, strict=True):
        packed = torch.cat(values) if any_token else torch.cat(values) * 0
        scores.append(packed.new_zeros(keep.shape).masked_scatter(picked, packed))
    return TokenScores(*scores)
