"""What a worker does in its process; here in this one, with a server of vLLM's kind to draw."""

import importlib.util
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs the extra ray", allow_module_level=True)

from test_vllm_without_vllm import serve  # noqa: F401  (a fixture)

from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler
from rlalign.rollouts.sampling.ray.weights import Parameters, gather_weights
from rlalign.rollouts.sampling.ray.worker import SamplingWorker
from rlalign.rollouts.sampling.vllm import VLLMServerSampler

REQUESTS = [SampleRequest((7, 8, 9), 0, 0, 3), SampleRequest((5,), 1, 0, 3)]


@pytest.fixture
def make_worker(tiny_model, monkeypatch):
    """Gives a worker, and the policy that publishes its weights for it."""
    monkeypatch.setattr("ray.get", lambda reference: reference)
    policy = Policy(PolicyConfig(tiny_model))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    held = Parameters()
    actor = SimpleNamespace(newest=SimpleNamespace(remote=held.newest))

    def make(sampler):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        moved = [pickle.loads(pickle.dumps(part)) for part in (policy.config, tokenizer, sampler)]  # as Ray would
        return SamplingWorker(*moved, actor, 1), policy, held

    return make


def test_a_worker_draws_by_vllm(serve, make_worker):  # noqa: F811
    server = serve()
    worker, policy, held = make_worker(VLLMServerSampler(url=f"http://127.0.0.1:{server.server_port}"))
    held.publish(3, [gather_weights(policy, policy.model)])
    drawn, *seconds = worker.sample(REQUESTS, SamplingParams(max_new_tokens=5), None, 2)
    assert [completion.version for completion in drawn] == [3, 3], "newer than what it was told of"
    assert min(seconds) > 0
    assert drawn[0].token_ids[0] == 11
    for name, weight in policy.model.named_parameters():
        assert torch.equal(server.weights[name], weight)
    server.weights.clear()
    worker.sample(REQUESTS, SamplingParams(max_new_tokens=5), None, 3)
    assert not server.weights, "it has them"
    worker.release()
    assert ("rlalign_drop_cache",) in server.told
    worker.sample(REQUESTS, SamplingParams(max_new_tokens=5), None, 3)
    assert server.weights, "a server that was asleep has lost them"


def test_a_worker_draws_what_the_policy_would_in_the_type_of_the_run(make_worker):
    worker, policy, held = make_worker(LocalSampler())
    held.publish(1, [gather_weights(policy, policy.model)])
    here = LocalSampler()
    here.setup(worker.sampler.tokenizer)
    here.sync(policy)
    params = SamplingParams(max_new_tokens=5)
    assert worker.sample(REQUESTS, params, None, 1)[0][0].logprobs == here.sample(REQUESTS, params)[0].logprobs
    worker.release()
    here.release()
    with torch.autocast("cpu", torch.bfloat16):
        in_bfloat16 = here.sample(REQUESTS, params)[0].logprobs
    assert worker.sample(REQUESTS, params, torch.bfloat16, 1)[0][0].logprobs == in_bfloat16
