import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler, keep_likely

PROMPTS = ["12+7=", "a", "what is 3-1?", "hello there"]


def make_sampler(path: str, lora_rank: int = 0, **options) -> tuple[LocalSampler, Policy]:
    policy = Policy(PolicyConfig(path, lora_rank=lora_rank))
    sampler = LocalSampler(**options)
    sampler.setup(AutoTokenizer.from_pretrained(path))
    sampler.sync(policy)
    return sampler, policy


def requests(sampler: LocalSampler, samples: int, prompts: list[str] = PROMPTS, seed: int = 3) -> list[SampleRequest]:
    ids = [tuple(sampler.tokenizer(p)["input_ids"]) for p in prompts]
    return [SampleRequest(p, i, s, seed) for i, p in enumerate(ids) for s in range(samples)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma2"])
def test_greedy_equals_generate_of_transformers(make_model, architecture):
    path = make_model(architecture)
    sampler, _ = make_sampler(path)
    got = sampler.sample(requests(sampler, 1), SamplingParams(max_new_tokens=24, temperature=0))
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    for completion, prompt in zip(got, PROMPTS, strict=True):
        ids = sampler.tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, do_sample=False, max_new_tokens=24, pad_token_id=0)[0, ids.input_ids.shape[1] :]
        assert completion.token_ids == out.tolist()
    assert len({tuple(c.token_ids) for c in got}) > 1


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma2"])
def test_log_probabilities_are_the_scorers_kf15_kf42(make_model, architecture):
    """Sampled with a cache and left padding, in a batch, equals scored alone; at a temperature that is not 1."""
    sampler, policy = make_sampler(make_model(architecture))
    wanted = requests(sampler, 3)
    for request, c in zip(wanted, sampler.sample(wanted, SamplingParams(20, temperature=0.7)), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *c.token_ids]])
        mask = torch.ones(1, len(c.token_ids), dtype=torch.bool)
        scored = policy(ids, torch.ones_like(ids).bool(), mask, 0.7).logprobs[0]
        torch.testing.assert_close(torch.tensor(c.logprobs), scored.detach(), atol=2e-5, rtol=1e-4)


def test_a_response_does_not_depend_on_the_batch(tiny_model):
    """Neither what shares the batch, nor its order, nor how it is cut, nor finished rows changes a response."""
    sampler, _ = make_sampler(tiny_model)
    wanted = requests(sampler, 6)
    params = SamplingParams(max_new_tokens=24)
    together = [c.token_ids for c in sampler.sample(wanted, params)]
    assert len({len(ids) for ids in together}) > 2, "the test needs rows that end at different times"
    assert len({tuple(ids) for ids in together}) > 20
    assert [sampler.sample([r], params)[0].token_ids for r in wanted] == together
    assert [c.token_ids for c in sampler.sample(wanted[::-1], params)][::-1] == together
    small, _ = make_sampler(tiny_model, max_rows=5)
    assert [c.token_ids for c in small.sample(wanted, params)] == together


def test_seed_prompt_and_sample_each_change_the_draws_kf54(tiny_model):
    sampler, _ = make_sampler(tiny_model)
    params = SamplingParams(max_new_tokens=16)
    ids = tuple(sampler.tokenizer("12+7=")["input_ids"])
    base, *others = (
        sampler.sample([SampleRequest(ids, p, s, seed)], params)[0].token_ids
        for p, s, seed in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    )
    assert all(other != base for other in others)
    assert sampler.sample([SampleRequest(ids, 0, 0, 0)], params)[0].token_ids == base


def test_sampled_frequencies_are_the_distribution(tiny_model):
    sampler, policy = make_sampler(tiny_model)
    ids = sampler.tokenizer("12+7=")["input_ids"]
    drawn = sampler.sample([SampleRequest(tuple(ids), 0, s, 1) for s in range(4000)], SamplingParams(1))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=policy.model.config.vocab_size)
    with torch.no_grad():
        probs = policy.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    expected = probs * 4000
    big = expected > 5
    chi2 = ((counts - expected)[big] ** 2 / expected[big]).sum()
    degrees = int(big.sum())
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [0.6, 0.3, 0, 0]),
        (SamplingParams(top_p=0.85), [0.6, 0.3, 0, 0]),
        (SamplingParams(top_p=0.6), [0.6, 0, 0, 0]),
        (SamplingParams(min_p=0.1), [0.6, 0.3, 0.08, 0]),
        (SamplingParams(min_p=0.1, top_k=1), [0.6, 0, 0, 0]),
        (SamplingParams(), [0.6, 0.3, 0.08, 0.02]),
    ],
)
def test_filters(params, kept):
    probs = torch.tensor([[0.08, 0.6, 0.02, 0.3]])
    order = [1, 3, 0, 2]
    torch.testing.assert_close(keep_likely(probs, params)[0, order], torch.tensor(kept))


def test_filtered_sampling_reports_the_full_distribution_kf16(tiny_model):
    sampler, policy = make_sampler(tiny_model)
    (request,) = requests(sampler, 1, PROMPTS[:1])
    for params in (SamplingParams(1, top_k=2), SamplingParams(1, top_p=0.3), SamplingParams(1, min_p=0.5)):
        (c,) = sampler.sample([request], params)
        with torch.no_grad():
            full = policy.model(torch.tensor([request.prompt_ids])).logits[0, -1].log_softmax(-1)
        assert c.logprobs[0] == pytest.approx(float(full[c.token_ids[0]]), abs=1e-5)


def test_generation_config_of_the_checkpoint_is_not_inherited_kf51(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.generation_config.do_sample, model.generation_config.top_k = True, 1
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    sampler, _ = make_sampler(str(tmp_path))
    drawn = sampler.sample(requests(sampler, 8, PROMPTS[:1]), SamplingParams(12))
    assert len({tuple(c.token_ids) for c in drawn}) == 8


def test_several_end_tokens_and_finish_reasons_kf40(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.generation_config.eos_token_id = [1, 5]
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    sampler, _ = make_sampler(str(tmp_path))
    drawn = sampler.sample(requests(sampler, 16), SamplingParams(24))
    assert {c.token_ids[-1] for c in drawn if c.finish_reason == "eos"} == {1, 5}
    for c in drawn:
        assert not {1, 5} & set(c.token_ids[:-1])
        assert c.finish_reason == ("eos" if c.token_ids[-1] in (1, 5) else "length")
        assert len(c.token_ids) == len(c.logprobs) == (24 if c.finish_reason == "length" else len(c.token_ids))


def test_stop_strings_end_a_response(tiny_model):
    sampler, _ = make_sampler(tiny_model)
    wanted = requests(sampler, 16)
    free = sampler.sample(wanted, SamplingParams(24))
    text = sampler.tokenizer.decode(free[0].token_ids)
    stop = text[3:5]
    stopped = sampler.sample(wanted, SamplingParams(24, stop=[stop]))
    assert stopped[0].finish_reason == "stop"
    for before, after in zip(free, stopped, strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        decoded = sampler.tokenizer.decode(after.token_ids, skip_special_tokens=True)
        assert decoded.endswith(stop) == (after.finish_reason == "stop")
        assert stop not in decoded[:-1] or after.finish_reason == "stop"


@pytest.mark.parametrize("packed", [True, False])
def test_each_prompt_is_computed_once_and_finished_rows_leave(tiny_model, packed):
    sampler, _ = make_sampler(tiny_model, packed=packed)
    admitted, rows = watched(sampler)
    sampler.sample(requests(sampler, 8), SamplingParams(48))
    assert admitted == [(len(PROMPTS), 8 * len(PROMPTS))]
    assert rows[0] <= 8 * len(PROMPTS)
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0], "finished rows must leave the batch"


def watched(sampler: LocalSampler) -> tuple[list[tuple[int, int]], list[int]]:
    """What will be admitted (prompts, rows), and the rows of each step."""
    admitted, rows = [], []
    make = sampler._make_decoder

    def make_watched(model):
        decoder = make(model)
        admit, step = decoder.admit, decoder.step

        def watched_admit(prompts, counts):
            admitted.append((len(prompts), sum(counts)))
            return admit(prompts, counts)

        def watched_step(tokens):
            rows.append(len(tokens))
            return step(tokens)

        decoder.admit, decoder.step = watched_admit, watched_step
        return decoder

    sampler._make_decoder = make_watched
    return admitted, rows


def test_copied_weights_draw_the_same_tokens_as_the_modules(tiny_model):
    params = SamplingParams(40, temperature=0.8, top_p=0.95)
    packed, modules = (make_sampler(tiny_model, packed=packed)[0] for packed in (True, False))
    got, want = (s.sample(requests(s, 6), params) for s in (packed, modules))
    assert [(c.token_ids, c.finish_reason) for c in got] == [(c.token_ids, c.finish_reason) for c in want]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_waiting_prompts_take_the_place_of_finished_rows(tiny_model):
    params = SamplingParams(40)
    sampler, _ = make_sampler(tiny_model, max_rows=8)
    admitted, rows = watched(sampler)
    wanted = requests(sampler, 2, [f"{i}+{i}=" for i in range(12)])
    got = sampler.sample(wanted, params)
    assert sum(count for _, count in admitted) == 24
    assert len(admitted) > 2
    assert max(rows) <= 8
    assert min(rows[:-40] or rows) > 0
    apart, _ = make_sampler(tiny_model, max_rows=8, packed=False)
    steps = watched(apart)[1]
    assert [c.token_ids for c in got] == [c.token_ids for c in apart.sample(wanted, params)]
    assert len(rows) < len(steps), "a waiting prompt need not wait for the longest row"


def test_the_cache_keeps_to_its_tokens(tiny_model):
    sampler, _ = make_sampler(tiny_model, max_tokens=100)
    _, rows = watched(sampler)
    wanted = requests(sampler, 4)
    longest = max(len(r.prompt_ids) for r in wanted) + 24
    got = sampler.sample(wanted, SamplingParams(24))
    assert max(rows) <= 100 // longest
    want = make_sampler(tiny_model)[0].sample(wanted, SamplingParams(24))
    assert [c.token_ids for c in got] == [c.token_ids for c in want]


def test_the_copy_is_made_once_for_many_calls_and_let_go(tiny_model):
    sampler, policy = make_sampler(tiny_model)
    made = []
    make = sampler._make_decoder
    sampler._make_decoder = lambda model: made.append(1) or make(model)
    for _ in range(3):
        sampler.sample(requests(sampler, 1), SamplingParams(4))
    assert made == [1]
    sampler.release()
    assert sampler._decoder is None
    sampler.sample(requests(sampler, 1), SamplingParams(4))
    sampler.sync(policy)
    sampler.sample(requests(sampler, 1), SamplingParams(4))
    assert made == [1, 1, 1]


def test_an_interrupted_call_leaves_nothing_behind(tiny_model):
    sampler, _ = make_sampler(tiny_model)
    want = [c.token_ids for c in sampler.sample(requests(sampler, 3), SamplingParams(12))]
    step, count = sampler._decoder.step, []

    def stop(tokens):
        count.append(1)
        if len(count) == 4:
            raise KeyboardInterrupt
        return step(tokens)

    sampler._decoder.step = stop
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(requests(sampler, 3), SamplingParams(12))
    assert [c.token_ids for c in sampler.sample(requests(sampler, 3), SamplingParams(12))] == want


@pytest.mark.parametrize("options", [{"packed": True}, {"dtype": "bfloat16"}])
def test_what_cannot_be_copied_is_told_where_it_was_asked_for(make_model, options):
    sampler, _ = make_sampler(make_model("gpt2"), **options)
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot be copied for sampling: it is made of"):
        sampler.sample(requests(sampler, 1), SamplingParams(4))


def test_a_copy_in_bfloat16_says_what_it_drew_from(tiny_model):
    sampler, _ = make_sampler(tiny_model, dtype="bfloat16")
    assert sampler.is_approximate(torch.float32)
    assert not sampler.is_approximate(torch.bfloat16)
    exact, _ = make_sampler(tiny_model)
    assert not exact.is_approximate(torch.float32)
    (short,), (long,) = (s.sample(requests(s, 1, PROMPTS[:1]), SamplingParams(1)) for s in (sampler, exact))
    assert 0 < abs(short.logprobs[0] - long.logprobs[0]) < 0.5 or short.token_ids != long.token_ids


def test_adapters_reach_the_sampler_and_are_never_merged_kf53(tiny_model):
    sampler, policy = make_sampler(tiny_model, lora_rank=4)
    params = SamplingParams(12, temperature=0)
    before = [c.token_ids for c in sampler.sample(requests(sampler, 1), params)]
    base = {n: p.clone() for n, p in policy.named_parameters() if "lora" not in n}
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1.0)
    sampler.sync(policy)
    assert [c.token_ids for c in sampler.sample(requests(sampler, 1), params)] != before
    for name, parameter in policy.named_parameters():
        if "lora" not in name:
            assert torch.equal(parameter, base[name])


def test_diverged_weights_are_an_error_not_a_token(tiny_model):
    sampler, policy = make_sampler(tiny_model)
    with torch.no_grad():
        next(policy.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        sampler.sample(requests(sampler, 1), SamplingParams(4))


@pytest.mark.parametrize(
    "wrong", [{"top_p": 0}, {"temperature": -1}, {"top_k": -1}, {"min_p": 1}, {"max_new_tokens": 0}, {"stop": [""]}]
)
def test_bad_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_a_stop_string_may_be_a_special_token(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["a"]})
    tokenizer.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path)
    sampler, _ = make_sampler(str(tmp_path))
    drawn = sampler.sample(requests(sampler, 16), SamplingParams(24, stop=["a"]))
    (letter,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    assert any(c.finish_reason == "stop" for c in drawn)
    assert all((letter in c.token_ids) == (c.finish_reason == "stop") for c in drawn)
