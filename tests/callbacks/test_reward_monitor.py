import pytest

from rlalign.callbacks import RewardMonitor
from short_runs import checkpoint, run

FINE = {
    "rollout/zero_std_share": 0.2,
    "rollout/all_wrong_share": 0.1,
    "rollout/all_right_share": 0.1,
    "rollout/truncated_share": 0.1,
    "rollout/repetition": 0.1,
}


def outside(monitor, **values):
    named = {name: value for name, value in values.items()}
    checks = monitor.judge({**FINE, **{f"rollout/{k}": v for k, v in named.items()}})
    return {check.name: check.message for check in checks if check.outside}


def after(monitor, rewards):
    for reward in rewards:
        monitor.observe({"rollout/reward": reward})
    return monitor


def test_a_swing_is_large_against_the_usual_change_and_in_itself():
    # three changes of +-0.1: usual 0.1; limit 4 x 0.1
    monitor = after(RewardMonitor(window=3, collapse=None), [0.5, 0.6, 0.5, 0.6])
    assert outside(monitor, reward=0.99) == {}
    message = outside(monitor, reward=1.01)["swing"]
    assert message.startswith(
        "rollout/reward swings: a change of +0.41 where 0.1 is usual. Clip the gradient norm at 1.0"
    )
    assert "swing" in outside(monitor, reward=0.19)
    calm = after(RewardMonitor(window=3, collapse=None), [0.5, 0.5, 0.5, 0.5])
    assert outside(calm, reward=0.59) == {}
    assert "swing" in outside(calm, reward=0.61)
    assert "swing" in outside(after(RewardMonitor(window=3, swing_min=0.01), [0.5] * 4), reward=0.52)
    assert "swing" in outside(after(RewardMonitor(swing=2.0, window=3), [0.5, 0.6, 0.5, 0.6]), reward=0.81)


def test_no_swing_before_the_window_is_full():
    assert outside(after(RewardMonitor(window=3, collapse=None), [0.5, 0.5, 0.5]), reward=5.0) == {}


def test_only_the_window_is_usual():
    monitor = after(RewardMonitor(window=2, collapse=None), [0.0, 9.0, 0.5, 0.5, 0.5])
    assert "swing" in outside(monitor, reward=0.7)


def test_a_collapse_is_measured_from_the_best_mean():
    monitor = after(RewardMonitor(window=2, swing=None), [0.2, 0.8, 0.6, 0.4])
    assert monitor.best == pytest.approx(0.7)
    assert outside(monitor, reward=0.41) == {}
    message = outside(monitor, reward=0.39)["collapse"]
    assert message.startswith("rollout/reward = 0.39 has collapsed from 0.7, its best mean over 2 iterations.")
    assert "collapse" in outside(after(RewardMonitor(window=2, swing=None, collapse=0.1), [0.5, 0.5]), reward=0.39)
    assert outside(after(RewardMonitor(window=2, swing=None), [0.5]), reward=-9.0) == {}


@pytest.mark.parametrize(
    ("shares", "advice"),
    [
        ({"all_wrong_share": 1.0}, "all are wrong: take easier prompts"),
        ({"all_wrong_share": 1.0, "truncated_share": 0.95}, "95% of the responses are cut. Length cap too small"),
        ({"all_right_share": 1.0}, "all are right: take harder prompts"),
        ({}, "check that the reward tells responses apart"),
    ],
)
def test_groups_without_signal_say_why(shares, advice):
    message = outside(RewardMonitor(), zero_std_share=1.0, **shares)["no_signal"]
    assert message.startswith("100% of the groups have one reward throughout, and there is nothing to learn from them:")
    assert advice in message
    assert "no_signal" not in outside(RewardMonitor(), zero_std_share=0.99)
    assert "no_signal" in outside(RewardMonitor(no_signal=0.9), zero_std_share=0.9)


def test_a_length_cap_too_small_is_named_kf57(tiny_model, prompts_file, tmp_path):
    def wrong(example, response):
        return 0.0

    data = {"rewards": {"wrong": wrong}, "max_new_tokens": 1, "num_passes": 1}
    _, _, _, messages = run(tiny_model, prompts_file, tmp_path, [RewardMonitor()], 1, data=data)
    assert len(messages) == 2
    assert all("Length cap too small" in message for message in messages)
    assert "nothing to learn from" in messages[0]


def test_truncation_and_repetition():
    assert outside(RewardMonitor(), truncated_share=0.9) == {}
    assert "Length cap too small" in outside(RewardMonitor(), truncated_share=0.91)["truncation"]
    assert "truncation" in outside(RewardMonitor(truncation=0.5), truncated_share=0.6)
    assert outside(RewardMonitor(), repetition=0.5) == {}
    assert "repeats itself" in outside(RewardMonitor(), repetition=0.51)["repetition"]
    assert "repetition" in outside(RewardMonitor(repetition=0.2), repetition=0.3)


def test_each_check_can_be_switched_off():
    off = {"swing": None, "collapse": None, "no_signal": None, "truncation": None, "repetition": None}
    bad = {"zero_std_share": 1.0, "truncated_share": 1.0, "repetition": 1.0, "reward": -9.0}
    monitor = after(RewardMonitor(window=2), [0.5, 0.5, 0.5])
    assert set(outside(monitor, **bad)) == set(off)
    assert outside(after(RewardMonitor(window=2, **off), [0.5, 0.5, 0.5]), **bad) == {}


def test_each_action_belongs_to_its_check():
    actions = {"swing": "stop", "collapse": "rollback", "no_signal": "lower_lr", "truncation": "raise_kl"}
    monitor = RewardMonitor(repetition_action=["warn", "stop"], **{f"{k}_action": v for k, v in actions.items()})
    after(monitor, [0.5] * 20)
    checks = monitor.judge({**FINE, "rollout/reward": 0.5})
    assert {c.name: c.actions for c in checks} == {
        **{name: (action,) for name, action in actions.items()},
        "repetition": ("warn", "stop"),
    }


def test_absent_metrics_are_tolerated_kf95():
    assert RewardMonitor().judge({}) == []
    monitor = RewardMonitor()
    monitor.observe({})
    assert monitor.rewards == []


def test_patience_holds_for_all_but_swings():
    monitor = after(RewardMonitor(patience=4), [0.5] * 20)
    patience = {c.name: c.patience for c in monitor.judge({**FINE, "rollout/reward": 0.5})}
    assert patience == {"swing": 1, "collapse": 4, "no_signal": 4, "truncation": 4, "repetition": 4}


def test_what_is_remembered_is_in_the_checkpoint(tiny_model, prompts_file, tmp_path):
    whole, part = RewardMonitor(window=2), RewardMonitor(window=2)
    run(tiny_model, prompts_file, tmp_path, [whole], 4)
    run(tiny_model, prompts_file, tmp_path, [part], 4, resume=checkpoint(tmp_path, 2))
    assert len(whole.rewards) == 3
    assert part.rewards == whole.rewards
    assert part.best == whole.best is not None


def test_bad_rollouts_end_their_iteration_after_its_first_step(tiny_model, prompts_file, tmp_path):
    def kept_tokens(folder, **options):
        _, _, source, messages = run(
            tiny_model,
            prompts_file,
            tmp_path / folder,
            [RewardMonitor(truncation=0.0, **options)],
            1,
            data={"num_passes": 3},
        )
        return source.end_iteration, messages

    ended, messages = kept_tokens("a", truncation_action="end_iteration")
    assert ended
    assert messages[0].endswith("Action: the rest of the iteration is left out.")
    assert not kept_tokens("b")[0]
    assert not kept_tokens("c", truncation_action="end_iteration", patience=2)[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"truncation": 1.5}, r"truncation must be in \[0, 1\]"),
        ({"no_signal": -0.1}, r"no_signal must be in \[0, 1\]"),
        ({"repetition": 2.0}, r"repetition must be in \[0, 1\]"),
        ({"swing": -1.0}, "swing must be 0 or more"),
        ({"swing_min": -1.0}, "swing_min must be 0 or more"),
        ({"collapse": -1.0}, "collapse must be 0 or more"),
        ({"window": 1}, "window >= 2"),
        ({"patience": 0}, "patience >= 1"),
        ({"swing_action": "shout"}, r"RewardMonitor\.swing_action: expected one or more of"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        RewardMonitor(**options)
