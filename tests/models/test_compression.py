import pytest
import torch

from rlalign.models.compression import compress, compressed_activations, restore
from rlalign.models.policy import Policy, PolicyConfig


@pytest.mark.parametrize(("to", "bound"), [("bfloat16", 2**-8), ("int8", 0.5 / 127)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_restored_is_near(to, bound, dtype):
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] = 0
    back = restore(compress(x, to))
    assert back.dtype == dtype
    largest = x.float().abs().amax(-1, keepdim=True)
    assert ((back - x).abs().float() <= (bound + (2**-8 if dtype == torch.bfloat16 else 0)) * largest + 1e-12).all()


def rows():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 30, (40, 30), generator=generator)
    return ids, torch.ones_like(ids).bool(), torch.ones(40, 20, dtype=torch.bool)


def learned(model: str, autocast: bool = False, **options):
    """Log-probabilities, gradients and bytes kept for the backward pass."""
    policy = Policy(PolicyConfig(model, **options))
    kept: dict[int, int] = {}
    own = {p.data_ptr() for p in policy.parameters()}
    compressed = []

    def note(x):
        compressed.append(x)  # alive, so that none is counted where another was
        if x.data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    plain = compress

    def noted(x, to):
        short = plain(x, to)
        for part in short[:2]:
            if part is not None:
                note(part)
        return short

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        patch.setattr("rlalign.models.compression.compress", noted)
        if not options.get("compress_activations"):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                logprobs = policy(*rows()).logprobs
        else:
            logprobs = policy(*rows()).logprobs
    weights = torch.rand(logprobs.shape, generator=torch.Generator().manual_seed(1)) - 0.5
    (logprobs * weights).sum().backward()
    return logprobs.detach(), [p.grad for p in policy.parameters()], sum(kept.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("to", "apart"), [("bfloat16", 0.02), ("int8", 0.1)])
def test_log_probabilities_are_the_same_and_gradients_near(tiny_model, to, apart, autocast):
    want, gradients, size = learned(tiny_model, autocast)
    got, rough, smaller = learned(tiny_model, autocast, compress_activations=to)
    assert torch.equal(got, want)
    for one, other in zip(rough, gradients, strict=True):
        assert (one - other).norm() <= apart * other.norm()
    assert any(not torch.equal(one, other) for one, other in zip(rough, gradients, strict=True))
    if not autocast:
        assert smaller < (0.7 if to == "bfloat16" else 0.5) * size


def test_weights_logits_and_statistics_stay(tiny_model):
    policy = Policy(PolicyConfig(tiny_model))
    kept = []
    with compressed_activations(policy.model, "int8"):
        weight = policy.model.base_model.layers[0].mlp.up_proj.weight.bfloat16()
        x = torch.randn(300, weight.shape[1], requires_grad=True)
        logits = torch.randn(300, policy.model.config.vocab_size, requires_grad=True)
        narrow = torch.randn(5000, 1, requires_grad=True)
        for tensor in (logits, narrow, x):
            kept.append((tensor, (tensor * tensor).grad_fn))
        product = x.bfloat16() @ weight.T
    for tensor, node in kept[:2]:
        assert torch.equal(node._saved_self, tensor)
    assert not torch.equal(kept[2][1]._saved_self, x)
    assert torch.equal(product.grad_fn._saved_mat2, weight.T)


def test_with_checkpoints_is_refused():
    with pytest.raises(ValueError, match="use one of them"):
        PolicyConfig("embedded", activation_checkpointing=True, compress_activations="int8")
