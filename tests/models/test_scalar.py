"""The model that makes one number of every token: a value function or a reward model."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlalign.models.policy import Policy, PolicyConfig
from rlalign.models.scalar import ScalarModel, at_last_token

ARCHITECTURES = ["llama", "qwen2", "gpt2", "gemma2"]
IDS = torch.tensor([[3, 9, 14, 7, 22, 5], [8, 30, 11, 4, 17, 6]])
MASK = torch.ones_like(IDS).bool()


def padded(left: int, right: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows between columns of padding."""
    return tuple(torch.nn.functional.pad(x, (left, right)) for x in (IDS, MASK))


@pytest.fixture(scope="module")
def reward_model(tiny_model, tmp_path_factory) -> str:
    """A classifier with one label and a head that was trained, so to say; ``<eos>`` pads, too."""
    path = str(tmp_path_factory.mktemp("reward_model"))
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.score.weight)
    model.config.pad_token_id = model.config.eos_token_id
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(path)
    return path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_on_either_side_changes_no_number_kf42_kf48(make_model, architecture):
    model = ScalarModel(make_model(architecture), seed=1)
    want = model(IDS, MASK)
    assert want.shape == (2, 6)
    assert want.std() > 1e-3
    for left, right in ((3, 0), (0, 4), (2, 3)):
        ids, mask = padded(left, right)
        got = model(ids, mask)
        torch.testing.assert_close(got[:, left : left + 6], want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(at_last_token(got, mask), want[:, -1], atol=1e-5, rtol=1e-5)


def test_a_reward_model_says_what_transformers_says(reward_model):
    """At the last real token, an end token too; told by ids, it would be padding where the two are one."""
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_model)
    model = ScalarModel(reward_model)
    ids = IDS.clone()
    ids[0, -1] = ids[1, 2] = theirs.config.eos_token_id
    theirs.config.pad_token_id = 0
    want = torch.cat([theirs(ids[i : i + 1]).logits.flatten() for i in range(2)])
    torch.testing.assert_close(at_last_token(model(ids, MASK), MASK), want)


def test_the_last_token_is_found_by_the_mask_kf48():
    values = torch.arange(8.0).expand(3, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0]]).bool()
    assert at_last_token(values, mask).tolist() == [5, 7, 1]


def test_a_value_is_that_of_the_state_a_token_was_written_in(tiny_model):
    model = ScalarModel(tiny_model)
    values = model(IDS, MASK)[:, -4:-1]
    changed = IDS.clone()
    changed[:, 4] = 12  # the second of three response tokens
    later = model(changed, MASK)[:, -4:-1]
    torch.testing.assert_close(values[:, :2], later[:, :2])
    assert (values[:, 2] - later[:, 2]).abs().min() > 1e-4


def test_a_new_head_starts_from_the_seed_and_an_old_one_is_kept(tiny_model, reward_model):
    torch.manual_seed(9)
    before = torch.rand(1)
    torch.manual_seed(9)
    first = ScalarModel(tiny_model, seed=4).head.weight
    assert torch.equal(torch.rand(1), before), "the draws of others are not moved on"
    assert torch.equal(first, ScalarModel(tiny_model, seed=4).head.weight)
    assert not torch.equal(first, ScalarModel(tiny_model, seed=5).head.weight)
    assert torch.equal(ScalarModel(reward_model, seed=4).head.weight, ScalarModel(reward_model, seed=5).head.weight)


def test_only_the_dropout_before_the_head_is_switched(tiny_model):
    model = ScalarModel(tiny_model, dropout=0.5)
    model.train()
    assert not model.lm.training
    torch.manual_seed(0)
    assert not torch.equal(model(IDS, MASK), model(IDS, MASK))
    model.eval()
    assert torch.equal(model(IDS, MASK), model(IDS, MASK))
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1"):
        ScalarModel(tiny_model, dropout=1.0)


def test_what_it_saves_is_what_transformers_loads(tiny_model, tmp_path):
    model = ScalarModel(tiny_model, seed=2)
    model.lm.save_pretrained(tmp_path)
    assert torch.equal(ScalarModel(str(tmp_path), seed=3)(IDS, MASK), model(IDS, MASK))


def test_values_are_float32_under_autocast_kf17(tiny_model):
    """The head computes in float32: in bfloat16 a value of 0.7 has a resolution of 0.004."""
    model, policy = ScalarModel(tiny_model), Policy(PolicyConfig(tiny_model), with_value_head=True)
    torch.nn.init.normal_(policy.value_head.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for values in (model(IDS, MASK), policy(IDS, MASK, MASK[:, 2:], values="body")[1]):
            assert values.dtype == torch.float32
            assert not torch.equal(values, values.bfloat16().float())


def test_a_model_that_is_none_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        ScalarModel(str(tmp_path / "nowhere"))


# ---- a head on the policy --------------------------------------------------------------------------------------------


def with_head(model: str, **config) -> Policy:
    policy = Policy(PolicyConfig(model, **config), with_value_head=True)
    torch.manual_seed(7)
    torch.nn.init.normal_(policy.value_head.weight)
    torch.nn.init.normal_(policy.value_head.bias)
    return policy


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_pass_gives_the_scores_and_the_values(make_model, architecture):
    policy = with_head(make_model(architecture))
    ids, mask = padded(2, 3)
    response = torch.nn.functional.pad(MASK[:, 2:], (0, 3))
    scores, values = policy(ids, mask, response, values="body")
    want = policy(ids, mask, response)
    assert torch.equal(scores.logprobs, want.logprobs)
    assert torch.equal(scores.entropy, want.entropy)
    states = policy.model.base_model(input_ids=IDS).last_hidden_state
    by_hand = (states * policy.value_head.weight[0]).sum(-1) + policy.value_head.bias
    assert values.shape == (2, 8)
    torch.testing.assert_close(values[:, :5], by_hand[:, 1:], atol=1e-4, rtol=1e-4)  # from the last prompt token on


def test_shared_prompts_have_the_same_values(tiny_model):
    ids = torch.cat([IDS[:1, :3].expand(2, 3), IDS[:, 3:]], 1)
    for width in (1, 3):
        rows = ids[:, : 3 + width]
        mask = torch.ones_like(rows).bool()
        whole, shared = (
            with_head(tiny_model, share_prompts=share)(rows, mask, mask[:, 3:], values="body")
            for share in (False, True)
        )
        torch.testing.assert_close(shared[1], whole[1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(shared[0].logprobs, whole[0].logprobs, atol=1e-4, rtol=1e-4)


def test_the_gradient_of_values_ends_at_the_head_where_asked(tiny_model):
    policy = with_head(tiny_model)
    for gradient, reaches_body in (("head", False), ("body", True)):
        policy.zero_grad()
        policy(IDS, MASK, MASK[:, 2:], values=gradient)[1].sum().backward()
        assert policy.value_head.weight.grad.abs().max() > 0
        assert any(p.grad is not None and p.grad.any() for p in policy.lm.parameters()) == reaches_body


def test_a_new_head_on_the_policy_says_nothing_yet(tiny_model):
    policy = Policy(PolicyConfig(tiny_model), with_value_head=True)
    assert not policy(IDS, MASK, MASK[:, 2:], values="body")[1].any()
    assert Policy(PolicyConfig(tiny_model)).value_head is None
    with pytest.raises(RuntimeError, match="built without a value head"):
        Policy(PolicyConfig(tiny_model))(IDS, MASK, MASK[:, 2:], values="head")
