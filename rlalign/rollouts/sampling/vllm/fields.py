"""How requests are put to vLLM, and what its answers mean."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlalign.functional.draws import fold_in
from rlalign.rollouts.sampling.base import Completion, FinishReason, SampleRequest, SamplingParams
from rlalign.rollouts.template import special_strings


def seed_of(request: SampleRequest) -> int:
    """The seed of vLLM's generator for one response: a function of seed, prompt and sample, and of nothing else."""
    return fold_in(request.seed, request.prompt_index, request.sample_index)


def sampling_fields(
    request: SampleRequest, params: SamplingParams, end_ids: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """VLLM's parameters for one response, all of them explicit; its server knows them by the same names.

    The temperature is 1, or 0 if greedy: the logits are tempered before vLLM sees them, see
    :meth:`~rlalign.rollouts.sampling.vllm.worker.PolicyWorker.rlalign_temper`.
    """
    special = special_strings(tokenizer)
    stop_ids = {special[text] for text in params.stop if text in special}
    return {
        "max_tokens": params.max_new_tokens,
        "temperature": 1.0 if params.temperature > 0 else 0.0,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": seed_of(request),
        "stop": params.stop,
        "stop_token_ids": sorted({*end_ids, *stop_ids}),
        "ignore_eos": True,  # the end tokens are named above
        "logprobs": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def check_lengths(requests: Sequence[SampleRequest], params: SamplingParams, positions: int) -> None:
    """See that every response may be as long as it was promised to be.

    Raises:
        ValueError: If prompt and response are longer than what vLLM holds.
    """
    longest = max((len(request.prompt_ids) for request in requests), default=0)
    if longest + params.max_new_tokens > positions:
        raise ValueError(
            f"A prompt of {longest} tokens and max_new_tokens={params.max_new_tokens} are more than the {positions} "
            "positions of vLLM: raise max_model_len in data.sampler, or sample fewer tokens."
        )


def completion(
    token_ids: Sequence[int], logprobs: Sequence[float | None], finish_reason: str | None, end_ids: Collection[int]
) -> Completion:
    """What vLLM drew, with our reasons.

    Raises:
        FloatingPointError: If a log-probability is not finite.
        RuntimeError: If vLLM has not finished the response.
    """
    ids = list(token_ids)
    if finish_reason not in ("stop", "length") or not ids or len(ids) != len(logprobs):
        raise RuntimeError(
            f"vLLM returned {len(ids)} tokens with {len(logprobs)} log-probabilities, finished by '{finish_reason}'."
        )
    known = [float("nan") if p is None else float(p) for p in logprobs]
    if not all(math.isfinite(p) and p > _LOWEST for p in known):
        raise FloatingPointError(
            "The policy's logits are not finite: its weights have diverged (lower the learning rate, clip the "
            "gradient), or it overflows in this precision."
        )
    reason: FinishReason = "eos" if ids[-1] in end_ids else "stop" if finish_reason == "stop" else "length"
    return Completion(ids, known, reason)


_LOWEST = -9999.0
"""What vLLM's server writes for minus infinity."""
