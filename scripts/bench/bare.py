"""GRPO as a plain loop: no trainer, data module, callback or metric, but the same work as ``ours.py``."""

from collections.abc import Callable, Sequence

import torch
from forced import ToLength
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer
from workload import GROUP, Case, questions, score

from rlalign.assets import resolve
from rlalign.functional.advantages import group_advantages
from rlalign.functional.draws import fold_in
from rlalign.functional.policy_losses import clipped_surrogate
from rlalign.functional.reductions import reduce_loss
from rlalign.memory import keep_freed_memory
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.cutting import Shapes
from rlalign.rollouts.loader import StepPlan
from rlalign.rollouts.prompts import iteration_order
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.template import decode_response, render_prompt

SEED, TRAIN = 0, 0  # as the data module makes its random numbers of them


class Rows:
    """Prompts and responses of a step.

    Args:
        requests: One for each response.
        responses: Token ids of each.
        pad_id: Token id of padding.
    """

    def __init__(self, requests: Sequence[SampleRequest], responses: Sequence[Sequence[int]], pad_id: int) -> None:
        self.pad_id = pad_id
        self.prompts = [torch.tensor(request.prompt_ids) for request in requests]
        self.responses = [torch.tensor(ids) for ids in responses]
        self.prompt_lengths, self.lengths = (
            torch.tensor([len(ids) for ids in part]) for part in (self.prompts, self.responses)
        )
        self.shapes = Shapes(self.lengths, torch.tensor([r.prompt_index for r in requests]), self.prompt_lengths)

    def logprobs(self, policy: Policy, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Of the responses of some rows, and where there are any, ``[B, T]``."""
        before = pad_sequence([self.prompts[i] for i in chosen], True, self.pad_id, padding_side="left")
        after = pad_sequence([self.responses[i] for i in chosen], True, self.pad_id)
        of_prompt = torch.arange(before.shape[1]) >= before.shape[1] - self.prompt_lengths[chosen].unsqueeze(1)
        mask = torch.arange(after.shape[1]) < self.lengths[chosen].unsqueeze(1)
        return policy(torch.cat([before, after], 1), torch.cat([of_prompt, mask], 1), mask).logprobs, mask


def train(
    model: str, work: Case, steps: int, dtype: str, prompts: int, mark: Callable[[], None], caches: bool = False
) -> Policy:
    """The policy after so many steps.

    Args:
        model: To train.
        work: Of each step.
        steps: How many.
        dtype: ``bf16`` or ``fp32``.
        prompts: Of each step.
        mark: Called at the beginning of each step, and at the end.
        caches: Let autocast keep the weights that it has cast, as it does by default, and with Lightning does not.
    """
    keep_freed_memory()
    tokenizer = AutoTokenizer.from_pretrained(resolve(model))
    policy = Policy(PolicyConfig(model))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    sampler, params = ToLength(work), SamplingParams(max_new_tokens=work.max_tokens)
    sampler.setup(tokenizer)
    texts = questions(prompts * steps * 2, work)
    count, step_size = prompts * GROUP, prompts * GROUP // work.updates
    plan = StepPlan(count, step_size, GROUP, accumulate_grad_batches=step_size // GROUP)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16", cache_enabled=caches)
    for iteration in range(steps):
        mark()
        numbers = iteration_order(len(texts), iteration, prompts, SEED)[:prompts]
        asked = [tuple(render_prompt(tokenizer, texts[number])[0]) for number in numbers]
        seed = fold_in(SEED, TRAIN, iteration)
        requests = [SampleRequest(ids, n, s, seed) for ids, n in zip(asked, numbers, strict=True) for s in range(GROUP)]
        with autocast:
            sampler.sync(policy)
            drawn = [completion.token_ids for completion in sampler.sample(requests, params)]
            sampler.release()
        rewards = torch.tensor([score(decode_response(tokenizer, ids)) for ids in drawn])
        advantages = group_advantages(rewards, GROUP).unsqueeze(1)
        rows = Rows(requests, drawn, tokenizer.pad_token_id or 0)
        old = torch.zeros(count, int(rows.lengths.max()))
        if plan.num_steps > 1:
            with torch.no_grad(), autocast:
                for chosen in rows.lengths.argsort(stable=True).split(GROUP):
                    logprobs, seen = rows.logprobs(policy, chosen)
                    old[chosen, : seen.shape[1]] = logprobs
        for items in plan.steps(count, SEED, iteration):
            tokens = float(rows.lengths[torch.from_numpy(items)].sum())
            for part in plan.minibatches(items, rows.shapes, rank=0):
                chosen = torch.from_numpy(part)
                with autocast:
                    logprobs, seen = rows.logprobs(policy, chosen)
                    before = old[chosen, : seen.shape[1]] if plan.num_steps > 1 else logprobs.detach()
                    loss = clipped_surrogate(logprobs, before, advantages[chosen], seen, 0.2, 0.2)
                    loss = reduce_loss(torch.where(seen, loss, 0.0), seen, "token", tokens)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mark()
    return policy
