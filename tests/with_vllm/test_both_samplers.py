"""What holds of vLLM in this process and of its server alike, in float32."""

import pytest
import torch

from real_vllm import PROMPTS, check_scores, make_policy, perturb_adapters, requests
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler

EVERY = pytest.mark.parametrize(
    ("kind", "name"), [("engine", "llama"), ("engine", "qwen2"), ("server", "llama"), ("server", "qwen2")]
)
EITHER = pytest.mark.parametrize("kind", ["engine", "server"])


def local(policy, sampler) -> LocalSampler:
    other = LocalSampler()
    other.setup(sampler.tokenizer)
    other.sync(policy)
    return other


@EVERY
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(20),
        SamplingParams(20, temperature=0.7),
        SamplingParams(20, temperature=1.7, top_p=0.8, top_k=12, min_p=0.02),
        SamplingParams(20, temperature=0),
    ],
    ids=str,
)
def test_log_probabilities_are_of_the_full_tempered_distribution_kf15_kf16(samplers, models, kind, name, params):
    policy, sampler = make_policy(models[name], lora_rank=4), samplers(kind, name)
    sampler.sync(policy)
    asked = requests(sampler, 4)
    check_scores(policy, asked, sampler.sample(asked, params), params)


@EVERY
def test_greedy_is_the_local_samplers(samplers, models, kind, name):
    policy, sampler = make_policy(models[name]), samplers(kind, name)
    sampler.sync(policy)
    asked, params = requests(sampler, 1), SamplingParams(24, temperature=0)
    ours = local(policy, sampler).sample(asked, params)
    theirs = sampler.sample(asked, params)
    assert [(c.token_ids, c.finish_reason) for c in theirs] == [(c.token_ids, c.finish_reason) for c in ours]


@EITHER
def test_a_perturbed_adapter_changes_what_is_sampled_and_no_trained_weight_kf53(samplers, models, kind):
    policy, sampler = make_policy(models["llama"], lora_rank=4), samplers(kind, "llama")
    asked, params = requests(sampler, 4), SamplingParams(20)
    drawn = []
    for seed in (1, 2, 1):
        perturb_adapters(policy, seed)
        before = {name: value.clone() for name, value in policy.state_dict().items()}
        sampler.sync(policy)
        drawn.append(sampler.sample(asked, params))
        check_scores(policy, asked, drawn[-1], params)
        assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    tokens = [[c.token_ids for c in part] for part in drawn]
    assert tokens[0] == tokens[2] != tokens[1]


@EITHER
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_no_cached_prompt_outlives_the_weights_it_was_computed_by(samplers, models, kind, name):
    """Nor do tied weights, biases, norms or what was packed of them."""
    sampler, params = samplers(kind, name), SamplingParams(8)
    asked = requests(sampler, 2, ["12+7= is what " * 12])
    assert len(asked[0].prompt_ids) > 128, "the prompt must fill a block of the cache"
    drawn = []
    for scale in (0.5, 1.0, 1.5):
        policy = make_policy(models[name])
        with torch.no_grad():
            for number, parameter in enumerate(policy.parameters()):
                parameter.mul_(scale if number % 2 else scale**0.5).add_(0.01 * scale)
        sampler.sync(policy)
        drawn.append(sampler.sample(asked, params))
        check_scores(policy, asked, drawn[-1], params)
    assert len({tuple(part[0].token_ids) for part in drawn}) > 1


@EITHER
def test_finish_reasons_are_the_local_samplers(samplers, models, kind):
    policy, sampler = make_policy(models["llama"]), samplers(kind, "llama")
    sampler.sync(policy)
    ours = local(policy, sampler)
    asked = requests(sampler, 1, [f"{a}+{b}=" for a in range(4) for b in "0369"])
    free = ours.sample(asked, SamplingParams(24, temperature=0))
    text = "".join(sampler.tokenizer.decode(c.token_ids) for c in free)
    stops = [["<unk>"], [text[3]], [text[5:7], text[20:23]]]
    reasons = set()
    for stop in stops:
        params = SamplingParams(24, temperature=0, stop=stop)
        want = [(c.token_ids, c.finish_reason) for c in ours.sample(asked, params)]
        assert [(c.token_ids, c.finish_reason) for c in sampler.sample(asked, params)] == want
        reasons |= {reason for _, reason in want}
    assert {"stop", "length"} <= reasons


@EITHER
def test_several_end_tokens_end_a_response_kf40(samplers, models, kind):
    policy, sampler = make_policy(models["llama"]), samplers(kind, "llama")
    sampler.sync(policy)
    drawn = sampler.sample(requests(sampler, 60), SamplingParams(24, temperature=1.5))
    assert {c.token_ids[-1] for c in drawn if c.finish_reason == "eos"} == {1, 5}
    for c in drawn:
        assert not {1, 5} & set(c.token_ids[:-1])
        assert c.finish_reason == ("eos" if c.token_ids[-1] in (1, 5) else "length")
        assert len(c.token_ids) == len(c.logprobs)


@EITHER
def test_a_response_depends_on_seed_prompt_and_sample_alone_kf54(samplers, models, kind):
    policy, sampler = make_policy(models["llama"]), samplers(kind, "llama")
    sampler.sync(policy)
    asked, params = requests(sampler, 6), SamplingParams(16)
    together = [c.token_ids for c in sampler.sample(asked, params)]
    assert len({tuple(ids) for ids in together}) > 20
    assert [c.token_ids for c in sampler.sample(asked[::-1], params)][::-1] == together
    assert [sampler.sample([request], params)[0].token_ids for request in asked[:8]] == together[:8]
    base, *others = (
        sampler.sample([SampleRequest(asked[0].prompt_ids, p, s, seed)], params)[0].token_ids
        for p, s, seed in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    )
    assert all(other != base for other in others)


def test_sampled_frequencies_are_the_distribution(samplers, models):
    policy, sampler = make_policy(models["llama"]), samplers("engine", "llama")
    sampler.sync(policy)
    ids = sampler.tokenizer(PROMPTS[0])["input_ids"]
    drawn = sampler.sample([SampleRequest(tuple(ids), 0, s, 1) for s in range(2000)], SamplingParams(1, 2.0))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=policy.model.config.vocab_size)
    with torch.no_grad():
        expected = (policy.model(torch.tensor([ids])).logits[0, -1] / 2.0).softmax(-1) * 2000
    big = expected > 5
    chi2 = ((counts - expected)[big] ** 2 / expected[big]).sum()
    assert int(big.sum()) > 5
    assert chi2 < int(big.sum()) + 4 * (2 * int(big.sum())) ** 0.5


@EITHER
def test_after_a_release_weights_must_come_again(samplers, models, kind):
    policy, sampler = make_policy(models["llama"]), samplers(kind, "llama")
    asked, params = requests(sampler, 2), SamplingParams(8)
    sampler.sync(policy)
    first = sampler.sample(asked, params)
    for _ in range(2):
        sampler.release()
        sampler.release()  # as an interrupted run may
        with pytest.raises(RuntimeError, match="sync"):
            sampler.sample(asked, params)
        sampler.sync(policy)
        again = sampler.sample(asked, params)
        assert [c.token_ids for c in again] == [c.token_ids for c in first]
        check_scores(policy, asked, again, params)


@EITHER
def test_bad_input_is_told(samplers, models, kind):
    policy, sampler = make_policy(models["llama"]), samplers(kind, "llama")
    sampler.sync(policy)
    with pytest.raises(ValueError, match="A prompt of 12 tokens and max_new_tokens=510"):
        sampler.sample(requests(sampler, 1), SamplingParams(510))
    with pytest.raises(ValueError, match="use another sampler"):
        sampler.sync(make_policy(models["qwen2"]))
    assert sampler.sample([], SamplingParams(4)) == []


@EITHER
def test_weights_that_are_not_finite_leave_nothing_behind(samplers, models, kind):
    policy, sampler = make_policy(models["llama"]), samplers(kind, "llama")
    asked, params = requests(sampler, 2), SamplingParams(8)
    sampler.sync(policy)
    first = sampler.sample(asked, params)
    diverged = make_policy(models["llama"])
    with torch.no_grad():
        diverged.model.get_input_embeddings().weight.fill_(float("nan"))
    sampler.sync(diverged)
    with pytest.raises((FloatingPointError, RuntimeError)):
        sampler.sample(asked, params)
    sampler.sync(policy)
    assert [c.token_ids for c in sampler.sample(asked, params)] == [c.token_ids for c in first]
