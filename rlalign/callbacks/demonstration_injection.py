"""A few demonstrations among what a policy learns from, against forgetting."""

from collections.abc import Collection
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from rlalign.callbacks.coefficients import finished_step
from rlalign.data.demonstrations import DemonstrationBatch, Demonstrations, collate_demonstrations
from rlalign.data.formats import field_names, recognise
from rlalign.functional.draws import hashed_permutation
from rlalign.functional.reductions import masked_mean, reduce_loss
from rlalign.rollouts.prompts import PromptSource, parse_source
from rlalign.rollouts.ranks import data_module, data_parallel, say
from rlalign.rollouts.template import Rendering

_DEMONSTRATIONS = 0x64656D6F
"""Key of the draws, so that they differ from those of everything else with the same seed."""


class DemonstrationInjection(Callback):
    """Adds a share of demonstrations to what a policy learns from: every so many optimizer steps, some new ones.

    After every ``period`` optimizer steps of the policy, demonstrations fall due: ``share`` times the sequences that
    the policy has learned from in these steps. The following steps learn from them beside their own data, at most
    ``per_step`` in each, until none is due: to the step's loss comes ``weight`` times their mean negative
    log-likelihood, over the tokens of their responses. No demonstration is drawn twice before all were drawn once.
    Steps without a token, or of another part of the module than its policy, neither count nor learn from them.

    The loss does not depend on how a step is cut into minibatches and ranks. Draws are a function of the run's seed and
    of how many were drawn before. Logs ``train/demonstrations`` and ``train/demonstration_loss``; all counts are in the
    checkpoint.

    Args:
        demonstrations: A file, a folder or hub name of ``datasets``, or a source. Those with a held-out prompt are
            dropped and counted.
        share: Demonstrations a sequence learned from, above 0.
        period: Optimizer steps from one injection to the next.
        per_step: Most demonstrations of an optimizer step, over all ranks.
        weight: Of their loss, above 0.
        columns: Where the data have other names: field -> name of the column.
        system_prompt: Put before every conversation.
        rendering: See :class:`~rlalign.rollouts.datamodule.RolloutDataModule`.
        max_tokens: Longer demonstrations are dropped and counted; the model's positions by default.

    Raises:
        ValueError: If a number is out of bounds.
    """

    def __init__(
        self,
        demonstrations: str | PromptSource,
        share: float = 0.01,
        period: int = 5000,
        per_step: int = 32,
        weight: float = 1.0,
        columns: dict[str, str] | None = None,
        system_prompt: str | None = None,
        rendering: Rendering = "auto",
        max_tokens: int | None = None,
    ) -> None:
        if not (0 < share <= 1 and weight > 0 and min(period, per_step) >= 1):
            raise ValueError(
                "DemonstrationInjection: expected 0 < share <= 1, weight > 0, period >= 1 and per_step >= 1, got "
                f"{share}, {weight}, {period} and {per_step}."
            )
        self.demonstrations, self.share, self.period = demonstrations, share, period
        self.per_step, self.weight = per_step, weight
        self.columns, self.system_prompt, self.max_tokens = columns, system_prompt, max_tokens
        self.rendering: Rendering = rendering
        self.data: Demonstrations | None = None
        self.steps = 0
        """Optimizer steps of the policy so far."""
        self.earned = 0.0
        """Demonstrations that have not fallen due yet."""
        self.due = 0
        self.drawn = 0
        self._learns = False
        """Whether the running optimizer step moves the policy."""
        self._items: list[int] = []
        """Its demonstrations."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add their term to the module's loss.

        Raises:
            ValueError: If the module has no policy to imitate them.
        """
        if stage != "fit":
            return
        module: Any = pl_module
        if not hasattr(module, "policy"):
            raise ValueError(
                f"DemonstrationInjection: {type(module).__name__} has no policy to imitate demonstrations."
            )
        module.add_loss("demonstrations", lambda batch_idx: self.loss(trainer, module, batch_idx))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the demonstrations, now that the seed is that of the run, resumed or not."""
        self.data = self._load(trainer, pl_module)

    def _load(self, trainer: Trainer, module: Any) -> Demonstrations:
        data = data_module(trainer)
        self.seed = int(data.seed)
        source = parse_source(self.demonstrations) if isinstance(self.demonstrations, str) else self.demonstrations
        rows = source.rows("train", 0, self.seed)
        if not len(rows):
            raise ValueError(f"DemonstrationInjection: {source} has no rows.")
        columns = recognise(field_names(rows), self.columns, need=("prompt", "response"))
        options = (self.system_prompt, self.rendering, self.max_tokens or module.max_positions, held_out_prompts(data))
        found = Demonstrations(rows, columns, module.tokenizer, *options)
        dropped = "".join(f"; dropped {count}: {why}" for why, count in found.dropped.items())
        say(f"{len(found)} demonstrations to inject of {source}: {columns.description}{dropped}")
        return found

    def _numbers(self) -> list[int]:
        """The demonstrations that are drawn next, those of one optimizer step."""
        assert self.data is not None
        size, numbers = len(self.data), []
        for number in range(self.drawn, self.drawn + min(self.due, self.per_step)):
            order = hashed_permutation(size, self.seed, _DEMONSTRATIONS, number // size)
            numbers.append(int(order[number % size]))
        return numbers

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """At the first minibatch of an optimizer step, draw its demonstrations."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            module: Any = pl_module
            idle = getattr(module, "idle", None) is module.policy or getattr(module, "trains_critic_only", False)
            self._learns = not idle and batch.step_tokens > 0
            self._items = self._numbers() if self._learns else []
            how: Any = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": 1, "reduce_fx": "sum"}
            module.log("train/demonstrations", len(self._items) / trainer.world_size, **how)

    def loss(self, trainer: Trainer, module: Any, batch_idx: int) -> Tensor | None:
        """The share of a minibatch in the demonstrations' loss; ``None`` if the step has none."""
        if not self._items:
            return None
        assert self.data is not None
        rank, num_ranks = data_parallel(trainer)
        accumulate = trainer.accumulate_grad_batches
        mine = self._items[rank::num_ranks][batch_idx % accumulate :: accumulate]
        batch = self._batch(mine or self._items[:1], module)
        mask = batch.loss_mask[:, 1:]
        if not mine:  # ranks take part in the computation alike
            mask = torch.zeros_like(mask)
        logprobs = module.policy(batch.input_ids, None, mask, positions=batch.positions).logprobs
        means = {"train/demonstration_loss": masked_mean(-logprobs.detach(), mask)}
        module.log_mean(means, int(mask.sum()))
        tokens = float(self.data.counts[torch.tensor(self._items)].sum())
        loss: Tensor = self.weight * module.step_scale() * reduce_loss(-logprobs, mask, "token", tokens)
        return loss

    def _batch(self, numbers: list[int], module: Any) -> DemonstrationBatch:
        assert self.data is not None
        items = [self.data[number] for number in numbers]
        return collate_demonstrations(items, module.tokenizer.pad_token_id or 0).to(module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step, count; at the end of a period, let demonstrations fall due."""
        if not (self._learns and finished_step(trainer, batch_idx)):
            return
        self.due -= len(self._items)
        self.drawn += len(self._items)
        self.steps += 1
        self.earned += self.share * batch.step_sequences
        if self.steps % self.period == 0:
            self.due += int(self.earned)
            self.earned -= int(self.earned)

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"steps": self.steps, "earned": self.earned, "due": self.due, "drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.steps, self.earned = state_dict["steps"], state_dict["earned"]
        self.due, self.drawn = state_dict["due"], state_dict["drawn"]


def held_out_prompts(data: Any) -> Collection[tuple[int, ...]]:
    """Token ids of the prompts that a data module holds out."""
    prompts = getattr(data, "val_prompts", None)
    if prompts is not None:
        return {tuple(prompts[i].ids) for i in range(len(prompts))}
    rows = getattr(data, "val_data", None)
    return () if rows is None else rows.prompts
