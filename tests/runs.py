"""Short runs for tests."""

from typing import Any

import lightning
import torch

from rlalign.algorithms.grpo import GRPO
from rlalign.models.policy import PolicyConfig
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams


def length_reward(example: dict, response: str) -> float:
    """Anything that differs within groups."""
    return len(response) % 5 / 2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.05)


def make_trainer(**options: Any) -> lightning.Trainer:
    """A quiet trainer on the CPU."""
    quiet = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return lightning.Trainer(**(quiet | options))


def make_run(model: str, prompts: str, algorithm: Any = GRPO, trainer: dict | None = None, **options: Any):
    """Module, data and trainer; options of the data module by their names, the rest goes to the algorithm."""
    lightning.seed_everything(3)
    data = {
        "rewards": {"length": length_reward},
        "sampling": SamplingParams(max_new_tokens=10),
        "prompts_per_iteration": 4,
        "group_size": 4,
    }
    names = {*data, "val", "step_size", "minibatch_size", "num_passes", "val_samples", "correct", "sampler", "seed"}
    names |= {"val_batch_size", "num_held_out", "reward_weights", "val_limit", "val_sampling", "max_prompt_tokens"}
    names |= {"reward_gates", "reward_ranges", "reward_normalization", "val_verifier", "curriculum"}
    data |= {k: options.pop(k) for k in list(options) if k in names}
    policy = PolicyConfig(model, **options.pop("policy", {}))
    module = algorithm(policy=policy, **({"optimizer": sgd, "kl_coef": 0.0} | options))
    return module, RolloutDataModule(prompts, **data), make_trainer(**(trainer or {}))


def fit(model: str, prompts: str, algorithm: Any = GRPO, trainer: dict | None = None, **options: Any):
    """The module, the data module and the trainer after a run."""
    module, data, fitted = make_run(model, prompts, algorithm, trainer, **options)
    fitted.fit(module, data)
    return module, data, fitted


def weights(module: Any) -> torch.Tensor:
    """All weights of a policy."""
    return torch.cat([p.detach().flatten() for p in module.policy.lm.parameters()])
