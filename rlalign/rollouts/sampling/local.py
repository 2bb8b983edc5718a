"""Sampling from the policy itself, in process."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from rlalign.functional.draws import draw_token, hashed_uniform
from rlalign.models.policy import Policy
from rlalign.models.scoring import adjust_logits, at_least_float32, cache_argument, position_ids
from rlalign.rollouts.sampling.base import Completion, FinishReason, SampleRequest, SamplingParams
from rlalign.rollouts.template import end_token_ids, special_strings


def keep_likely(probs: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities ``[R, V]`` with the tokens that top-k, top-p and min-p exclude set to 0; not renormalised."""
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0)
    if params.top_k and params.top_k < probs.shape[-1]:
        kept = probs.topk(params.top_k)
        probs = torch.zeros_like(probs).scatter(-1, kept.indices, kept.values)
    if params.top_p < 1:
        ordered, order = probs.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # of what the other filters left, as everyone does
        ordered = ordered.masked_fill(before >= params.top_p * ordered.sum(-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return probs


class LocalSampler:
    """Draws from the policy in process: nothing to sync, and log-probabilities that are the policy's own.

    Each distinct prompt is computed once and its cache shared by its samples; a row that has ended leaves the batch,
    so a long tail does not pay for the finished. Every token is drawn with one number that is a hash of (request seed,
    prompt, sample, position), so a response does not depend on what else is in the batch.

    Args:
        max_rows: Responses in flight at once; bounds the memory of the cache.
    """

    def __init__(self, max_rows: int = 256) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}.")
        self.max_rows = max_rows
        self.policy: Policy | None = None

    def setup(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the tokenizer, which knows the end tokens and how stop strings look."""
        self.tokenizer = tokenizer

    def sync(self, policy: Policy) -> None:
        """Sample from this policy from now on."""
        self.policy = policy
        self.end_ids = sorted(end_token_ids(self.tokenizer, policy.model.config, policy.model.generation_config))
        self.cache_argument = cache_argument(policy.model)

    @torch.no_grad()
    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order; requests with equal prompts that are adjacent share their prompt.

        With sharded weights every rank must call this equally often, if need be with no request.
        """
        if self.policy is None:
            raise RuntimeError("Call sync(policy) before sample(...).")
        with self.policy.whole() as model:
            return self._sample(model, requests, params)

    def _sample(
        self, model: PreTrainedModel, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[Completion]:
        groups = [list(group) for _, group in groupby(range(len(requests)), key=lambda i: requests[i].prompt_ids)]
        # Similar lengths together: less padding. The order changes nothing else.
        groups.sort(key=lambda rows: len(requests[rows[0]].prompt_ids))
        chunks: list[list[list[int]]] = [[]]
        for group in groups:
            for start in range(0, len(group), self.max_rows):
                part = group[start : start + self.max_rows]
                if sum(map(len, chunks[-1])) + len(part) > self.max_rows:
                    chunks.append([])
                chunks[-1].append(part)
        completions: dict[int, Completion] = {}
        for chunk in filter(None, chunks):
            rows = [row for group in chunk for row in group]
            drawn = self._sample_chunk(model, [requests[r] for r in rows], [len(g) for g in chunk], params)
            completions.update(zip(rows, drawn, strict=True))
        return [completions[i] for i in range(len(requests))]

    def _prefill(
        self, model: PreTrainedModel, requests: list[SampleRequest], counts: list[int]
    ) -> tuple[Tensor, DynamicCache, Tensor]:
        """Last logits ``[R, V]``, cache and attention mask ``[R, P]`` of all rows; each prompt is computed once."""
        device = model.device
        first_rows = [sum(counts[:i]) for i in range(len(counts))]
        prompts = [requests[row].prompt_ids for row in first_rows]
        width = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=device)
        cache = DynamicCache(config=model.config)
        logits = self._step(model, ids, mask, position_ids(mask), cache)
        repeats = torch.tensor(counts, device=device)
        rows = torch.arange(len(counts), device=device).repeat_interleave(repeats)
        if len(rows) > len(counts):
            cache.batch_select_indices(rows)
        return logits[rows], cache, mask[rows]

    def _step(
        self, model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Logits of the last position, ``[R, V]``."""
        hidden = model.base_model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            use_cache=True,
            **{self.cache_argument: cache},
        ).last_hidden_state[:, -1]
        return at_least_float32(adjust_logits(model.get_output_embeddings()(hidden), model.config))

    def _sample_chunk(
        self, model: PreTrainedModel, requests: list[SampleRequest], counts: list[int], params: SamplingParams
    ) -> list[Completion]:
        logits, cache, prompt_mask = self._prefill(model, requests, counts)
        device, num_rows, width = logits.device, len(requests), prompt_mask.shape[1]
        keys = torch.tensor([[r.seed, r.prompt_index, r.sample_index] for r in requests], device=device)
        steps = torch.arange(params.max_new_tokens, device=device)
        uniforms = hashed_uniform(*(keys[:, i : i + 1] for i in range(3)), steps)
        ends = torch.tensor(self.end_ids, device=device)
        mask = torch.cat([prompt_mask, torch.ones(num_rows, params.max_new_tokens, dtype=torch.bool, device=device)], 1)
        lengths = prompt_mask.sum(-1)

        tokens = torch.zeros(num_rows, params.max_new_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(num_rows, params.max_new_tokens, device=device, dtype=logits.dtype)
        generated = torch.full((num_rows,), params.max_new_tokens, device=device)
        reasons: list[FinishReason] = ["length"] * num_rows
        live = torch.arange(num_rows, device=device)  # original number of each row still in the batch
        done = torch.zeros(num_rows, dtype=torch.bool, device=device)  # of the rows still in the batch
        for step in range(params.max_new_tokens):
            token, logprob = self._draw(logits, uniforms[live, step], params)
            tokens[live, step] = token
            logprobs[live, step] = logprob
            ended = torch.isin(token, ends) & ~done
            stopped = self._stopped(tokens, live, step, params.stop) & ~done & ~ended if params.stop else None
            outcomes: list[tuple[Tensor | None, FinishReason]] = [(ended, "eos"), (stopped, "stop")]
            for newly, reason in outcomes:
                if newly is not None and newly.any():
                    generated[live[newly]] = step + 1
                    for row in live[newly].tolist():
                        reasons[row] = reason
                    done = done | newly
            if done.all() or step + 1 == params.max_new_tokens:
                break
            if done.sum() * 4 >= len(done):  # copying the cache costs about as much as a few steps of the dead rows
                kept = (~done).nonzero().squeeze(-1)
                cache.batch_select_indices(kept)
                live, token, done = live[kept], token[kept], done[kept]
            logits = self._step(
                model,
                token.unsqueeze(-1),
                mask[live, : width + step + 1],
                (lengths[live] + step).unsqueeze(-1),
                cache,
            )
        counts_list, token_rows, logprob_rows = generated.tolist(), tokens.tolist(), logprobs.tolist()
        return [
            Completion(ids[:n], lps[:n], reason)
            for n, ids, lps, reason in zip(counts_list, token_rows, logprob_rows, reasons, strict=True)
        ]

    @staticmethod
    def _draw(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Token and log-probability under the full distribution, each ``[R]``."""
        if params.temperature > 0:
            logits = logits / params.temperature
        log_normalizer = logits.logsumexp(-1, keepdim=True)
        if params.temperature > 0:
            token = draw_token(keep_likely((logits - log_normalizer).exp(), params), uniforms)
        else:
            token = logits.argmax(-1)
        if not log_normalizer.isfinite().all():
            raise FloatingPointError(
                "The policy's logits are not finite: its weights have diverged (lower the learning rate, clip "
                "the gradient), or "
                "it overflows in this precision."
            )
        return token, (logits.gather(-1, token.unsqueeze(-1)) - log_normalizer).squeeze(-1)

    def _stopped(self, tokens: Tensor, live: Tensor, step: int, stop: list[str]) -> Tensor:
        """Rows whose newest token completes a stop string, ``[R]``."""
        window = max(map(len, stop)) + 8  # a token is at least a character, but for pieces of one
        recent = tokens[live, max(0, step + 1 - window) : step + 1]
        texts = self.tokenizer.batch_decode(recent, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        found = torch.tensor([any(s in text for s in stop) for text in texts], device=tokens.device)
        special = [i for text, i in special_strings(self.tokenizer).items() if text in stop]
        return found | torch.isin(recent[:, -1], torch.tensor(special, dtype=torch.long, device=tokens.device))
