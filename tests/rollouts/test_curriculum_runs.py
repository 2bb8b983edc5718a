"""Curricula, composed rewards and verifiers in whole runs."""

import json
import re
from collections import Counter
from pathlib import Path

import lightning
import pytest
import torch

from distributed import run_distributed
from rlalign.algorithms.dapo import DAPO
from rlalign.algorithms.grpo import GRPO
from rlalign.callbacks import IterationCheckpoint
from rlalign.models.policy import PolicyConfig
from rlalign.rewards import Unavailable
from rlalign.rollouts.curriculum import Curriculum, DifficultyPools, EasyToHard, GrowingLevels
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams
from runs import length_reward, make_trainer, sgd, weights

CURRICULA = {
    "pools": lambda: DifficultyPools(by="level", hard_up_to=0.4, normal_up_to=0.6),
    "easy_to_hard": lambda: EasyToHard("level", iterations=4, start_share=0.5),
    "levels": lambda: GrowingLevels(threshold=0.4, min_prompts=4),
}


def even(example: dict, response: str) -> float:
    return float(len(response) % 2 == 0)


def vowels(example: dict, response: str) -> float:
    return float(sum(letter in "aeiou" for letter in response))


@pytest.fixture
def data_file(tmp_path) -> str:
    """Twenty-four prompts of three levels."""
    path = tmp_path / "levels.jsonl"
    rows = ({"prompt": f"{i}+{i % 3}=", "answer": str(i + i % 3), "level": i % 3} for i in range(24))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


class Watch(lightning.Callback):
    """Keeps which prompts were sampled and what was logged."""

    def __init__(self):
        self.prompts: list[list[int]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.prompts.append(
            [r.prompt_index for r in trainer.datamodule.last_rollouts[:: trainer.datamodule.group_size]]
        )
        names = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith(("rollout/", "perf/reward"))}
        self.metrics.append(names)


def fit(model: str, data_file: str, folder: Path | None = None, until=3, resume=None, devices=1, cls=GRPO, **options):
    """A run of some iterations, with a watch; in a folder it is saved, without one it is in float64."""
    lightning.seed_everything(3)
    loss = options.pop("loss", {})
    module = cls(policy=PolicyConfig(model), optimizer=sgd, kl_coef=0.0, **loss)
    data = RolloutDataModule(
        data_file,
        **{
            "rewards": {"length": length_reward},
            "sampling": SamplingParams(max_new_tokens=10),
            "prompts_per_iteration": 4,
            "group_size": 4,
            **options,
        },
    )
    watch = Watch()
    saver = [IterationCheckpoint(keep=10)] if folder else []
    trainer = make_trainer(
        max_epochs=until,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision="32-true" if folder else "64-true",
        default_root_dir=str(folder),
        enable_checkpointing=bool(folder),
        callbacks=[watch, *saver],
    )
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    return module, data, watch, saver[0].last_good_path if saver else None


@pytest.mark.parametrize("kind", CURRICULA)
def test_a_run_that_is_resumed_is_exact_kf74_kf75(tmp_path, tiny_model, data_file, kind):
    make = CURRICULA[kind]
    whole, _, watch, last = fit(tiny_model, data_file, tmp_path / "whole", 4, curriculum=make())
    _, _, _, half = fit(tiny_model, data_file, tmp_path / "half", 2, curriculum=make())
    resumed, data, rest, end = fit(tiny_model, data_file, tmp_path / "half", 4, half, curriculum=make())
    assert rest.prompts == watch.prompts[2:]
    assert rest.metrics[0].keys() == watch.metrics[2].keys()
    chosen = [{k: v for k, v in m.items() if "curriculum" in k} for m in (*watch.metrics[2:], *rest.metrics)]
    assert chosen[:2] == chosen[2:]
    assert chosen[0]
    assert torch.equal(weights(whole), weights(resumed))
    states = [torch.load(path, weights_only=True)["RolloutDataModule"] for path in (last, end)]
    assert str(states[0]) == str(states[1]) == str(data.state_dict())


def test_a_checkpoint_of_a_curriculum_is_validated_without_one(tmp_path, tiny_model, data_file):
    module, _, _, last = fit(tiny_model, data_file, tmp_path, 1, curriculum=CURRICULA["pools"]())
    data = RolloutDataModule(
        data_file,
        {"length": length_reward},
        sampling=SamplingParams(max_new_tokens=10),
        val=data_file,
        val_limit=4,
        curriculum=CURRICULA["levels"](),
    )
    trainer = make_trainer()
    (metrics,) = trainer.validate(module, data, ckpt_path=last, verbose=False, weights_only=True)
    assert 0 <= metrics["val/pass@1"] <= 1
    assert data.state_dict() == {"seed": 3}


def test_validation_with_another_seed_loads_no_prompts_to_train_on(tmp_path, tiny_model, data_file):
    module, _, _, last = fit(tiny_model, data_file, tmp_path, 1)
    options = {"sampling": SamplingParams(max_new_tokens=10), "val": data_file, "val_limit": 4, "seed": 8}
    data = RolloutDataModule(str(tmp_path / "gone.jsonl"), {"length": length_reward}, **options)
    with pytest.warns(UserWarning, match="with its own seed, 3; 8 is not used"):
        make_trainer().validate(module, data, ckpt_path=last, verbose=False, weights_only=True)
    assert data.seed == 3


def test_the_state_matters_when_a_run_is_resumed(tmp_path, tiny_model, data_file):
    """Without what was observed, other prompts are drawn: the test above can fail."""
    make = CURRICULA["pools"]
    _, _, watch, _ = fit(tiny_model, data_file, tmp_path / "whole", 4, curriculum=make())
    _, _, _, half = fit(tiny_model, data_file, tmp_path / "half", 2, curriculum=make())
    checkpoint = torch.load(half, weights_only=True)
    checkpoint["RolloutDataModule"]["curriculum"] = {}
    torch.save(checkpoint, half)
    with pytest.warns(UserWarning, match="DifficultyPools starts without observations"):
        _, _, rest, _ = fit(tiny_model, data_file, tmp_path / "half", 4, half, curriculum=make())
    assert rest.prompts != watch.prompts[2:]


COMPOSED = {
    "rewards": {"length": length_reward, "even": even, "vowels": vowels},
    "reward_weights": {"even": 0.0, "vowels": 0.3},
    "reward_gates": {"vowels": "even"},
    "reward_ranges": {"vowels": (0.0, 2.0)},
}
RUNS = {
    "group": {**COMPOSED, "reward_normalization": {"length": "group", "vowels": "group"}},
    "batch": {**COMPOSED, "reward_normalization": {"vowels": "batch"}},
    "pools and spares": {
        "curriculum": DifficultyPools(by="level", hard_up_to=0.4, normal_up_to=0.6),
        "cls": DAPO,
        "group_size": 2,
        "loss": {"filter_by": "reward", "max_rounds": 3},
    },
    "levels": {"curriculum": GrowingLevels(threshold=0.4, min_prompts=4)},
}


def outcome(model, data_file, options, devices=1):
    module, data, watch, _ = fit(model, data_file, devices=devices, **options)
    metrics = [{k: v for k, v in m.items() if not k.startswith("perf/")} for m in watch.metrics]
    rewards = [r.reward for r in data.last_rollouts]
    return weights(module), watch.prompts, metrics, rewards, str(data.state_dict())


def on_two_ranks(rank, model, data_file, expected):
    """By how much the weights of each run differ, and the rest of its outcome."""
    found = []
    for options, weights_of_one in zip(RUNS.values(), expected, strict=True):
        got, *rest = outcome(model, data_file, options, devices=2)
        found.append((float((got - weights_of_one).abs().max()), *rest))
    return found


def test_two_ranks_are_one(tiny_model, data_file):
    expected = [outcome(tiny_model, data_file, options) for options in RUNS.values()]
    for of_rank in run_distributed(on_two_ranks, tiny_model, data_file, [run[0] for run in expected]):
        for name, got, want in zip(RUNS, of_rank, expected, strict=True):
            assert got[0] < 1e-10, name
            assert got[1] == want[1], name
            for mine, theirs in zip(got[2], want[2], strict=True):
                assert mine == pytest.approx(theirs, abs=1e-6), name
            assert got[3:] == want[3:], name


def test_what_is_learned_from_is_normalised_and_what_is_logged_is_not(tiny_model, data_file):
    _, data, watch, _ = fit(tiny_model, data_file, until=1, **RUNS["group"], num_held_out=4)
    rewards = torch.tensor([r.reward for r in data.last_rollouts]).view(-1, 4)
    torch.testing.assert_close(rewards.sum(1), torch.zeros(4), atol=1e-6, rtol=0)
    assert rewards.abs().max() > 0.5
    totals = [
        r.components["length"] + 0.3 * min(r.components["vowels"] * r.components["even"], 2) for r in data.last_rollouts
    ]
    metrics = watch.metrics[0]
    assert metrics["rollout/reward"] == pytest.approx(sum(totals) / len(totals), abs=1e-6)
    shut = [r.components["even"] == 0 for r in data.last_rollouts]
    assert metrics["rollout/reward/vowels_gated_share"] == pytest.approx(sum(shut) / len(shut))
    assert "rollout/reward/vowels_clipped_share" in metrics
    assert "rollout/reward/length_gated_share" not in metrics
    assert metrics["perf/reward_seconds/length"] >= 0
    held_out = data.sample_held_out([0])
    assert held_out[0].reward == pytest.approx(
        (c := held_out[0].components)["length"] + 0.3 * min(c["vowels"] * c["even"], 2)
    )


def test_a_run_without_options_is_what_it_was(tiny_model, data_file):
    """The sum of weighted rewards, bit by bit, and every prompt once before any twice."""
    options = {"rewards": {"length": length_reward, "vowels": vowels}, "reward_weights": {"vowels": 0.3}}
    _, data, watch, _ = fit(tiny_model, data_file, until=6, **options)
    assert sorted(i for prompts in watch.prompts for i in prompts) == list(range(24))
    for r in data.last_rollouts:
        assert r.reward == sum(w * s for w, s in ((1.0, r.components["length"]), (0.3, r.components["vowels"])) if s)


class Flaky:
    """Cannot reach its judge for some responses from some call on; counts its requests."""

    def __init__(self, share: float, after: int = 0) -> None:
        self.counts = Counter(requests=0)
        self.share, self.after = share, after

    def __call__(self, example: dict, response: str) -> float:
        self.counts["requests"] += 1
        number = self.counts["requests"] - self.after
        if number > 0 and number % round(1 / self.share) == 0:
            raise Unavailable("http://judge refused the connection.")
        return length_reward(example, response)


def test_a_judge_that_is_away_now_and_then_costs_its_samples(tiny_model, data_file):
    options = {"rewards": {"judge": Flaky(1 / 16)}, "max_unavailable_share": 1 / 16}
    _, data, watch, _ = fit(tiny_model, data_file, until=2, **options)
    assert [m["rollout/unavailable_share"] for m in watch.metrics] == [1 / 16] * 2
    assert [m["rollout/unscored_share"] for m in watch.metrics] == [1 / 16] * 2
    assert [m["rollout/reward/judge_requests"] for m in watch.metrics] == [16, 16]
    assert sum(r.unavailable for r in data.last_rollouts) == 1


def test_a_judge_that_is_down_stops_the_run_before_it_is_learned_from(tmp_path, tiny_model, data_file):
    options = {"rewards": {"judge": Flaky(1 / 4, after=32)}, "max_unavailable_share": 0.2}
    message = r"4 of the 16 responses of iteration 2 could not be judged.*max_unavailable_share=0\.2.*'judge' was unav"
    with pytest.raises(RuntimeError, match=message):
        fit(tiny_model, data_file, tmp_path, until=4, **options)
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("iteration=*")) == [
        "iteration=00001.ckpt",
        "iteration=00002.ckpt",
    ]
    with pytest.raises(ValueError, match=r"max_unavailable_share must be in \[0, 1\]"):
        RolloutDataModule(data_file, {"length": length_reward}, max_unavailable_share=2)


def validated(model, data_file, **options):
    data = RolloutDataModule(
        data_file, sampling=SamplingParams(max_new_tokens=10), val=data_file, **{"val_limit": 16} | options
    )
    trainer = make_trainer()
    lightning.seed_everything(3)
    return trainer.validate(GRPO(policy=PolicyConfig(model)), data, verbose=False)[0]


def test_held_out_responses_that_nobody_judged_do_not_pass_for_wrong_ones(tiny_model, data_file):
    options = {"rewards": {"judge": Flaky(1 / 8)}, "max_unavailable_share": 1 / 8}
    with pytest.warns(UserWarning, match=r"12\.5% of the held-out responses could not be judged.*count as wrong"):
        assert validated(tiny_model, data_file, **options)["val/unavailable_share"] == 1 / 8
    options = {"rewards": {"judge": Flaky(1 / 8)}, "max_unavailable_share": 0.1}
    with pytest.raises(
        RuntimeError, match=r"12\.5% of the held-out responses .*data\.max_unavailable_share=0\.1 allows"
    ):
        validated(tiny_model, data_file, **options)


def test_a_verifier_that_could_score_nothing_has_no_gap(tiny_model, data_file):
    options = {"rewards": {"length": length_reward}, "val_verifier": lambda example, response: None}
    with pytest.warns(UserWarning, match="would tell val/verifier_gap and val/verifier_pass@1: not logged"):
        metrics = validated(tiny_model, data_file, **options)
    assert metrics["val/verifier_unscored_share"] == 1
    assert not {"val/verifier_pass@1", "val/verifier_gap"} & metrics.keys()


def test_a_second_run_with_the_same_data_module_begins_like_the_first(tiny_model, data_file):
    _, data, watch, _ = fit(tiny_model, data_file, curriculum=CURRICULA["pools"]())
    lightning.seed_everything(3)
    again = Watch()
    trainer = make_trainer(max_epochs=2, callbacks=[again], precision="64-true")
    trainer.fit(GRPO(policy=PolicyConfig(tiny_model), optimizer=sgd, kl_coef=0.0), data)
    assert again.prompts == watch.prompts[:2]
    assert again.metrics[0]["rollout/curriculum/unseen_share"] == 1
    trainer.fit_loop.max_epochs = 3
    trainer.fit(trainer.lightning_module, data)
    assert again.prompts == watch.prompts, "a run that is continued goes on from what it has observed"


OTHERS = {
    ("pools", None): "had (DifficultyPools): EveryPromptOnce starts",
    (None, "easy_to_hard"): "had (EveryPromptOnce): EasyToHard starts",
    ("easy_to_hard", "levels"): "had (EasyToHard): GrowingLevels starts",
}


@pytest.mark.parametrize("kinds", OTHERS)
def test_another_curriculum_than_before_is_told(tmp_path, tiny_model, data_file, kinds):
    first, second = (CURRICULA[kind]() if kind else None for kind in kinds)
    _, _, _, last = fit(tiny_model, data_file, tmp_path, 1, curriculum=first)
    with pytest.warns(UserWarning, match=re.escape(OTHERS[kinds])):
        fit(tiny_model, data_file, tmp_path, 2, last, curriculum=second)


class Given(Curriculum):
    """A curriculum of anybody's."""

    def __init__(self, order):
        self.given = order

    def order(self, iteration):
        return self.given

    def metrics(self, iteration):
        return {}


@pytest.mark.parametrize("order", [[], [0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 24], [-1, 0, 1, 2]])
def test_an_order_that_is_none_ends_in_one_sentence(tiny_model, data_file, order):
    with pytest.raises(ValueError, match=r"Given: the order of iteration 0 must be at least 4 distinct .* 0 to 23;"):
        fit(tiny_model, data_file, curriculum=Given(order))


def test_an_order_may_be_an_array(tiny_model, data_file):
    _, _, watch, _ = fit(tiny_model, data_file, until=1, curriculum=Given(torch.tensor([5, 3, 7, 0, 2])))
    assert watch.prompts == [[5, 3, 7, 0]]


def test_what_is_normalised_over_a_group_of_one_is_refused(data_file):
    with pytest.raises(ValueError, match="group_size=1 makes what is normalised over its group 0"):
        RolloutDataModule(data_file, {"a": length_reward}, group_size=1, reward_normalization={"a": "group"})


def stopped_on_two_ranks(rank, model, data_file):
    # Only rank 1 cannot reach its judge; both must stop, and neither must wait for the other.
    reward = Flaky(1 / 2) if rank == 1 else length_reward
    try:
        fit(model, data_file, devices=2, rewards={"judge": reward})
    except RuntimeError as error:
        return str(error)


def test_all_ranks_stop_where_one_cannot_judge_kf83(tiny_model, data_file):
    told = run_distributed(stopped_on_two_ranks, tiny_model, data_file)
    assert told[0] == told[1]
    assert "4 of the 16 responses of iteration 0" in told[0]
    assert "http://judge refused the connection" in told[0]


def verifier(example: dict, response: str) -> float | None:
    return None if len(response) == 10 else float(len(response) > 4)


def gap(rank, model, data_file, devices):
    lightning.seed_everything(3)
    module = GRPO(policy=PolicyConfig(model), optimizer=sgd, kl_coef=0.0)
    data = RolloutDataModule(
        data_file,
        {"length": length_reward},
        sampling=SamplingParams(max_new_tokens=10),
        val=data_file,
        val_samples=3,
        val_batch_size=5,
        val_verifier=verifier,
    )
    trainer = make_trainer(devices=devices, strategy="ddp" if devices > 1 else "auto")
    (metrics,) = trainer.validate(module, data, verbose=False)
    rollouts = data.sample_held_out(list(range(24))) if devices == 1 else []
    return metrics, [(r.text, r.correct) for r in rollouts]


def test_the_gap_to_a_second_verifier_on_held_out_prompts(tiny_model, data_file):
    metrics, responses = gap(0, tiny_model, data_file, 1)
    judged = [(right, verifier({}, text)) for text, right in responses]
    both = [(right, bool(score)) for right, score in judged if score is not None]
    assert 0 < len(both) < len(judged) == 72
    want = sum(a for a, _ in both) / len(both) - sum(b for _, b in both) / len(both)
    assert want != 0
    assert metrics["val/verifier_gap"] == pytest.approx(want, abs=1e-6)
    assert metrics["val/verifier_pass@1"] == pytest.approx(sum(b for _, b in both) / len(both), abs=1e-6)
    assert metrics["val/verifier_unscored_share"] == pytest.approx(1 - len(both) / 72, abs=1e-6)
    for of_rank, _ in run_distributed(gap, tiny_model, data_file, 2):
        assert of_rank == pytest.approx(metrics)


def test_a_verifier_whose_column_is_missing_is_told_at_load_kf94(tiny_model, data_file):
    from rlalign.rewards import ExactMatch

    with pytest.raises(ValueError, match="'val_verifier' reads the column 'gold'"):
        fit(tiny_model, data_file, val_verifier=ExactMatch("gold"), num_held_out=4)


def test_a_curriculum_whose_column_is_missing_is_told_at_load_kf94(tiny_model, data_file):
    with pytest.raises(ValueError, match="difficulty"):
        fit(tiny_model, data_file, curriculum=EasyToHard("difficulty", 5))
