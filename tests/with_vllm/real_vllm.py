"""What the tests with real vLLM share."""

from typing import Any

import torch
from transformers import AutoTokenizer

from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.sampling.base import Completion, SampleRequest, SamplingParams

PROMPTS = ["12+7=", "a", "what is 3-1?", "hello there"]


def make_policy(path: str, lora_rank: int = 0) -> Policy:
    policy = Policy(PolicyConfig(path, lora_rank=lora_rank))
    perturb_adapters(policy, 0)
    return policy


@torch.no_grad()
def perturb_adapters(policy: Policy, seed: int) -> None:
    """Give adapters an effect, another one for each seed."""
    torch.manual_seed(seed)
    for name, parameter in policy.lm.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.2)


def make(kind: type, path: str, **options: Any) -> Any:
    sampler = kind(**({"cache_gb": 0.1, "max_rows": 64} | options))
    sampler.setup(AutoTokenizer.from_pretrained(path))
    return sampler


def requests(sampler: Any, samples: int, prompts: list[str] = PROMPTS, seed: int = 3) -> list[SampleRequest]:
    ids = [tuple(sampler.tokenizer(p)["input_ids"]) for p in prompts]
    return [SampleRequest(p, i, s, seed) for i, p in enumerate(ids) for s in range(samples)]


@torch.no_grad()
def scored(policy: Policy, request: SampleRequest, drawn: Completion, params: SamplingParams) -> torch.Tensor:
    """What the policy itself says of the tokens."""
    ids = torch.tensor([[*request.prompt_ids, *drawn.token_ids]])
    mask = torch.ones(1, len(drawn.token_ids), dtype=torch.bool)
    return policy(ids, torch.ones_like(ids).bool(), mask, params.temperature or 1.0).logprobs[0]


def check_scores(policy: Policy, asked: list[SampleRequest], drawn: list[Completion], params: SamplingParams) -> None:
    for request, completion in zip(asked, drawn, strict=True):
        got = torch.tensor(completion.logprobs)
        torch.testing.assert_close(got, scored(policy, request, completion, params), atol=1e-4, rtol=1e-4)
