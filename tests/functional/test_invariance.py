"""The gradient of an optimizer step does not depend on how the step is cut into minibatches, ranks and padding."""

import pytest
import torch

from rlalign.functional.divergences import entropy_from_logits, kl_k1, kl_k2, kl_k3
from rlalign.functional.logprobs import token_logprobs
from rlalign.functional.policy_losses import clipped_surrogate, truncated_importance_weights
from rlalign.functional.reductions import masked_mean, reduce_loss

ROWS, TOKENS, FEATURES, VOCABULARY = 8, 6, 3, 5
LENGTHS = [6, 1, 4, 0, 5, 2, 3, 6]
REDUCTIONS = ["token", "sequence", "constant"]


def per_token_loss(name, weight, batch):
    """Loss of each token of a linear policy."""
    logits = batch["features"] @ weight
    logprobs = token_logprobs(logits, batch["ids"])
    surrogate = (logprobs, batch["old"], batch["advantages"], batch["mask"])
    match name:
        case "surrogate":
            return clipped_surrogate(*surrogate, 0.2, 0.28)
        case "dual_clip":
            return clipped_surrogate(*surrogate, 0.2, 0.28, dual_clip=1.5)
        case "gspo":
            return clipped_surrogate(*surrogate, 0.2, 0.28, level="sequence")
        case "importance_weighted":
            weights = truncated_importance_weights(batch["old"], batch["ref"], batch["mask"], 1.2)
            return weights * clipped_surrogate(*surrogate)
        case "entropy":
            return -entropy_from_logits(logits)
    return {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[name](logprobs, batch["ref"])


LOSSES = ["surrogate", "dual_clip", "gspo", "importance_weighted", "k1", "k2", "k3", "entropy"]


@pytest.fixture
def step():
    g = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    features, weight = normal(ROWS, TOKENS, FEATURES), normal(FEATURES, VOCABULARY)
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g)
    batch = {
        "features": features,
        "ids": ids,
        "old": token_logprobs(features @ (weight + 0.3 * normal(FEATURES, VOCABULARY)), ids),
        "ref": token_logprobs(features @ (weight + 0.3 * normal(FEATURES, VOCABULARY)), ids),
        "advantages": normal(ROWS, 1),
        "mask": torch.arange(TOKENS) < torch.tensor(LENGTHS).unsqueeze(1),
    }
    return batch, weight


def padded(batch, columns, rows=0):
    """More columns and rows, full of junk but for the mask."""
    junk = {"ids": 1, "mask": False}
    wider = {}
    for name, x in batch.items():
        widths = [0, 0] * (x.ndim - 2) + [0, columns if name != "advantages" else 0, 0, rows]
        wider[name] = torch.nn.functional.pad(x, widths, value=junk.get(name, -7.0))
    return wider


def cut(batch, minibatch_size, ranks, columns):
    """The minibatches of all ranks, all of one size, short of data or not."""
    for rank in range(ranks):
        share = {name: x[rank::ranks] for name, x in batch.items()}
        for start in range(0, ROWS // ranks, minibatch_size):
            part = {name: x[start : start + minibatch_size] for name, x in share.items()}
            yield padded(part, columns, minibatch_size - len(part["mask"]))


def gradient(loss, weight):
    weight = weight.clone().requires_grad_()
    return torch.autograd.grad(loss(weight), weight)[0]


def reduce_step(name, reduction, weight, parts, count):
    max_tokens = 10 if reduction == "constant" else None
    return sum(reduce_loss(per_token_loss(name, weight, p), p["mask"], reduction, count, max_tokens) for p in parts)


@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("minibatch_size", [8, 4, 2, 1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_of_a_step_does_not_depend_on_its_cut_kf1_kf2_kf5(
    step, name, reduction, minibatch_size, ranks, columns
):
    batch, weight = step
    count = sum(LENGTHS) if reduction == "token" else sum(n > 0 for n in LENGTHS)
    whole = gradient(lambda w: reduce_step(name, reduction, w, [batch], count), weight)
    parts = list(cut(batch, minibatch_size, ranks, columns))
    got = gradient(lambda w: reduce_step(name, reduction, w, parts, count), weight)
    assert whole.abs().max() > 1e-3
    assert (got - whole).abs().max() < 1e-10


@pytest.mark.parametrize("name", LOSSES)
def test_averaging_minibatch_means_does_depend_on_the_cut(step, name):
    batch, weight = step

    def mean_of_means(w, size):
        parts = list(cut(batch, size, 1, 0))
        return sum(masked_mean(per_token_loss(name, w, p), p["mask"]) for p in parts) / len(parts)

    whole, pieces = (gradient(lambda w, n=n: mean_of_means(w, n), weight) for n in (8, 2))
    assert (whole - pieces).abs().max() > 1e-3


def test_every_branch_of_the_surrogate_is_reached(step):
    batch, weight = step
    losses = {name: per_token_loss(name, weight, batch) for name in ("surrogate", "dual_clip", "gspo")}
    assert (losses["surrogate"] - losses["dual_clip"]).abs().max() > 1e-3
    assert (losses["surrogate"] - losses["gspo"]).abs().max() > 1e-3
