"""Sampling from the policy itself, in process."""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlalign.functional.draws import draw_token, hashed_uniform
from rlalign.models.decoding import Decoder, ModuleDecoder
from rlalign.models.kind import OtherKind
from rlalign.models.packed import pack
from rlalign.models.policy import DTYPES, Policy
from rlalign.rollouts.sampling.base import Completion, FinishReason, SampleRequest, SamplingParams
from rlalign.rollouts.template import end_token_ids, special_strings

log = logging.getLogger(__name__)


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
    """Draws from the policy in process.

    Each prompt is computed once for all of its samples. A row that has ended leaves the batch, so a long tail does not
    pay for the finished, and a waiting prompt takes its place. Every token is drawn with one number that is a hash of
    (request seed, prompt, sample, position), so a response does not depend on what else is in the batch.

    Models like Llama are sampled from a copy of their weights that is laid out for it, see
    :class:`~rlalign.models.packed.PackedDecoder`, all others by their own modules. Either way the log-probabilities are
    the policy's own, but for rounding.

    Args:
        max_rows: Responses in flight at once.
        max_tokens: Positions in the cache at once, prompt and longest response of each row: bounds its memory; none
            by default.
        packed: Copy the weights: where that is known to pay and can be done (on a CPU) by default. The copy exists
            while an iteration or validation samples.
        dtype: Of the copied weights; by default that in which the policy computes. ``bfloat16`` draws from a float32
            policy what differs a little from it: correct for that by ``importance_cap``.
    """

    def __init__(
        self,
        max_rows: int = 256,
        max_tokens: int | None = None,
        packed: bool | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}.")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
        if dtype != "auto" and packed is False:
            raise ValueError(f"dtype={dtype} is that of copied weights; with packed=false there are none.")
        self.max_rows, self.max_tokens, self.packed, self.dtype = max_rows, max_tokens, packed, dtype
        self.policy: Policy | None = None
        self._decoder: Decoder | None = None
        self._unpackable: str | None = None
        """Why the policy's weights cannot be copied, once that is known; empty if they can."""

    def setup(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the tokenizer, which knows the end tokens and how stop strings look."""
        self.tokenizer = tokenizer

    def sync(self, policy: Policy) -> None:
        """Sample from this policy as it is now."""
        if policy is not self.policy:
            self.policy, self._unpackable = policy, None
        self._decoder = None
        self.end_ids = sorted(end_token_ids(self.tokenizer, policy.model.config, policy.model.generation_config))

    def is_approximate(self, dtype: torch.dtype) -> bool:
        """Whether it draws from what differs from a policy that computes in this type by more than rounding."""
        return self.dtype != "auto" and DTYPES[self.dtype] != dtype

    def release(self) -> None:
        """Let go of the copied weights."""
        self._decoder = None

    @torch.no_grad()
    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order; requests with equal prompts that are adjacent share their prompt.

        With sharded weights every rank must call this equally often, if need be with no request.

        Raises:
            ValueError: If the weights were to be copied, and cannot be.
        """
        if self.policy is None:
            raise RuntimeError("Call sync(policy) before sample(...).")
        with self.policy.whole() as model:
            decoder = self._make_decoder(model) if self._decoder is None else self._decoder
            if self.policy.is_whole:
                self._decoder = decoder  # else what it was made of is gone in a moment
            computes = torch.autocast(model.device.type, enabled=False) if self._unpackable == "" else nullcontext()
            with computes:
                return _Drawing(decoder, requests, params, self).run()

    def _make_decoder(self, model: PreTrainedModel) -> Decoder:
        """Copied weights where they are wanted and can be had, else the modules."""
        packed = self.packed if self.packed is not None else model.device.type == "cpu"
        if packed and not self._unpackable:
            try:
                decoder: Decoder = pack(model, self._dtype(model), check=self._unpackable is None)
            except OtherKind as reason:
                self._unpackable = str(reason)
                if self.packed or self.dtype != "auto":
                    raise ValueError(
                        f"The weights of {type(model).__name__} cannot be copied for sampling: {reason}. Leave out "
                        "packed and dtype of data.sampler."
                    ) from reason
                log.info("%s is sampled by its own modules: %s.", type(model).__name__, reason)
            else:
                self._unpackable = ""
                return decoder
        return ModuleDecoder(model, self.tokenizer.pad_token_id or 0)

    def _dtype(self, model: PreTrainedModel) -> torch.dtype:
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        kind = model.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


class _Drawing:
    """One call of :meth:`LocalSampler.sample`: rows in flight, those that wait, and what was drawn."""

    def __init__(
        self, decoder: Decoder, requests: Sequence[SampleRequest], params: SamplingParams, sampler: LocalSampler
    ) -> None:
        self.decoder, self.requests, self.params, self.sampler = decoder, requests, params, sampler
        self.tokenizer = sampler.tokenizer
        assert sampler.policy is not None
        self.device = device = sampler.policy.model.device
        self.ends = torch.tensor(sampler.end_ids, device=device)
        self.room = self._room()
        groups = [list(group) for _, group in groupby(range(len(requests)), key=lambda i: requests[i].prompt_ids)]
        # Similar lengths together: less padding. The order changes nothing else.
        groups.sort(key=lambda rows: len(requests[rows[0]].prompt_ids))
        parts = (group[i : i + self.room] for group in groups for i in range(0, len(group), self.room))
        self.waiting = deque(parts)
        self.completions: dict[int, Completion] = {}
        # Of the rows in flight, in the decoder's order.
        self.live = torch.zeros(0, dtype=torch.long, device=device)
        """Numbers of their requests, ``[R]``."""
        self.counts, self.over = torch.zeros_like(self.live), torch.zeros_like(self.live, dtype=torch.bool)
        """Tokens drawn so far, and whether the last of them is among these, ``[R]``."""
        self.tokens = torch.zeros(0, params.max_new_tokens, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(0, params.max_new_tokens, dtype=torch.float64, device=device)
        self.uniforms = torch.zeros(0, params.max_new_tokens, dtype=torch.float64, device=device)

    def _room(self) -> int:
        """Most rows in flight."""
        room = self.sampler.max_rows
        if self.sampler.max_tokens is not None:
            longest = max((len(r.prompt_ids) for r in self.requests), default=0) + self.params.max_new_tokens
            room = min(room, max(self.sampler.max_tokens // longest, 1))
        return room

    def run(self) -> list[Completion]:
        """Draw all of it."""
        self.decoder.keep(self.live)  # nothing, whatever an interrupted call has left
        while len(self.live) or self.waiting:
            parts = []
            if len(self.live):
                parts.append(self.decoder.step(self.tokens.gather(1, self.counts[:, None] - 1).squeeze(1)))
            if self._may_admit():
                parts.append(self._admit())
            self._take(torch.cat(parts) if len(parts) > 1 else parts[0])
            dead = int(self.over.sum())
            if dead and dead >= self.decoder.compacts_at * len(self.live):
                kept = self._kept()
                if len(kept) == len(self.live):
                    continue
                order = self.decoder.keep(kept)
                for name in ("live", "counts", "over", "tokens", "logprobs", "uniforms"):
                    setattr(self, name, getattr(self, name)[order])
        return [self.completions[i] for i in range(len(self.requests))]

    def _kept(self) -> Tensor:
        """Rows to go on with, sorted: those that live, and a few of the dead where that makes a round number of them.

        Kernels are made for a number of rows when it is first met, and stay in memory.
        """
        alive = int((~self.over).sum())
        unit = 16 if alive > 64 else 4 if alive > 8 else 1
        size = min(-(-alive // unit) * unit, len(self.over))
        return self.over.long().argsort(stable=True)[:size].sort().values

    def _may_admit(self) -> bool:
        """Whether something waits, and so much room is free that computing prompts apart pays."""
        if not self.waiting or not len(self.live):
            return bool(self.waiting)
        free = self.room - len(self.live)
        return self.decoder.admits_late and free >= len(self.waiting[0]) and free * 4 >= self.room

    def _admit(self) -> Tensor:
        """Take in rows that wait, as many as there is room for; their logits."""
        parts = [self.waiting.popleft()]
        while self.waiting and len(self.live) + sum(map(len, parts)) + len(self.waiting[0]) <= self.room:
            parts.append(self.waiting.popleft())
        rows = [row for part in parts for row in part]
        requests = [self.requests[row] for row in rows]
        keys = torch.tensor([[r.seed, r.prompt_index, r.sample_index] for r in requests], device=self.device)
        steps = torch.arange(self.params.max_new_tokens, device=self.device)
        new = torch.zeros(len(rows), dtype=torch.long, device=self.device)
        self.live = torch.cat([self.live, torch.tensor(rows, device=self.device)])
        self.counts, self.over = torch.cat([self.counts, new]), torch.cat([self.over, new.bool()])
        self.tokens, self.logprobs = (
            torch.cat([x, x.new_zeros(len(rows), x.shape[1])]) for x in (self.tokens, self.logprobs)
        )
        uniforms = hashed_uniform(*(keys[:, i : i + 1] for i in range(3)), steps)
        self.uniforms = torch.cat([self.uniforms, uniforms])
        return self.decoder.admit([self.requests[part[0]].prompt_ids for part in parts], [len(part) for part in parts])

    def _take(self, logits: Tensor) -> None:
        """Draw a token for every row; those whose last token it is are over."""
        place = self.counts.clamp(max=self.params.max_new_tokens - 1)[:, None]  # of the dead nothing is taken any more
        token, logprob = _draw(logits, self.uniforms.gather(1, place).squeeze(1), self.params)
        self.tokens.scatter_(1, place, token[:, None])
        self.logprobs.scatter_(1, place, logprob[:, None].to(self.logprobs.dtype))
        self.counts = place.squeeze(1) + 1
        ended = torch.isin(token, self.ends)
        stopped = self._stopped() if self.params.stop else torch.zeros_like(ended)
        new = (ended | stopped | (self.counts == self.params.max_new_tokens)) & ~self.over
        self.over = self.over | new
        rows = new.nonzero().squeeze(1)
        kinds = zip(ended[rows].tolist(), stopped[rows].tolist(), strict=True)
        reasons: list[FinishReason] = ["eos" if ended else "stop" if stopped else "length" for ended, stopped in kinds]
        drawn = (x[rows].tolist() for x in (self.live, self.counts, self.tokens, self.logprobs))
        for request, count, ids, logprobs, reason in zip(*drawn, reasons, strict=True):
            self.completions[request] = Completion(ids[:count], logprobs[:count], reason)

    def _stopped(self) -> Tensor:
        """Rows whose newest token completes a stop string, ``[R]``."""
        stop = self.params.stop
        window = max(map(len, stop)) + 8  # a token is at least a character, but for pieces of one
        drawn = zip(self.tokens.tolist(), self.counts.tolist(), strict=True)
        recent = [ids[max(0, count - window) : count] for ids, count in drawn]
        texts = self.tokenizer.batch_decode(recent, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        special = {i for text, i in special_strings(self.tokenizer).items() if text in stop}
        found = [ids[-1] in special or any(s in text for s in stop) for ids, text in zip(recent, texts, strict=True)]
        return torch.tensor(found, device=self.device)


def _draw(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Token and log-probability under the full distribution, each ``[R]``."""
    if params.temperature not in (0, 1):
        logits = logits / params.temperature
    probs = logits.softmax(-1)
    token = draw_token(keep_likely(probs, params), uniforms) if params.temperature > 0 else logits.argmax(-1)
    logprob = probs.gather(-1, token.clamp(min=0).unsqueeze(-1)).squeeze(-1).log()
    if not logprob.isfinite().all():
        raise FloatingPointError(
            "The policy's logits are not finite: its weights have diverged (lower the learning rate, clip the "
            "gradient), or it overflows in this precision."
        )
    return token, logprob
