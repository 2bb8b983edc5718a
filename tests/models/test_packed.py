import pytest
import torch
from transformers import AutoModelForCausalLM

from rlalign.models.decoding import ModuleDecoder
from rlalign.models.kind import OtherKind
from rlalign.models.packed import PackedDecoder, pack
from rlalign.models.policy import Policy, PolicyConfig

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [4]]


def whole(model, rows):
    """Logits after each row, computed alone and at once."""
    return torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1] for row in rows])


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda model: pack(model, torch.float32), lambda model: ModuleDecoder(model, 0)])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_whole_rows(make_model, architecture, make):
    model = AutoModelForCausalLM.from_pretrained(make_model(architecture)).eval()
    decoder = make(model)
    rows = [list(PROMPTS[i]) for i in (0, 0, 1, 2, 2, 2)]
    torch.testing.assert_close(decoder.admit(PROMPTS, [2, 1, 3]), whole(model, rows), atol=1e-5, rtol=1e-4)
    generator = torch.Generator().manual_seed(0)
    for step in range(80):  # beyond a block of the cache
        tokens = torch.randint(3, 30, (len(rows),), generator=generator)
        rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
        torch.testing.assert_close(decoder.step(tokens), whole(model, rows), atol=2e-5, rtol=1e-4)
        if step in (3, 40):
            order = decoder.keep(torch.tensor([n for n in range(len(rows)) if n != 1]))
            rows = [rows[n] for n in order.tolist()]
    assert len(decoder) == len(rows) == 4


@torch.no_grad()
def test_rows_come_in_while_others_are_on_their_way(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    decoder = pack(model, torch.float32)
    decoder.admit(PROMPTS[:2], [1, 2])
    decoder.step(torch.tensor([3, 4, 5]))
    order = decoder.keep(torch.tensor([2]))
    assert order.tolist() == [2]
    rows = [[*PROMPTS[1], 5]]
    got = decoder.admit([PROMPTS[2], [3] * 70], [2, 1])
    rows += [list(PROMPTS[2]), list(PROMPTS[2]), [3] * 70]
    torch.testing.assert_close(got, whole(model, rows[1:]), atol=1e-5, rtol=1e-4)
    rows = [[*row, 7] for row in rows]
    torch.testing.assert_close(decoder.step(torch.tensor([7] * 4)), whole(model, rows), atol=1e-5, rtol=1e-4)


def test_as_few_rows_as_possible_are_moved(tiny_model):
    decoder = pack(AutoModelForCausalLM.from_pretrained(tiny_model).eval(), torch.float32)
    decoder.admit([[3, 4]], [6])
    assert decoder.keep(torch.tensor([0, 2, 4, 5])).tolist() == [0, 4, 2, 5]
    assert decoder.keep(torch.tensor([0, 1, 2, 3])).tolist() == [0, 1, 2, 3]
    assert decoder.keep(torch.tensor([], dtype=torch.long)).tolist() == []


@torch.no_grad()
def test_adapters_are_in_the_copy_and_the_model_is_left_alone(tiny_model):
    policy = Policy(PolicyConfig(tiny_model, lora_rank=2))
    before = pack(policy.model, torch.float32).admit([[5, 6]], [1])
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    weights = {name: p.clone() for name, p in policy.named_parameters()}
    after = pack(policy.model, torch.float32).admit([[5, 6]], [1])
    torch.testing.assert_close(after, whole(policy.model, [[5, 6]]), atol=1e-5, rtol=1e-4)
    assert (after - before).abs().max() > 0.01
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, weights[name])


@pytest.mark.parametrize(("architecture", "reason"), [("gpt2", "made of"), ("gemma2", "made of")])
def test_what_it_does_not_know_is_refused(make_model, architecture, reason):
    with pytest.raises(OtherKind, match=reason):
        pack(AutoModelForCausalLM.from_pretrained(make_model(architecture)).eval(), torch.float32)


def test_a_model_that_says_something_else_is_refused(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 1.5)
    with pytest.raises(OtherKind, match="log-probabilities"):
        pack(model, torch.float32)


def test_a_window_is_refused(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    model.config.sliding_window = 4
    with pytest.raises(OtherKind, match="window"):
        PackedDecoder(model, torch.float32)


@torch.no_grad()
def test_bfloat16_is_that_of_autocast(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    with torch.autocast("cpu", torch.bfloat16):
        want = whole(model, PROMPTS)
    exact = whole(model, PROMPTS)
    got = pack(model, torch.bfloat16).admit(PROMPTS, [1, 1, 1])
    assert got.dtype == torch.float32
    assert (got - want).abs().mean() < 2 * (want - exact).abs().mean() + 1e-3
