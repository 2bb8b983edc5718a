"""Gradients sent in fewer bytes: what each hook computes, what it sends, and that a resumed run goes on to the bit."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from torch.nn.parallel import DistributedDataParallel

from distributed import run_distributed
from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.optimizers import OneBitAdam
from rlalign.callbacks import Performance
from rlalign.strategies.compressed import NCCL, CompressedDDPStrategy
from rlalign.strategies.hooks import MeanHook, OneBitHook, PowerSGDHook, pack_signs, unpack_signs
from runs import make_run, weights

SHAPES = {"weight": (24, 40), "bias": (24,), "deep": (6, 5, 4)}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())


class Toy(torch.nn.Module):
    """Parameters whose gradients are what they are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((parameter * factors[name]).sum() for name, parameter in self.named_parameters())


def gradients_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sizes_like(parameter: torch.Tensor) -> torch.Tensor:
    """Very different ones, and the first is 0."""
    return torch.linspace(-4, 2, parameter.numel()).exp().sub(math.exp(-4)).view(parameter.shape)


def make_hook(kind: str, names: dict) -> MeanHook:
    if kind == "onebit":
        return OneBitHook(names, lambda: True, lambda parameter: sizes_like(parameter))
    if kind == "powersgd":
        return PowerSGDHook(names, 1, 2)
    return MeanHook({"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}[kind])


def averaged(rank: int, kind: str, steps: int, bucket_mb: float) -> tuple[list, float, float]:
    """The gradients after each step, as lists; bytes sent, and plain ones."""
    dist.init_process_group("gloo")
    toy = Toy()
    model = DistributedDataParallel(toy, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    hook = make_hook(kind, {parameter: name for name, parameter in toy.named_parameters()})
    model.register_comm_hook(None, hook.begin)
    found = []
    for step in range(steps):
        model.zero_grad()
        model(gradients_of(rank, step)).backward()
        found.append({name: p.grad.tolist() for name, p in toy.named_parameters()})
    return found, hook.sent, hook.plain


def mean_of(step: int, name: str, world: int = 2) -> torch.Tensor:
    return sum(gradients_of(rank, step)[name] for rank in range(world)) / world


@pytest.mark.parametrize("bucket_mb", [25, 0.001])
@pytest.mark.parametrize(("kind", "tolerance", "share"), [("none", 1e-7, 1), ("fp16", 2e-3, 0.5), ("bf16", 2e-2, 0.5)])
def test_shorter_types_give_the_mean_and_send_half(kind, tolerance, share, bucket_mb):
    ranks = run_distributed(averaged, kind, 3, bucket_mb)
    for found, sent, plain in ranks:
        assert plain == 3 * 4 * NUMEL, "two ranks send as much as they have"
        assert sent == share * plain
        for step, gradients in enumerate(found):
            for name, gradient in gradients.items():
                torch.testing.assert_close(torch.tensor(gradient), mean_of(step, name), atol=tolerance, rtol=tolerance)
    assert ranks[0][0] == ranks[1][0]


@pytest.mark.parametrize("bucket_mb", [25, 0.001])
def test_one_bit_is_the_mean_of_signs_and_scales_and_errors_come_later(bucket_mb):
    ranks = run_distributed(averaged, "onebit", 3, bucket_mb)
    errors = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in ranks]
    for step in range(3):
        for name, shape in SHAPES.items():
            sent = []
            for rank, error in enumerate(errors):
                size = sizes_like(error[name])
                whole = (gradients_of(rank, step)[name] / size).nan_to_num(0, 0, 0) + error[name]
                rows = whole.reshape(shape[0], -1) if len(shape) > 1 else whole.reshape(1, -1)
                signs = torch.where(rows >= 0, 1.0, -1.0)
                sent.append((signs * rows.abs().mean(1, keepdim=True)).view(shape))
                error[name] = whole - sent[-1]
            for found, _, _ in ranks:
                got = torch.tensor(found[step][name])
                torch.testing.assert_close(got, (sent[0] + sent[1]) / 2 * size, atol=1e-5, rtol=1e-5)
    scales = 24 + 1 + 6
    assert all(3 * (NUMEL // 8 + 4 * scales) <= sent <= 3 * (NUMEL // 8 + 4 * scales + 3) for _, sent, _ in ranks)


def test_powersgd_begins_after_the_warm_up_and_finds_the_low_rank():
    ranks = run_distributed(averaged, "powersgd", 30, 25)
    for found, sent, plain in ranks:
        for name in SHAPES:
            torch.testing.assert_close(torch.tensor(found[0][name]), mean_of(0, name), atol=1e-6, rtol=0)
        for step in range(1, 30):
            torch.testing.assert_close(torch.tensor(found[step]["bias"]), mean_of(step, "bias"), atol=1e-6, rtol=0)
            assert torch.linalg.matrix_rank(torch.tensor(found[step]["weight"]), rtol=1e-4) <= 2
        thin = 2 * (24 + 40) + 24 + 2 * (6 + 20)
        assert sent == 4 * NUMEL + 29 * 4 * thin
        assert plain == 30 * 4 * NUMEL
    assert ranks[0][0] == ranks[1][0]


@pytest.mark.parametrize("kind", ["onebit", "powersgd"])
def test_nothing_is_lost_over_many_steps(kind):
    steps = 60
    ranks = run_distributed(averaged, kind, steps, 25)
    got = sum(torch.tensor(gradients["weight"]) for gradients in ranks[0][0])
    want = sum(mean_of(step, "weight") for step in range(steps))
    single = torch.tensor(ranks[0][0][-1]["weight"]) - mean_of(steps - 1, "weight")
    # Without feedback what each step loses would add up like noise does: to sqrt(60) times that of one.
    assert (got - want).norm() < 5 * single.norm()


def test_signs_survive_packing():
    x = torch.randn(21)
    x[3] = 0.0
    packed = pack_signs(x)
    assert packed.dtype == torch.uint8
    assert len(packed) == 3
    assert torch.equal(unpack_signs(packed, 21, torch.float32), torch.where(x >= 0, 1.0, -1.0))


# ---- runs ------------------------------------------------------------------------------------------------------------

OPTIONS = {"powersgd": {"rank": 1, "warmup_steps": 1}}


def one_bit_adam(parameters):
    return OneBitAdam(parameters, lr=0.01, warmup_steps=1)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def run(rank: int, model: str, prompts: str, kind: str, folder: str, iterations: int, resume: str | None, other=None):
    """Weights after some iterations, what hooks remember, and what was logged of bytes."""
    strategy = CompressedDDPStrategy(
        other or kind, bucket_cap_mb=1, process_group_backend="gloo", **({} if other else OPTIONS.get(kind, {}))
    )
    trainer = {"strategy": strategy, "devices": dist_world(), "max_epochs": iterations, "callbacks": [Performance()]}
    options = {"optimizer": one_bit_adam if kind == "onebit" else adam, "step_size": 8}
    module, data, fitted = make_run(model, prompts, GRPO, trainer, **options)
    fitted.fit(module, data, ckpt_path=resume, weights_only=True)
    path = f"{folder}/{kind}-{iterations}.ckpt"
    if resume is None:
        fitted.save_checkpoint(path)
    mib = [float(fitted.callback_metrics[f"perf/{name}"]) for name in ("sent_mib", "sent_plain_mib")]
    return weights(module).double().sum().item(), weights(module)[::97].tolist(), mib


def dist_world() -> int:
    import os

    return int(os.environ["WORLD_SIZE"])


@pytest.mark.parametrize("kind", ["none", "fp16", "bf16", "powersgd", "onebit"])
def test_a_run_with_each_and_its_resumption_to_the_bit(tiny_model, prompts_file, tmp_path, kind):
    arguments = (tiny_model, prompts_file, kind, str(tmp_path))
    straight = run_distributed(run, *arguments, 3, None)
    run_distributed(run, *arguments, 2, None)
    resumed = run_distributed(run, *arguments, 3, str(tmp_path / f"{kind}-2.ckpt"))
    assert straight[0][:2] == straight[1][:2], "ranks have the same weights"
    assert [each[:2] for each in resumed] == [each[:2] for each in straight]
    sent, plain = straight[0][2]
    assert plain > 0
    assert {"none": 1, "fp16": 0.5, "bf16": 0.5}.get(kind, sent / plain) == pytest.approx(sent / plain)
    assert sent < 0.5 * plain or kind in ("none", "fp16", "bf16")


def rolled_back(rank: int, model: str, prompts: str, kind: str, folder: str) -> tuple[list, list, list]:
    """Sums of what a hook remembers: when it is saved, an iteration later, and after the checkpoint was read again."""
    path = f"{folder}/rollback.ckpt"
    sums: list[list[float]] = []

    def note(trainer) -> None:
        state = trainer.strategy.hook.state()["errors"]
        sums.append([float(state[name].sum()) for name in sorted(state)])

    class Rolls(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            note(trainer)
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)
            if trainer.current_epoch == 2:
                trainer.strategy.load_checkpoint(path, weights_only=True)
                note(trainer)

    strategy = CompressedDDPStrategy(kind, process_group_backend="gloo", **OPTIONS.get(kind, {}))
    trainer = {"strategy": strategy, "devices": dist_world(), "max_epochs": 3, "callbacks": [Rolls()]}
    options = {"optimizer": one_bit_adam if kind == "onebit" else adam, "step_size": 8}
    module, data, fitted = make_run(model, prompts, GRPO, trainer, **options)
    fitted.fit(module, data)
    return tuple(sums[1:])


@pytest.mark.parametrize("kind", ["powersgd", "onebit"])
def test_a_rollback_brings_back_what_hooks_remembered(tiny_model, prompts_file, tmp_path, kind):
    ranks = run_distributed(rolled_back, tiny_model, prompts_file, kind, str(tmp_path))
    for saved, later, back in ranks:
        assert saved == back
        assert saved != later
    assert ranks[0] != ranks[1], "each has its own"


def test_what_a_compression_lost_is_not_taken_by_another_run(tiny_model, prompts_file, tmp_path):
    arguments = (tiny_model, prompts_file, "powersgd", str(tmp_path))
    run_distributed(run, *arguments, 2, None)
    path = str(tmp_path / "powersgd-2.ckpt")
    with pytest.raises(RuntimeError, match="powersgd compression lost on 2 ranks, and this run has none on 2"):
        run_distributed(run, *arguments, 3, path, "none")
    with pytest.raises(RuntimeError, match="powersgd compression lost on 2 ranks, and this run has powersgd on 1"):
        run_distributed(run, *arguments, 3, path, world=1)


def test_one_bit_needs_its_optimizer(tiny_model, prompts_file, tmp_path):
    with pytest.raises(RuntimeError, match="class_path: rlalign.algorithms.optimizers.OneBitAdam".replace(".", r"\.")):
        run_distributed(run, tiny_model, prompts_file, "fp16", str(tmp_path), 1, None, "onebit")


def test_bucket_size_reaches_ddp():
    assert CompressedDDPStrategy(bucket_cap_mb=7)._ddp_kwargs["bucket_cap_mb"] == 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compression": "fp16", "rank": 2}, "those of compression=powersgd"),
        ({"compression": "powersgd", "rank": 0}, "at least 1"),
        ({"bucket_cap_mb": 0}, "at least 1"),
        ({"compression": "powersgd", "warmup_steps": -1}, "at least 0"),
    ],
)
def test_options_out_of_bounds_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        CompressedDDPStrategy(**options)


@pytest.mark.parametrize("preset", sorted(NCCL))
def test_settings_of_nccl_are_set_unless_they_are(monkeypatch, preset):
    monkeypatch.setattr("lightning.pytorch.strategies.DDPStrategy.setup_environment", lambda self: None)
    for name in NCCL[preset]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_IB_DISABLE", "mine")
    for name in set(NCCL[preset]) - {"NCCL_IB_DISABLE"}:
        monkeypatch.setenv(name, "")  # to be put back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(CompressedDDPStrategy, "root_device", torch.device("cuda", 0))
    import os

    CompressedDDPStrategy(nccl=preset).setup_environment()
    assert {name: os.environ[name] for name in NCCL[preset]} == {
        name: "mine" if name == "NCCL_IB_DISABLE" else value for name, value in NCCL[preset].items()
    }


def test_settings_of_nccl_are_refused_without_a_gpu(monkeypatch):
    monkeypatch.setattr(CompressedDDPStrategy, "root_device", torch.device("cpu"))
    with pytest.raises(ValueError, match="is for GPUs, and this run is on a cpu"):
        CompressedDDPStrategy(nccl="ethernet").setup_environment()


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def moved(optimizer_class, steps: range, weights=None, optimizer=None, **options):
    weights = weights or [torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))]
    optimizer = optimizer or optimizer_class(weights, **options)
    for step in steps:
        weights[0].grad = torch.sin(torch.arange(5, dtype=torch.float64) * (step + 1))  # the first one is always 0
        optimizer.step()
    return weights, optimizer


def test_it_is_adamw_with_a_variance_that_stays():
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours, optimizer = moved(OneBitAdam, range(4), warmup_steps=4, **options)
    theirs, adam = moved(torch.optim.AdamW, range(4), **options)
    torch.testing.assert_close(ours[0], theirs[0], atol=0, rtol=0)
    assert optimizer.is_frozen
    state = adam.state[theirs[0]]
    mean, variance = state["exp_avg"].clone(), state["exp_avg_sq"] / (1 - 0.95**4)
    moved(OneBitAdam, range(4, 7), ours, optimizer)
    want = theirs[0].detach().clone()
    for step in range(4, 7):
        mean = 0.8 * mean + 0.2 * torch.sin(torch.arange(5, dtype=torch.float64) * (step + 1))
        moves = mean / (1 - 0.8 ** (step + 1)) / (variance.sqrt() + 1e-6)
        moves[0] = 0.0
        want = want * (1 - 0.01 * 0.1) - 0.01 * moves
    torch.testing.assert_close(ours[0].detach(), want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_restored_optimizer_goes_on_the_same(stop):
    straight, _ = moved(OneBitAdam, range(8), lr=0.01, warmup_steps=4)
    weights, first = moved(OneBitAdam, range(stop), lr=0.01, warmup_steps=4)
    second = OneBitAdam(weights, lr=0.01, warmup_steps=4)
    second.load_state_dict(first.state_dict())
    moved(OneBitAdam, range(stop, 8), weights, second)
    torch.testing.assert_close(weights[0], straight[0], atol=0, rtol=0)


def test_its_sizes_are_roots_of_second_moments():
    weights, optimizer = moved(OneBitAdam, range(3), lr=0.01, warmup_steps=2)
    moment = optimizer.state[weights[0]]["exp_avg_sq"]
    torch.testing.assert_close(optimizer.size_of(weights[0]), moment.sqrt(), atol=0, rtol=0)
    assert torch.equal(optimizer.size_of(torch.zeros(3)), torch.zeros(3))


def test_a_closure_is_called_once_a_step_and_a_warm_up_of_none_is_refused():
    weights, optimizer = moved(OneBitAdam, range(1), lr=0.01, warmup_steps=2)
    calls = []
    for _ in range(3):
        assert optimizer.step(lambda: calls.append(1) or 7.0) == 7.0
    assert len(calls) == 3
    with pytest.raises(ValueError, match="warmup_steps must be 1 or more"):
        OneBitAdam(weights, warmup_steps=0)


def test_the_checkpoint_holds_nothing_but_tensors_and_plain_values(tiny_model, prompts_file, tmp_path):
    run_distributed(run, tiny_model, prompts_file, "onebit", str(tmp_path), 2, None)
    kept = torch.load(Path(tmp_path) / "onebit-2.ckpt", weights_only=True)["communication"]
    assert kept["compression"] == "onebit"
    assert len(kept["ranks"]) == 2
    assert all(set(state) == {"errors"} for state in kept["ranks"])
    first, second = (state["errors"] for state in kept["ranks"])
    assert any(not torch.equal(first[name], second[name]) for name in first)
