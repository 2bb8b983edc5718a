import pytest
import torch

from rlalign.models.flat import FlatRows
from rlalign.models.policy import Policy, PolicyConfig, load_model
from rlalign.models.scoring import can_lay_flat, final_states, flat_states, token_scores


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


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize("kernel", ["products", "sdpa"])
def test_a_shared_prompt_changes_neither_scores_nor_gradients(
    make_model, architecture, num_tokens, kernel, monkeypatch
):
    model = load_model(PolicyConfig(make_model(architecture)))
    assert can_lay_flat(model)
    if kernel == "sdpa":
        monkeypatch.setattr("rlalign.models.attention._MOST_SCORES", 0)
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


def test_each_distinct_prompt_is_computed_once_and_no_padding(tiny_model):
    model = load_model(PolicyConfig(tiny_model))
    ids, attention, response = grouped(7)
    tokens = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: tokens.append(inputs[0].shape))
    rows = FlatRows.of(ids, attention, 7)
    flat_states(model, ids, attention, rows)
    assert tokens == [(1, 2 + 9 + 5 + int(response.sum()) - 12)]
    assert [block.longest for block in rows.blocks] == [9, 5, 2]  # prompts, then responses: none is half as long


@pytest.mark.parametrize("kernel", ["products", "sdpa"])
def test_tokens_that_fill_up_to_a_round_number_change_nothing(tiny_model, kernel, monkeypatch):
    model = load_model(PolicyConfig(tiny_model))
    ids, attention, response = grouped(7)
    if kernel == "sdpa":
        monkeypatch.setattr("rlalign.models.attention._MOST_SCORES", 0)
    tokens, found = [], []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: tokens.append(inputs[0].shape[1]))
    for many in (512, 1):
        monkeypatch.setattr("rlalign.models.scoring._MANY", many)
        logprobs = token_scores(model, ids, attention, response, share_prompts=True).logprobs
        found.append((logprobs, gradients(model, logprobs.square().sum())))
    assert tokens[0] % 32
    assert tokens[1] == -(-tokens[0] // 32) * 32
    torch.testing.assert_close(*(logprobs for logprobs, _ in found), atol=1e-6, rtol=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_last", [False, True])
def test_states_are_those_of_whole_rows(tiny_model, with_last):
    model = load_model(PolicyConfig(tiny_model))
    ids, attention, response = grouped(7)
    with torch.no_grad():
        got, want = (
            final_states(model, ids, attention, 7, share_prompts=s, with_last=with_last) for s in (True, False)
        )
    real = torch.cat([torch.ones_like(response[:, :1]), response], 1) if with_last else response
    torch.testing.assert_close(got[real], want[real], atol=1e-5, rtol=1e-5)


def test_a_row_without_a_prompt_or_a_response(tiny_model):
    policy = Policy(PolicyConfig(tiny_model, share_prompts=True))
    ids, attention, response = grouped(7)
    attention[3, 9:] = response[3] = False
    want = policy(ids, attention, response).logprobs
    assert not want[3].any()
    attention[3] = False
    torch.testing.assert_close(policy(ids, attention, response).logprobs, want, atol=1e-5, rtol=1e-5)


def test_with_checkpoints_and_autocast(tiny_model):
    ids, attention, response = grouped(7)
    found = []
    for options in ({}, {"activation_checkpointing": True}):
        policy = Policy(PolicyConfig(tiny_model, share_prompts=True, **options))
        policy.model.train()
        found.append(gradients(policy, policy(ids, attention, response).logprobs.sum()))
    torch.testing.assert_close(*found)
    with torch.autocast("cpu", torch.bfloat16):
        rough = gradients(policy, policy(ids, attention, response).logprobs.sum())
    for name, want in found[0].items():
        assert (rough[name] - want).norm() < 0.05 * want.norm(), name


def test_prompts_that_differ_in_padding_only_are_told_apart(tiny_model):
    """The padding token may also be a token of the prompt: 0 0 5 after nothing, and after a 0."""
    model = load_model(PolicyConfig(tiny_model))
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
    assert tokens == [12 * 16, 2 + 9 + 5 + int(response.sum()) - 12]


def test_what_cannot_share_prompts_is_refused_by_name_and_does_not_by_default(make_model, tiny_model):
    for path, options in ((make_model("gemma2"), {}), (tiny_model, {"attn_implementation": "eager"})):
        assert not Policy(PolicyConfig(path, **options)).shares_prompts
        with pytest.raises(ValueError, match="share_prompts does not go with"):
            Policy(PolicyConfig(path, share_prompts=True, **options))
    assert Policy(PolicyConfig(tiny_model)).shares_prompts
    assert not Policy(PolicyConfig(tiny_model, dropout=True)).shares_prompts


def test_a_model_whose_attention_is_not_told_is_found_out(tiny_model, monkeypatch):
    model = load_model(PolicyConfig(tiny_model))
    monkeypatch.setattr(FlatRows, "attend", lambda rows, attend, *states: attend(*states, None))
    assert not can_lay_flat(model)
