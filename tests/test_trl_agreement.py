"""Where TRL has a loss of ours, value and gradient are theirs: its own methods, called on a stand-in for a trainer."""

import os
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from rlalign.algorithms.cispo import CISPO
from rlalign.algorithms.dapo import DAPO
from rlalign.algorithms.dr_grpo import DrGRPO
from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.gspo import GSPO
from rlalign.algorithms.rloo import RLOO
from rlalign.functional.divergences import kl_k3
from rlalign.functional.kto import kto_loss, kto_reference_point
from rlalign.functional.preference_losses import (
    choose_pair_loss,
    ipo_loss,
    log_odds_ratio,
    orpo_loss,
    preference_margin,
    sequence_logprobs,
    simpo_loss,
)
from rlalign.functional.reductions import reduce_loss
from rlalign.functional.reward_losses import bradley_terry_loss

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

ROWS, TOKENS, LONGEST = 6, 5, 9


def trainer(**attributes) -> MagicMock:
    """A stand-in on one process, whose gathering gives back what it gets."""
    self = MagicMock()
    self.accelerator.gather = self.accelerator.gather_for_metrics = lambda x: x
    self.accelerator.device, self.accelerator.num_processes = torch.device("cpu"), 1
    self.current_gradient_accumulation_steps = 1
    self._metrics = defaultdict(lambda: defaultdict(list))
    self._total_train_tokens, self._tp_size, self.aux_loss_enabled = 0, 1, False
    for name, value in attributes.items():
        setattr(self, name, value)
    return self


@pytest.fixture
def data() -> SimpleNamespace:
    """Log-probabilities of responses of 1 to 5 tokens, right-padded."""
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape, scale=1.0):
        return torch.rand(*shape, generator=generator, dtype=torch.float64) * scale

    lengths = torch.tensor([5, 1, 3, 4, 2, 5])
    mask = torch.arange(TOKENS) < lengths.unsqueeze(1)
    logprobs = -uniform(ROWS, TOKENS, scale=3.0)
    near = {n: logprobs + uniform(ROWS, TOKENS, scale=0.8) - 0.4 for n in ("old", "ref")}
    return SimpleNamespace(mask=mask, logprobs=logprobs, advantages=uniform(ROWS) * 4 - 2, lengths=lengths, **near)


def agree(ours, theirs, logprobs: torch.Tensor) -> None:
    """Values and gradients by the log-probabilities."""
    found = []
    for loss in (ours, theirs):
        leaf = logprobs.clone().requires_grad_()
        value = loss(leaf)
        found.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    torch.testing.assert_close(found[0][0], found[1][0].to(found[0][0]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=1e-6)
    assert found[0][1].abs().max() > 1e-4


GROUP_METHODS = {
    "grpo": (GRPO, {}, {"loss_type": "grpo", "beta": 0.04}),
    "dapo": (DAPO, {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dual_clip": (GRPO, {"dual_clip": 1.3, "kl_coef": 0.0}, {"loss_type": "grpo", "delta": 1.3}),
    "dr_grpo": (DrGRPO, {}, {"loss_type": "dr_grpo"}),
    "cispo": (CISPO, {"ratio_cap": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    "gspo": (
        GSPO,
        {"clip_low": 0.05, "clip_high": 0.06},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
    ),
}


@pytest.mark.parametrize("method", GROUP_METHODS)
def test_group_methods(data, tiny_model, method):
    cls, options, settings = GROUP_METHODS[method]
    module = cls(policy={"model": tiny_model}, **options)
    entropies = torch.zeros_like(data.logprobs)
    defaults = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token"}
    values = defaults | {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False} | settings
    values |= {"max_completion_length": LONGEST, "_entropy_bonus_enabled": False}
    values["args"] = SimpleNamespace(delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1)

    def ours(logprobs):
        loss, _, _ = module.surrogate(logprobs, data.old, data.advantages.unsqueeze(1), data.mask)
        if module.kl_coef:
            loss = loss + module.kl_coef * kl_k3(logprobs, data.ref)
        normalizer = data.mask.sum() if module.reduction == "token" else ROWS
        limit = LONGEST if module.reduction == "constant" else None
        return reduce_loss(loss, data.mask, module.reduction, normalizer, limit)

    def theirs(logprobs):
        self = trainer(**values, _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None))
        ids, mask = torch.zeros(ROWS, TOKENS, dtype=torch.long), data.mask.long()
        inputs = {"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask}
        inputs |= {"advantages": data.advantages, "old_per_token_logps": data.old, "ref_per_token_logps": data.ref}
        inputs["num_items_in_batch"] = data.mask.sum()
        return GRPOTrainer._compute_loss(self, None, inputs)

    agree(ours, theirs, data.logprobs)


def test_rloo_on_policy(data, tiny_model):
    """Off policy theirs clips the ratio of the response, ours those of tokens: the paper has no step that needs it."""
    module = RLOO(policy={"model": tiny_model})

    def ours(logprobs):
        loss, _, _ = module.surrogate(logprobs, data.logprobs, data.advantages.unsqueeze(1), data.mask)
        # At a ratio of 1 a sum over tokens has another value than one ratio a response has, but no other gradient.
        return reduce_loss(loss + data.advantages.unsqueeze(1), data.mask, "constant", ROWS, 1) - data.advantages.mean()

    def theirs(logprobs):
        entropies = torch.zeros_like(logprobs)
        self = trainer(epsilon_low=0.2, epsilon_high=0.2)
        self._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropies, None)
        ids, mask = torch.zeros(ROWS, TOKENS, dtype=torch.long), data.mask.long()
        inputs = {"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask}
        inputs |= {"advantages": data.advantages, "old_logps": (data.logprobs * data.mask).sum(1)}
        return RLOOTrainer._compute_loss(self, None, inputs)

    agree(ours, theirs, data.logprobs)


def padded(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities as a model of TRL gives them: 0 where no token of the response is."""
    return torch.where(mask, values, 0.0)


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "robust"])
def test_losses_with_a_reference(data, loss):
    smoothing = 0.1 if loss == "robust" else 0.0
    of_margin = choose_pair_loss(loss, 0.1, smoothing)

    def ours(logprobs):
        chosen, rejected = sequence_logprobs(logprobs, data.mask).chunk(2)
        ref_chosen, ref_rejected = sequence_logprobs(data.ref, data.mask).chunk(2)
        return of_margin(preference_margin(chosen, rejected, ref_chosen, ref_rejected)).mean()

    agree(ours, lambda logprobs: trl_dpo(data, logprobs, loss, smoothing), data.logprobs)


def test_ipo_of_means(data):
    """Theirs is the length-averaged one; ours of sums is the paper's and proved elsewhere."""

    def ours(logprobs):
        chosen, rejected = sequence_logprobs(logprobs, data.mask, "mean").chunk(2)
        ref_chosen, ref_rejected = sequence_logprobs(data.ref, data.mask, "mean").chunk(2)
        return ipo_loss(preference_margin(chosen, rejected, ref_chosen, ref_rejected), 0.1).mean()

    agree(ours, lambda logprobs: trl_dpo(data, logprobs, "ipo", 0.0), data.logprobs)


def trl_dpo(data, logprobs: torch.Tensor, loss: str, smoothing: float) -> torch.Tensor:
    self = trainer(ld_alpha=None, precompute_ref_logps=False, f_divergence_type="reverse_kl", beta=0.1)
    self.loss_types, self.loss_weights, self.label_smoothing = [loss], [1.0], smoothing
    self.args.gradient_checkpointing_kwargs, self.use_weighting = None, False
    mask = torch.cat([torch.zeros(ROWS, 1).bool(), data.mask], 1)
    zeros = torch.zeros(ROWS, TOKENS)
    self.ref_model = lambda **_: SimpleNamespace(log_probs=padded(data.ref, data.mask))
    measured = {"entropy": zeros, "mean_logits": zeros, "is_top1": zeros.bool()}
    outputs = SimpleNamespace(log_probs=padded(logprobs, data.mask), **measured)
    inputs = {"input_ids": torch.zeros(ROWS, TOKENS + 1).long(), "attention_mask": mask.long()}
    return DPOTrainer._compute_loss(self, lambda **_: outputs, {**inputs, "completion_mask": mask.long()}, False)


def test_kto(data):
    desirable = torch.tensor([True, False, True, True, False, False])
    mismatched, ref_mismatched = data.old.sum(1) + 3, data.ref.sum(1)
    assert kto_reference_point(mismatched, ref_mismatched) > 0.1

    def ours(logprobs):
        sums = sequence_logprobs(logprobs, data.mask), sequence_logprobs(data.ref, data.mask)
        point = kto_reference_point(mismatched, ref_mismatched)
        return kto_loss(*sums, desirable, point, 0.1, 1.0, 1.5).mean()

    def theirs(logprobs):
        self = trainer(precompute_ref_logps=False, calculate_KL=True, loss_type="kto", beta=0.1)
        self.desirable_weight, self.undesirable_weight = 1.0, 1.5
        self.args.gradient_checkpointing_kwargs = None
        mask = torch.cat([torch.zeros(ROWS, 1).bool(), data.mask], 1)
        zeros = torch.zeros(ROWS, TOKENS)

        def model(**_):
            return SimpleNamespace(log_probs=padded(logprobs, data.mask), entropy=zeros, mean_logits=zeros)

        self.ref_model = lambda **_: SimpleNamespace(log_probs=padded(data.ref, data.mask))
        self._compute_kl_logps = lambda which, _: mismatched if which is model else ref_mismatched
        inputs = {"input_ids": torch.zeros(ROWS, TOKENS + 1).long(), "attention_mask": mask.long(), "label": desirable}
        loss = KTOTrainer._compute_loss(self, model, {**inputs, "completion_mask": mask.long()}, False)
        return loss

    agree(ours, theirs, data.logprobs)


@pytest.mark.parametrize("centering", [None, 0.01])
@pytest.mark.parametrize("with_margin", [False, True])
def test_bradley_terry(data, centering, with_margin):
    scores, margin = data.advantages, torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)

    def ours(values):
        chosen, rejected = values.chunk(2)
        return bradley_terry_loss(chosen, rejected, margin if with_margin else None, centering or 0.0).mean()

    def theirs(values):
        self = trainer()
        self.args.center_rewards_coefficient = centering
        outputs = SimpleNamespace(logits=values.unsqueeze(1))
        inputs = {"attention_mask": torch.ones(ROWS, 2)} | ({"margin": margin} if with_margin else {})
        return RewardTrainer.compute_loss(self, lambda **_: outputs, inputs)

    agree(ours, theirs, scores)


def test_simpo_and_the_odds_ratio_of_orpo(data):
    means = sequence_logprobs(data.logprobs, data.mask, "mean")

    def simpo(values):
        self = trainer(alpha=0.0, loss_type="simpo", simpo_gamma=1.0, beta=2.0, label_smoothing=0.0)
        return CPOTrainer.cpo_loss(self, *values.chunk(2))[0].mean()

    agree(lambda values: simpo_loss(*values.chunk(2)).mean(), simpo, means)
    odds = means.float()

    def theirs(values):
        return ORPOTrainer.odds_ratio_loss(trainer(beta=0.1), *values.chunk(2))[0]

    agree(
        lambda values: (orpo_loss(*values.chunk(2), 0.1) + values.chunk(2)[0]).mean(),
        lambda values: -theirs(values).mean(),
        odds,
    )
    ratios = ORPOTrainer.odds_ratio_loss(trainer(beta=0.1), *odds.chunk(2))[4]
    torch.testing.assert_close(log_odds_ratio(*odds.chunk(2)).mean(), ratios, atol=1e-6, rtol=1e-6)
