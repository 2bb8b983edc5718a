"""A reference that follows the policy."""

import numpy as np
import pytest
import torch

from distributed import run_distributed
from rlalign.algorithms.sft import SFT
from rlalign.callbacks import ReferenceSync
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.models.reference import pairs_of_weights, update_reference
from runs import fit
from short_runs import Record, checkpoint, run
from strategies import make_strategy


def whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().flatten().clone()


def both(trainer, module):
    """All weights of the reference, and those of the policy."""
    pairs = pairs_of_weights(module.policy)
    return torch.cat([whole(r) for r, _ in pairs]), torch.cat([whole(p) for _, p in pairs])


def trained(model, prompts, folder, sync, iterations=4, resume=None, **module):
    record = Record(both)
    options = {"kl_coef": 0.1} | module
    runner, fitted, _, _ = run(model, prompts, folder, [sync, record], iterations, resume, lr=0.003, module=options)
    return record.seen, runner, fitted


@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_the_reference_moves_towards_the_policy_every_so_many_iterations(tiny_model, prompts_file, tmp_path, alpha):
    seen, _, _ = trained(tiny_model, prompts_file, tmp_path, ReferenceSync(2, alpha))
    start = both(None, type("M", (), {"policy": Policy(PolicyConfig(tiny_model), with_reference=True)}))[0]
    assert torch.equal(seen[0][0], start)
    after = alpha * seen[1][1].double() + (1 - alpha) * start.double()
    assert torch.allclose(seen[1][0].double(), after, rtol=0, atol=1e-6)
    assert torch.equal(seen[2][0], seen[1][0])
    after = alpha * seen[3][1].double() + (1 - alpha) * after
    assert torch.allclose(seen[3][0].double(), after, rtol=0, atol=1e-6)
    assert not torch.equal(seen[3][0], seen[1][0])


def test_the_kl_is_to_the_reference_as_it_is(tiny_model, prompts_file, tmp_path):
    def kl(trainer, module):
        return float(trainer.callback_metrics["train/kl_ref"])

    seen = []
    for name, callbacks in (("fixed", []), ("moving", [ReferenceSync(1)])):
        record = Record(kl)
        run(tiny_model, prompts_file, tmp_path / name, [*callbacks, record], module={"kl_coef": 0.1}, lr=0.003)
        seen.append(record.seen)
    fixed, moving = seen
    assert fixed[0] == moving[0] == 0
    assert fixed[1] > 0
    assert moving[1:] == [0, 0]  # one step an iteration: the policy that samples is the reference


def test_the_moved_reference_is_in_the_checkpoint_kf78(tiny_model, prompts_file, tmp_path):
    seen, _, _ = trained(tiny_model, prompts_file, tmp_path / "a", ReferenceSync(2))
    path = checkpoint(tmp_path / "a", 3)
    again, _, _ = trained(tiny_model, prompts_file, tmp_path / "b", ReferenceSync(2), resume=path)
    assert torch.equal(again[0][0], seen[2][0]), "that of the checkpoint, not the start"
    for one, two in zip(again[-1], seen[-1], strict=True):
        assert torch.equal(one, two)


def test_adapters_have_a_reference_of_their_own_that_is_copied_and_kept(tiny_model, prompts_file, tmp_path):
    lora = {"policy": PolicyConfig(tiny_model, lora_rank=2)}
    seen, _, module = trained(tiny_model, prompts_file, tmp_path / "a", ReferenceSync(2), **lora)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    assert names
    assert not any(".reference." in name for name in names)
    assert not torch.equal(*seen[0])
    assert torch.equal(*seen[1])
    assert torch.equal(seen[2][0], seen[1][0])
    assert torch.equal(*seen[3])
    again, _, _ = trained(
        tiny_model, prompts_file, tmp_path / "b", ReferenceSync(2), resume=checkpoint(tmp_path / "a", 3), **lora
    )
    for one, two in zip(again[-1], seen[-1], strict=True):
        assert torch.equal(one, two)


def test_a_new_reference_adapter_adds_nothing(tiny_model):
    policy = Policy(PolicyConfig(tiny_model, lora_rank=2), with_reference=True, moves_reference=True)
    plain = Policy(PolicyConfig(tiny_model), with_reference=True)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    ids = torch.arange(1, 9)[None]
    inputs = (ids, torch.ones_like(ids).bool(), torch.ones(1, 7).bool())
    before = policy(*inputs, reference=True).logprobs
    assert torch.equal(before, plain(*inputs, reference=True).logprobs)
    update_reference(policy)
    after = policy(*inputs, reference=True).logprobs
    assert torch.equal(after, policy(*inputs).logprobs.detach())
    assert not torch.equal(after, before)


def on_rank(rank, model, prompts, strategy):
    sync, record = ReferenceSync(1, 0.5), Record(both)
    trainer = {"strategy": make_strategy(strategy), "devices": 2, "max_epochs": 2, "callbacks": [sync, record]}
    fit(model, prompts, trainer=trainer, kl_coef=0.1)
    return [weights.numpy() for weights in record.seen[-1]]  # no files of a rank that has ended


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_sharded_weights_move_like_whole_ones(strategy, tiny_model, prompts_file):
    record = Record(both)
    trainer = {"max_epochs": 2, "callbacks": [ReferenceSync(1, 0.5), record]}
    fit(tiny_model, prompts_file, trainer=trainer, kl_coef=0.1)
    for rank in run_distributed(on_rank, tiny_model, prompts_file, strategy):
        for got, want in zip(rank, record.seen[-1], strict=True):
            assert np.allclose(got, want.numpy(), atol=1e-4)
        assert not np.array_equal(rank[0], rank[1])


def test_what_cannot_be_moved_is_refused(tiny_model, prompts_file, tmp_path):
    for every, alpha in ((0, 1.0), (1, 0.0), (1, 1.1), (1, float("nan"))):
        with pytest.raises(ValueError, match="expected every >= 1 and alpha in"):
            ReferenceSync(every, alpha)
    with pytest.raises(ValueError, match="GRPO has no reference as it is configured"):
        trained(tiny_model, prompts_file, tmp_path, ReferenceSync(1), kl_coef=0.0)
    with pytest.raises(ValueError, match="use alpha=1 with LoRA"):
        trained(tiny_model, prompts_file, tmp_path, ReferenceSync(1, 0.5), policy=PolicyConfig(tiny_model, lora_rank=2))
    with pytest.raises(ValueError, match="SFT has no reference as it is configured"):
        ReferenceSync(1).on_fit_start(None, SFT(policy=PolicyConfig(tiny_model)))
    with pytest.raises(ValueError, match="there is no reference with weights of its own"):
        update_reference(Policy(PolicyConfig(tiny_model, lora_rank=2), with_reference=True))
    policy = Policy(PolicyConfig(tiny_model), with_reference=True)
    next(policy.lm.parameters()).ds_id = 0
    with pytest.raises(ValueError, match="ZeRO-3"):
        update_reference(policy)
