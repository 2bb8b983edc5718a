"""docs/metrics.md names what runs log: nothing more, nothing less."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightning import seed_everything
from lightning.pytorch.loggers.logger import DummyLogger

from ahead_sampler import AheadInProcess
from rlalign.algorithms.dapo import DAPO
from rlalign.algorithms.direct_alignment_po import DirectAlignmentPO
from rlalign.algorithms.distributed_adaptive_po import DistributedAdaptivePO
from rlalign.algorithms.dpo import DPO
from rlalign.algorithms.generalized_rpo import GeneralizedRPO
from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.kto import KTO
from rlalign.algorithms.ppo import PPO
from rlalign.algorithms.reward_model import RewardModel
from rlalign.algorithms.sft import SFT
from rlalign.algorithms.value_response import ValueResponse
from rlalign.callbacks import (
    AdaptiveKL,
    DemonstrationInjection,
    DynamicClipRange,
    EntropySchedule,
    GradNormBand,
    KLBand,
    Performance,
    RewardMonitor,
    SampleTable,
    StagedTraining,
    TokenBudget,
)
from rlalign.data.demonstrations import DemonstrationDataModule
from rlalign.data.labelled import LabelledDataModule
from rlalign.data.preferences import PreferenceDataModule
from rlalign.models.policy import PolicyConfig
from rlalign.rollouts.curriculum import DifficultyPools, EasyToHard, GrowingLevels, StratifiedWorkers
from rlalign.strategies.hooks import MeanHook
from runs import length_reward, make_run, make_trainer

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `((?:train|rollout|val|perf)/[^`]+)` \|(.*)\|$", re.MULTILINE)


class CountingReward:
    """A reward that counts something, as verifiers do."""

    def __init__(self) -> None:
        self.counts = Counter(COUNT=0)

    def __call__(self, example: dict[str, Any], response: str) -> float:
        return length_reward(example, response)


class Names(DummyLogger):
    """Keeps the names of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def log_metrics(self, metrics: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.seen |= set(metrics) - {"epoch"}


def documented(reward: str, num_samples: int) -> list[str]:
    """Names on the page, with the name of a reward, a number of samples and the kinds of pairs put in."""
    names = [name.replace("NAME", reward).replace("@K", f"@{num_samples}") for name, _ in ROW.findall(PAGE.read_text())]
    kinds = ("annotated", "unlikely", "perturbed", "stale")
    return [full for name in names for full in ([name.replace("KIND", k) for k in kinds] if "KIND" in name else [name])]


@pytest.fixture
def logged(tiny_model: str, tmp_path: Path) -> set[str]:
    """What is logged by short runs of every algorithm, with every callback that adds to it."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{i}+{i}=", "answer": "{2 * i}", "level": 1}}\n' for i in range(16)))
    names = Names()

    def trainer(name: str, *callbacks: Any) -> dict[str, Any]:
        return {
            "logger": names,
            "log_every_n_steps": 1,
            "default_root_dir": tmp_path / name,
            "callbacks": list(callbacks),
        }

    guards = [KLBand(), GradNormBand(), RewardMonitor(), SampleTable(), Performance()]
    settings = {"num_held_out": 4, "val_samples": 2, "step_size": 8}
    composed = {"rewards": {"length": CountingReward(), "open": lambda example, response: 1.0}}
    composed |= {"reward_gates": {"length": "open"}, "reward_ranges": {"length": (0, 1)}}
    for name, algorithm, callbacks, options in (
        ("grpo", GRPO, [AdaptiveKL(), EntropySchedule(), *guards], {"kl_coef": 0.04, "entropy_coef": 0.01}),
        ("anchored", GRPO, [AdaptiveKL()], {"kl_coef": 0.04, "kl_to": "old"}),
        ("dapo", DAPO, [], {"filter_by": "reward", "max_rounds": 2}),
        ("pools", GRPO, [], {"curriculum": DifficultyPools(), "val_verifier": length_reward}),
        ("easy_to_hard", GRPO, [], {"curriculum": EasyToHard("level", iterations=2)}),
        ("levels", GRPO, [], {"curriculum": GrowingLevels()}),
        ("composed", GRPO, [], composed),
        ("skipping", GRPO, [], {"kl_coef": 0.0, "skip_zero_advantages": True}),
        ("ahead", GRPO, [], {"kl_coef": 0.0, "sampler": AheadInProcess(1)}),
    ):
        module, data, runner = make_run(
            tiny_model, str(prompts), algorithm, trainer(name, *callbacks), **settings, **options
        )
        if name == "grpo":
            runner.strategy.hook = MeanHook()  # as CompressedDDPStrategy has, of which Performance logs the bytes
        runner.fit(module, data)
    runs_with_new_names(tiny_model, str(prompts), trainer, settings)
    names.seen = {
        name for name in names.seen if not name.startswith(("rollout/reward/open", "perf/reward_seconds/open"))
    }
    seed_everything(0)
    demonstrations = DemonstrationDataModule(
        str(prompts), num_held_out=4, columns={"prompt": "prompt", "response": "answer"}, step_size=4
    )
    make_trainer(**trainer("sft")).fit(SFT(policy=PolicyConfig(tiny_model)), demonstrations)
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "x" * (1 + i % 3)} for i in range(12)]
    pairs.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, offline, source in (
        ("dpo", DPO(policy=PolicyConfig(tiny_model)), PreferenceDataModule),
        ("kto", KTO(policy=PolicyConfig(tiny_model)), LabelledDataModule),
        ("reward_model", RewardModel(model=tiny_model), PreferenceDataModule),
    ):
        make_trainer(**trainer(name)).fit(offline, source(str(pairs), num_held_out=4, step_size=4))
    return names.seen


def runs_with_new_names(model: str, prompts: str, trainer: Any, settings: dict[str, Any]) -> None:
    """Short runs of methods and callbacks that log what no other does."""
    columns = {"prompt": "prompt", "response": "answer"}
    injection = DemonstrationInjection(prompts, share=1.0, period=1, columns=columns)
    callbacks = [injection, DynamicClipRange(), TokenBudget(10**9)]
    stages = [{"name": "value", "iterations": 1}, {"name": "policy"}]
    negatives = {"unlikely_share": 0.2, "perturbed_share": 0.2, "stale_share": 0.2}
    for name, algorithm, extra, options in (
        ("ppo", PPO, callbacks, {"kl_coef": 0.05}),
        ("generalized", GeneralizedRPO, [], {"kl_coef": 0.05}),
        ("distributed", DistributedAdaptivePO, [], {"curriculum": StratifiedWorkers(num_workers=2)}),
        ("direct", WithoutKL, [], negatives),
        ("value", ValueResponse, [StagedTraining(stages)], {}),
    ):
        more = {**settings, **options}
        two = trainer(name, *extra) | {"max_epochs": 2}
        module, data, runner = make_run(model, prompts, algorithm, two, **more)
        runner.fit(module, data)


class WithoutKL(DirectAlignmentPO):
    """Takes the option that short runs give every method."""

    def __init__(self, kl_coef: float = 0.0, **options: Any) -> None:
        super().__init__(**options)


def test_the_page_names_what_runs_log(logged):
    names = documented("length", 2)
    assert len(names) == len(set(names)), "a name has two rows"
    assert {"documented only": set(names) - logged, "logged only": logged - set(names)} == {
        "documented only": set(),
        "logged only": set(),
    }


def test_every_row_is_complete():
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) > 30
    for name, rest in rows:
        cells = [cell.strip() for cell in rest.split("|")]
        assert len(cells) == 4, name
        assert all(cells), name
