"""A clipping range that moves, and a floor of the KL; the KL is dictated, the values are computed by hand."""

import pytest

from distributed import run_distributed
from rlalign.algorithms.dapo import DAPO
from rlalign.algorithms.sft import SFT
from rlalign.callbacks import DynamicClipRange, KLFloor
from rlalign.models.policy import PolicyConfig
from runs import fit
from short_runs import Feed, Record, checkpoint, run


def ranges(trainer, module):
    return module.clip_low, module.clip_high


def held(trainer, module):
    return module.kl_coef, module.clip_low, module.clip_high


def trained(model, prompts, folder, kls, callback, read, resume=None, **module):
    record = Record(read)
    iterations = len(kls)
    run(model, prompts, folder, [Feed("fed/kl", kls), callback, record], iterations, resume, steps=2, module=module)
    return record.seen


# ---- DynamicClipRange ------------------------------------------------------------------------------------------------


def test_the_range_shrinks_above_the_target_and_widens_below_also_across_a_resume_kf77(
    tiny_model, prompts_file, tmp_path
):
    kls = [0.031, 0.030, 0.0134, 0.0133, 0.0, 5.0]  # target 0.02: above 0.03 shrinks, below 0.01333 widens
    factors = [0.9, 0.9, 0.9, 0.99, 0.99 * 1.1, 0.99 * 1.1 * 0.9]
    options = {"clip_low": 0.2, "clip_high": 0.28}
    seen = trained(tiny_model, prompts_file, tmp_path / "a", kls, DynamicClipRange(monitor="fed/kl"), ranges, **options)
    assert [low for low, _ in seen] == pytest.approx([0.2 * f for f in factors])
    assert [high for _, high in seen] == pytest.approx([0.28 * f for f in factors])
    path = checkpoint(tmp_path / "a", 4)
    again = trained(
        tiny_model, prompts_file, tmp_path / "b", kls, DynamicClipRange(monitor="fed/kl"), ranges, path, **options
    )
    assert again == seen[3:]


@pytest.mark.parametrize(
    ("options", "kls", "want"),
    [
        ({"target": 1.0}, [1.6], 0.18),
        ({"target": 1.0}, [1.4], 0.2),
        ({"target": 1.0, "tolerance": 1.2}, [1.3], 0.18),
        ({"shrink": 0.5}, [1.0], 0.1),
        ({"widen": 2.0}, [0.0], 0.4),
        ({"shrink": 0.1}, [1.0], 0.05),  # a quarter, its lower bound
        ({"shrink": 0.1, "min_factor": 0.5}, [1.0], 0.1),
        ({"widen": 5.0}, [0.0], 0.4),  # twice, its upper bound
        ({"widen": 5.0, "max_factor": 3.0}, [0.0], 0.6),
    ],
)
def test_each_option_of_the_range_does_something(tiny_model, prompts_file, tmp_path, options, kls, want):
    callback = DynamicClipRange(monitor="fed/kl", **options)
    seen = trained(tiny_model, prompts_file, tmp_path, kls, callback, ranges)
    assert seen[0] == pytest.approx((want, want))


def test_the_range_in_force_is_logged_and_the_loss_uses_it(tiny_model, prompts_file, tmp_path):
    def logged(trainer, module):
        names = ("train/clip_range_low", "train/clip_range_high", "train/clip_low", "train/clip_high")
        return [float(trainer.callback_metrics[name]) for name in names]

    # A range of almost nothing cuts most of the tokens that moved, one of almost everything none.
    cut = []
    for factor in (1e-9, 4.0):
        options = {"shrink": factor, "min_factor": factor} if factor < 1 else {"widen": factor, "max_factor": factor}
        callback = DynamicClipRange(target=1.0, monitor="fed/kl", **options)
        kls = [5.0, 5.0] if factor < 1 else [0.0, 0.0]
        _, (low, high, *shares) = trained(tiny_model, prompts_file, tmp_path / str(factor), kls, callback, logged)
        assert (low, high) == pytest.approx((0.2 * factor, 0.2 * factor))
        cut.append(sum(shares))
    assert cut[0] > cut[1]


def test_the_measured_kl_of_an_iteration_is_asked_for(tiny_model, prompts_file, tmp_path):
    seen = trained(tiny_model, prompts_file, tmp_path, [0.0], DynamicClipRange(target=1e-9), ranges)
    assert seen == [pytest.approx((0.18, 0.18))]


# ---- KLFloor ---------------------------------------------------------------------------------------------------------


def test_the_floor_loosens_what_holds_the_policy_and_takes_it_back_also_across_a_resume(
    tiny_model, prompts_file, tmp_path
):
    kls = [0.0049, 0.001, 0.0051, 0.0, 9.0, 9.0, 9.0]
    steps = [1, 2, 1, 2, 1, 0, 0]
    options = {"kl_coef": 0.04, "clip_low": 0.2, "clip_high": 0.3}
    seen = trained(tiny_model, prompts_file, tmp_path / "a", kls, KLFloor(monitor="fed/kl"), held, **options)
    for values, step in zip(seen, steps, strict=True):
        assert values == pytest.approx((0.04 * 0.8**step, 0.2 * 1.1**step, 0.3 * 1.1**step))
    path = checkpoint(tmp_path / "a", 4)
    again = trained(tiny_model, prompts_file, tmp_path / "b", kls, KLFloor(monitor="fed/kl"), held, path, **options)
    assert again == seen[3:]


@pytest.mark.parametrize(
    ("options", "kls", "want"),
    [
        ({"minimum": 1.0}, [0.9], (0.032, 0.22)),
        ({"kl_factor": 0.5}, [0.0], (0.02, 0.22)),
        ({"clip_factor": 1.5, "max_steps": 2}, [0.0], (0.032, 0.3)),
        ({"max_steps": 1}, [0.0, 0.0, 0.0], (0.032, 0.22)),
    ],
)
def test_each_option_of_the_floor_does_something(tiny_model, prompts_file, tmp_path, options, kls, want):
    callback = KLFloor(monitor="fed/kl", **options)
    seen = trained(tiny_model, prompts_file, tmp_path, kls, callback, held, kl_coef=0.04)
    assert seen[-1] == pytest.approx((want[0], want[1], want[1]))


def test_the_floor_leaves_alone_what_the_module_does_not_use(tiny_model, prompts_file, tmp_path):
    seen = trained(tiny_model, prompts_file, tmp_path, [0.0], KLFloor(monitor="fed/kl"), held, kl_coef=0.0)
    assert seen == [pytest.approx((0.0, 0.22, 0.22))]


def test_an_iteration_without_the_kl_moves_nothing(tiny_model, prompts_file, tmp_path):
    nan = float("nan")
    assert trained(tiny_model, prompts_file, tmp_path, [nan], KLFloor(monitor="fed/kl"), held, kl_coef=0.04) == [
        pytest.approx((0.04, 0.2, 0.2))
    ]


# ---- both ------------------------------------------------------------------------------------------------------------


def on_rank(rank, model, prompts):
    callbacks = [KLFloor(minimum=100.0), DynamicClipRange()]
    trainer = {"strategy": "ddp", "devices": 2, "max_epochs": 2, "callbacks": callbacks}
    module, _, _ = fit(model, prompts, DAPO, trainer, step_size=8, filter_by="reward", kl_coef=0.1)
    return held(None, module)


def test_ranks_agree(tiny_model, prompts_file):
    one, two = run_distributed(on_rank, tiny_model, prompts_file)
    assert one == two
    assert one[0] == pytest.approx(0.1 * 0.8**2)


@pytest.mark.parametrize("kind", [KLFloor, DynamicClipRange])
def test_modules_and_settings_that_do_not_fit_are_refused(kind, tiny_model, prompts_file, tmp_path):
    with pytest.raises(ValueError, match="SFT has none of them above 0"):
        kind().setup(None, SFT(policy=PolicyConfig(tiny_model)), "fit")
    with pytest.raises(ValueError, match=r"clip_low could grow to .* must stay below 1"):
        trained(tiny_model, prompts_file, tmp_path, [0.0], kind(), held, clip_low=0.7)
    with pytest.warns(UserWarning, match="does nothing with one step an iteration"):
        fit(tiny_model, prompts_file, trainer={"callbacks": [kind()]})
    with pytest.warns(UserWarning, match=r"'fed/other' was not logged, so that .* has nothing to act on"):
        fit(tiny_model, prompts_file, trainer={"callbacks": [kind(monitor="fed/other")]}, step_size=8)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DynamicClipRange, {"target": 0.0}),
        (DynamicClipRange, {"tolerance": 0.9}),
        (DynamicClipRange, {"shrink": 1.1}),
        (DynamicClipRange, {"widen": 0.9}),
        (DynamicClipRange, {"min_factor": 0.0}),
        (DynamicClipRange, {"max_factor": 0.9}),
        (KLFloor, {"minimum": 0.0}),
        (KLFloor, {"kl_factor": 1.0}),
        (KLFloor, {"clip_factor": 1.0}),
        (KLFloor, {"max_steps": 0}),
    ],
)
def test_numbers_out_of_bounds_are_refused(kind, options):
    with pytest.raises(ValueError):
        kind(**options)
