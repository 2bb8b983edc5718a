"""Adam at first, descent after: against torch's own, step by step."""

import pytest
import torch

from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.optimizers import AdamThenSGD
from runs import fit, make_run, weights


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n, generator=generator, dtype=torch.float64)) for n in (3, 5)]


def gradient(step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.arange(like.numel(), dtype=torch.float64) + step)


def run(optimizer, weights, steps: range) -> None:
    for step in steps:
        for weight in weights:
            weight.grad = gradient(step, weight)
        optimizer.step()


def test_it_is_adam_and_then_descent_at_a_fraction_of_the_rate():
    ours, theirs = parameters(), parameters()
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    optimizer = AdamThenSGD(ours, adam_steps=4, sgd_factor=0.1, **options)
    adam = torch.optim.AdamW(theirs, **options)
    run(optimizer, ours, range(4))
    run(adam, theirs, range(4))
    for mine, his in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, his, atol=0, rtol=0)
    assert optimizer.state
    run(optimizer, ours, range(4, 7))
    for weight in theirs:
        for step in range(4, 7):
            weight.data = weight.data - 0.001 * (gradient(step, weight) + 0.1 * weight.data)
    for mine, his in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, his, atol=1e-15, rtol=0)
    assert not optimizer.state, "the moments are of no use any more"


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_restored_optimizer_changes_where_the_other_would_have_kf75(stop):
    straight, weights = parameters(), parameters()
    whole = AdamThenSGD(straight, lr=0.01, adam_steps=4)
    run(whole, straight, range(8))
    first = AdamThenSGD(weights, lr=0.01, adam_steps=4)
    run(first, weights, range(stop))
    second = AdamThenSGD(weights, lr=0.01, adam_steps=4)
    second.load_state_dict(first.state_dict())
    run(second, weights, range(stop, 8))
    for mine, his in zip(weights, straight, strict=True):
        torch.testing.assert_close(mine, his, atol=0, rtol=0)


def test_a_closure_is_called_once_in_either_way():
    (weight,) = [torch.nn.Parameter(torch.ones(2))]
    optimizer, calls = AdamThenSGD([weight], adam_steps=1), []

    def closure():
        calls.append(torch.is_grad_enabled())
        weight.grad = torch.ones(2)
        return 3.0

    assert [optimizer.step(closure), optimizer.step(closure)] == [3.0, 3.0]
    assert calls == [True, True]


def test_a_run_counts_optimizer_steps(tiny_model, prompts_file):
    options = {"optimizer": lambda p: AdamThenSGD(p, lr=1e-3, adam_steps=3), "step_size": 8}
    _, _, trainer = fit(tiny_model, prompts_file, trainer={"max_epochs": 2, "gradient_clip_val": 1.0}, **options)
    (optimizer,) = trainer.optimizers
    assert optimizer.param_groups[0]["steps_done"] == trainer.global_step == 4
    assert not optimizer.state


@pytest.mark.parametrize("bad", [{"adam_steps": -1}, {"sgd_factor": 0.0}])
def test_bad_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="AdamThenSGD"):
        AdamThenSGD(parameters(), **bad)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_gradient_of_a_fused_optimizer_is_clipped(tiny_model, prompts_file, precision):
    """Lightning refuses that under any mixed precision; only that with a scaler cannot do it."""

    def trained(clip: float) -> torch.Tensor:
        def fused(parameters):
            return torch.optim.SGD(parameters, lr=1.0, fused=True)

        options = {"precision": precision, "gradient_clip_val": clip}
        module, data, trainer = make_run(tiny_model, prompts_file, GRPO, options, optimizer=fused)
        trainer.fit(module, data)
        return weights(module)

    start = trained(1e-30)
    assert (trained(1e-3) - start).norm() == pytest.approx(1e-3, rel=0.02)
    assert (trained(1e3) - start).norm() > 1e-2


def test_freed_memory_is_kept_where_a_cpu_trains(tiny_model, prompts_file, monkeypatch):
    called = []
    monkeypatch.setattr("rlalign.algorithms.module.keep_freed_memory", lambda: called.append(1))
    fit(tiny_model, prompts_file)
    assert called


# ---- moments of eight bits (bitsandbytes) ----------------------------------------------------------------------------


def test_moments_of_eight_bits_move_weights_about_as_adamw_does():
    optim = pytest.importorskip("bitsandbytes").optim
    torch.manual_seed(0)
    start, target = torch.randn(64, 128), torch.randn(64, 128)
    ours, theirs, small = (torch.nn.Parameter(x.clone()) for x in (start, start, torch.zeros(8)))
    short, long = optim.AdamW8bit([ours, small], lr=0.01), torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.01)
    for _ in range(30):
        ours.grad, theirs.grad, small.grad = ours.detach() - target, theirs.detach() - target, torch.ones(8)
        short.step()
        long.step()
    state = short.state[ours]
    assert (state["state1"].dtype, state["state2"].dtype) == (torch.uint8, torch.uint8)
    assert short.state[small]["state1"].dtype == torch.float32, "what is small keeps long moments"
    moved = theirs.detach() - start
    assert (ours.detach() - theirs.detach()).norm() < 0.1 * moved.norm()


def test_a_run_with_four_bit_weights_and_eight_bit_moments_resumes_to_the_bit(prompts_file, tmp_path):
    optim = pytest.importorskip("bitsandbytes").optim
    policy = {"lora_rank": 32, "lora_dropout": 0.1, "quantization": {"type": "nf4"}, "dtype": "bfloat16"}

    def run(iterations: int, checkpoint: str | None = None):
        options = {"policy": policy, "optimizer": lambda parameters: optim.AdamW8bit(parameters, lr=1e-3)}
        module, data, trainer = make_run("embedded", prompts_file, GRPO, {"max_epochs": iterations}, **options)
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        return module, trainer

    straight, _ = run(3)
    _, trainer = run(2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    values = [value for each in state.values() for value in each.values()]
    inner = [x for value in values for x in (value.values() if isinstance(value, dict) else [value])]
    assert any(torch.is_tensor(x) and x.dtype == torch.uint8 for x in inner)
    resumed, _ = run(3, str(tmp_path / "a.ckpt"))
    trained = {n: p for n, p in straight.policy.named_parameters() if p.requires_grad}
    for name, parameter in resumed.policy.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, trained[name]), name
    assert any("lora_B" in name and bool(p.any()) for name, p in trained.items()), "it has learned something"
