import pytest
import torch
from transformers import AutoModelForCausalLM

from rlalign.models.policy import Policy, PolicyConfig
from rlalign.models.scoring import shared_prompt_states, token_scores


def grouped(num_tokens: int, group_size: int = 4):
    """Three prompts of 2, 9 and 5 tokens, shuffled rows of a group each, responses of 1 to ``num_tokens`` tokens."""
    generator = torch.Generator().manual_seed(0)
    width, lengths = 9, (2, 9, 5)
    ids = torch.zeros(3 * group_size, width + num_tokens, dtype=torch.long)
    mask = torch.zeros_like(ids).bool()
    for prompt, length in enumerate(lengths):
        tokens = torch.randint(3, 30, (length,), generator=generator)
        for sample in range(group_size):
            row, count = prompt * group_size + sample, 1 + (prompt + sample) % num_tokens
            ids[row, width - length : width] = tokens
            ids[row, width : width + count] = torch.randint(3, 30, (count,), generator=generator)
            mask[row, width - length : width + count] = True
    order = torch.randperm(len(ids), generator=generator)
    return ids[order], mask[order], mask[order][:, width:]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma2"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_a_shared_prompt_changes_neither_scores_nor_gradients(make_model, architecture, num_tokens):
    model = AutoModelForCausalLM.from_pretrained(make_model(architecture)).eval()
    ids, attention, response = grouped(num_tokens)
    weights = torch.rand(response.shape, generator=torch.Generator().manual_seed(1))
    scores = token_scores(model, ids, attention, response, share_prompts=True)
    got = gradients(model, (scores.logprobs * weights).sum())
    alone = [token_scores(model, i[None], a[None], r[None]) for i, a, r in zip(ids, attention, response, strict=True)]
    want = torch.cat([one.logprobs for one in alone])
    torch.testing.assert_close(scores.logprobs, want, atol=1e-5, rtol=1e-5)
    expected = gradients(model, (want * weights).sum())
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=1e-4, rtol=1e-4)


def test_each_distinct_prompt_is_computed_once(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    ids, attention, _ = grouped(7)
    tokens = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: tokens.append(inputs[0].shape))
    shared_prompt_states(model, ids, attention, 7)
    assert [tuple(shape) for shape in tokens] == [(3, 9), (12, 6)]


def test_prompts_that_differ_in_padding_only_are_told_apart(tiny_model):
    """The padding token may also be a token of the prompt: 0 0 5 after nothing, and after a 0."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    ids = torch.tensor([[0, 5, 7, 8]] * 4)
    attention = torch.tensor([[False, True, True, True]] * 2 + [[True] * 4] * 2)
    with torch.no_grad():
        got = token_scores(model, ids, attention, attention[:, 2:], share_prompts=True).logprobs
        short = token_scores(model, ids[:1, 1:], attention[:1, 1:], attention[:1, 2:]).logprobs
    torch.testing.assert_close(got[:2], short.expand(2, -1))
    assert (got[2] - got[0]).abs().max() > 0.01


def test_a_policy_shares_prompts_where_it_is_told_to(tiny_model):
    ids, attention, response = grouped(7)
    found, tokens = [], []
    for share in (False, True):
        policy = Policy(PolicyConfig(tiny_model, share_prompts=share))
        count = []
        policy.model.get_input_embeddings().register_forward_hook(lambda m, a, out, n=count: n.append(a[0].numel()))
        found.append(policy(ids, attention, response).logprobs)
        tokens.append(sum(count))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
    assert tokens == [12 * 16, 3 * 9 + 12 * 6]


def test_activation_checkpointing_is_refused(tiny_model):
    with pytest.raises(ValueError, match="share_prompts"):
        PolicyConfig(tiny_model, share_prompts=True, activation_checkpointing=True)
