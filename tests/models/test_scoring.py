import pytest
import torch
from transformers import AutoModelForCausalLM

from rlalign.models.policy import Policy, PolicyConfig
from rlalign.models.scoring import token_scores


def batch(vocab: int, generator_seed: int = 0, pad: int = 0):
    """Four rows: prompts of 2 to 5 tokens on the left, responses of 1 to 6 tokens on the right."""
    generator = torch.Generator().manual_seed(generator_seed)
    prompts, responses = [2, 5, 3, 4], [6, 1, 4, 6]
    ids = torch.full((4, 11), pad)
    mask = torch.zeros(4, 11, dtype=torch.bool)
    for row, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, 5 - p : 5 + r] = torch.randint(3, vocab, (p + r,), generator=generator)
        mask[row, 5 - p : 5 + r] = True
    return ids, mask, mask[:, 5:]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_are_those_of_each_row_alone_kf18_kf42(make_model, architecture, temperature):
    model = AutoModelForCausalLM.from_pretrained(make_model(architecture)).eval()
    ids, attention, response = batch(model.config.vocab_size)
    with torch.no_grad():
        got = token_scores(model, ids, attention, response, temperature)
        for row in range(len(ids)):
            real = ids[row][attention[row]]
            count = int(response[row].sum())
            logp = (model(real.unsqueeze(0)).logits[0] / temperature).log_softmax(-1)
            want = torch.stack([logp[t - 1, real[t]] for t in range(len(real) - count, len(real))])
            torch.testing.assert_close(got.logprobs[row, :count], want, atol=1e-5, rtol=1e-5)
            entropy = -(logp.exp() * logp).sum(-1)[len(real) - count - 1 : -1]
            torch.testing.assert_close(got.entropy[row, :count], entropy, atol=1e-4, rtol=1e-4)
            assert not got.logprobs[row, count:].any()
            assert not got.entropy[row, count:].any()


def test_chunks_change_nothing_but_memory_kf88(tiny_model):
    """Values and gradients are those of one chunk, and no tensor has B*T*V elements."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    vocab = model.config.vocab_size
    ids, attention, response = batch(vocab)
    largest = []
    model.get_output_embeddings().register_forward_hook(lambda m, a, out: largest.append(out.numel()))

    def gradient(chunk: int):
        model.zero_grad()
        scores = token_scores(model, ids, attention, response, chunk_tokens=chunk)
        (scores.logprobs.sum() + 0.3 * scores.entropy.square().sum()).backward()
        return scores, {n: p.grad.clone() for n, p in model.named_parameters()}

    whole, whole_gradient = gradient(1024)
    assert max(largest) == int(response.sum()) * vocab
    largest.clear()
    for chunk in (1, 3, 17):
        part, part_gradient = gradient(chunk)
        torch.testing.assert_close(part.logprobs, whole.logprobs, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(part.entropy, whole.entropy, atol=1e-6, rtol=1e-6)
        for name in whole_gradient:
            torch.testing.assert_close(part_gradient[name], whole_gradient[name], atol=1e-5, rtol=1e-5)
    assert max(largest) == 17 * vocab


def test_bfloat16_logits_are_upcast_before_the_softmax_kf17(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    ids, attention, response = batch(model.config.vocab_size)
    with torch.no_grad():
        got = token_scores(model, ids, attention, response)
        logits = model(
            ids, attention_mask=attention.long(), position_ids=(attention.long().cumsum(-1) - 1).clamp(min=0)
        ).logits[:, 4:-1]
    assert got.logprobs.dtype == torch.float32
    want = logits.float().log_softmax(-1).gather(-1, ids[:, 5:, None]).squeeze(-1)
    torch.testing.assert_close(got.logprobs[response], want[response], atol=0.02, rtol=0)
    assert (got.logprobs[response] != got.logprobs[response].bfloat16().float()).any()


def test_what_follows_the_end_token_does_not_matter_kf19_kf38(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    ids, attention, response = batch(model.config.vocab_size)
    other = torch.where(attention, ids, 7)
    with torch.no_grad():
        assert torch.equal(*(token_scores(model, x, attention, response).logprobs for x in (ids, other)))


def test_nothing_to_score_keeps_every_parameter_in_the_graph_kf7_kf83(make_model):
    model = AutoModelForCausalLM.from_pretrained(make_model("qwen2")).eval()  # its head is not tied to the embedding
    ids, attention, response = batch(model.config.vocab_size)
    token_scores(model, ids, attention, torch.zeros_like(response)).logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_packed_rows_do_not_see_each_other_kf47(make_model, architecture):
    from rlalign.data.demonstrations import collate_demonstrations

    policy = Policy(PolicyConfig(make_model(architecture)))
    generator = torch.Generator().manual_seed(0)
    items = []
    for length in (5, 9, 3, 7):
        ids = torch.randint(3, 30, (length,), generator=generator).tolist()
        items.append((ids, [i >= 2 for i in range(length)]))
    with torch.no_grad():
        packed = collate_demonstrations(items, 0, packed_width=14)
        assert packed.input_ids.shape[0] == 2
        scores = policy(packed.input_ids, None, packed.loss_mask[:, 1:], positions=packed.positions).logprobs
        alone = []
        for item in items:
            one = collate_demonstrations([item], 0)
            alone.append(policy(one.input_ids, None, one.loss_mask[:, 1:], positions=one.positions).logprobs)
            logp = policy.model(one.input_ids).logits[0].log_softmax(-1)
            want = torch.stack([logp[t - 1, one.input_ids[0, t]] for t in range(2, len(item[0]))])
            torch.testing.assert_close(alone[-1][0, 1:], want, atol=1e-5, rtol=1e-5)
    got = torch.sort(scores[packed.loss_mask[:, 1:]]).values
    want = torch.sort(torch.cat([a[a != 0] for a in alone])).values
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_a_response_needs_a_prompt(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="no prompt"):
        token_scores(model, ids, ids.bool(), ids.bool())
