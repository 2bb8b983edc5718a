"""Prompts -> responses -> rewards -> minibatches: what every algorithm that learns from rollouts shares."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from rlalign.functional.draws import fold_in
from rlalign.rewards.base import NamedReward
from rlalign.rewards.composition import Normalization
from rlalign.rewards.suite import RewardSuite, Tally
from rlalign.rollouts.ahead import Ahead, Asked
from rlalign.rollouts.batch import Rollout, RolloutBatch, collate
from rlalign.rollouts.curriculum import Curriculum, EveryPromptOnce, resume
from rlalign.rollouts.cutting import Shapes
from rlalign.rollouts.learner import Learner
from rlalign.rollouts.loader import LazyLoader, Sealed, StepPlan
from rlalign.rollouts.prompts import Prompt, PromptDataset, PromptSource, each_sample, load_prompts
from rlalign.rollouts.ranks import data_parallel, gather_objects
from rlalign.rollouts.sampling.base import AheadSampler, Drawing, Sampler, SampleRequest, SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler
from rlalign.rollouts.scoring import rank, refuse_unscored, score, verify, with_totals
from rlalign.rollouts.seeded import SeededDataModule
from rlalign.rollouts.statistics import composition_statistics, pass_rates, rollout_statistics, scoring_statistics
from rlalign.rollouts.template import Rendering

TRAIN, VALIDATE = 0, 1  # keys of two streams of random numbers


class RolloutDataModule(SeededDataModule):
    """Owns the prompts, has the policy sample responses to them, scores these, and serves minibatches.

    One epoch of the trainer is one iteration: sample with the current policy, then learn from minibatches. Prompts,
    sampling and minibatches are functions of seed, iteration and item alone.

    Args:
        train: Prompts to learn from: a JSONL, CSV or Parquet file, a folder or hub name of ``datasets``, or a source.
        val: Held-out prompts.
        rewards: By name, callables ``reward(example, response) -> float | None``.
        reward_weights: By name; 1 where not given. Rewards are gated, clipped, normalised, weighted and summed, in this
            order: see :class:`~rlalign.rewards.composition.Composition`.
        reward_gates: By name, the reward or rewards that must be at least 0.5 for this one to count: ``{accuracy:
            format}``.
        reward_ranges: By name, the lowest and the highest value that counts: ``{length: [-1, 1]}``.
        reward_normalization: By name, ``group`` or ``batch``: over the prompt's responses or all of a round of
            sampling, on all ranks. What is learned from is normalised, held-out rewards are not.
        correct: Name of the reward that tells right from wrong (right: its own score is at least 0.5); the first one by
            default.
        max_unavailable_share: Stop where a larger share of an iteration, or of the held-out responses, could not be
            judged because what judges (a server, a sandbox) was unavailable.
        val_verifier: A second reward, for held-out responses only: how often it agrees tells whether the first one is
            being gamed (``val/verifier_gap``).
        ranker: What chooses among the responses to a held-out prompt (best-of-n): any reward, such as a
            :class:`~rlalign.rewards.learned.LearnedReward`; it is not learned from. A method that learns a value
            function ranks by that.
        sampling: How responses are drawn; ``max_new_tokens`` bounds them.
        val_sampling: What is different in validation, ``{temperature: 0.6}``, say.
        sampler: What draws them.
        prompts_per_iteration: Prompts an iteration, over all ranks.
        group_size: Responses a prompt.
        step_size: Sequences an optimizer step, over all ranks; all of an iteration by default. Where an algorithm
            learns from fewer than were sampled (pairs), the iteration's steps share them evenly.
        minibatch_size: Sequences a forward pass and rank, on average: minibatches are cut by what they cost to compute.
            By default what ``accumulate_grad_batches`` leaves.
        num_passes: Passes over an iteration's rollouts.
        val_samples: Responses a held-out prompt.
        val_batch_size: Held-out prompts sampled at a time, on each rank.
        val_limit: Use the first so many held-out prompts only.
        columns: Where the data have other names: ``prompt``, ``answer`` -> name of the column.
        num_held_out: Without ``val``, rows of ``train`` to hold out for validation.
        system_prompt: Put before every prompt.
        rendering: How a prompt that is plain text is shown to the model: through its chat template if it has one
            (``auto``), always (``chat``) or never (``plain``).
        max_prompt_tokens: Longer prompts are dropped, and counted.
        curriculum: Which prompts an iteration takes; without one, every prompt once before any twice.
        seed: Of prompts, sampling and minibatches; ``seed_everything`` by default.
    """

    def __init__(
        self,
        train: str | PromptSource,
        rewards: dict[str, NamedReward | Callable[..., Any]],
        val: str | PromptSource | None = None,
        reward_weights: dict[str, float] | None = None,
        reward_gates: dict[str, str | list[str]] | None = None,
        reward_ranges: dict[str, tuple[float, float]] | None = None,
        reward_normalization: dict[str, Normalization] | None = None,
        correct: str | None = None,
        max_unavailable_share: float = 0.1,
        val_verifier: NamedReward | Callable[..., Any] | None = None,
        ranker: NamedReward | Callable[..., Any] | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (never changed)
        val_sampling: dict[str, Any] | None = None,
        sampler: Sampler | None = None,
        prompts_per_iteration: int = 32,
        group_size: int = 8,
        step_size: int | None = None,
        minibatch_size: int | None = None,
        num_passes: int = 1,
        val_samples: int = 1,
        val_batch_size: int = 32,
        val_limit: int | None = None,
        columns: dict[str, str] | None = None,
        num_held_out: int = 0,
        system_prompt: str | None = None,
        rendering: Rendering = "auto",
        max_prompt_tokens: int | None = None,
        curriculum: Curriculum | None = None,
        seed: int | None = None,
    ) -> None:
        sizes = {
            "prompts_per_iteration": prompts_per_iteration,
            "group_size": group_size,
            "step_size": step_size,
            "minibatch_size": minibatch_size,
            "num_passes": num_passes,
            "val_samples": val_samples,
            "val_batch_size": val_batch_size,
            "val_limit": val_limit,
            "max_prompt_tokens": max_prompt_tokens,
        }
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"data.{name} must be at least 1, got {size}.")
        if num_held_out < 0 or (num_held_out and val is not None):
            raise ValueError(
                f"data.num_held_out={num_held_out} takes rows of data.train: give it or data.val, not both."
            )
        super().__init__(step_size or prompts_per_iteration * group_size, minibatch_size, num_passes, seed)
        self.train_source, self.val_source = train, train if val is None and num_held_out else val
        self.num_held_out = num_held_out
        self.rendering: Rendering = rendering
        if not 0 <= max_unavailable_share <= 1:
            raise ValueError(f"data.max_unavailable_share must be in [0, 1], got {max_unavailable_share}.")
        self.rewards = RewardSuite(rewards, reward_weights, correct, reward_gates, reward_ranges, reward_normalization)
        if group_size == 1 and "group" in self.rewards.composition.normalization.values():
            raise ValueError("data.group_size=1 makes what is normalised over its group 0: it must be at least 2.")
        self.max_unavailable_share = max_unavailable_share
        self.curriculum = curriculum or EveryPromptOnce()
        self.verifier = None if val_verifier is None else RewardSuite({"val_verifier": val_verifier})
        self.ranker = None if ranker is None else RewardSuite({"ranker": ranker})
        self.sampling, self.val_sampling = sampling, sampling.changed(val_sampling or {})
        self.sampler: Sampler = sampler or LocalSampler()
        self.prompts_per_iteration, self.group_size = prompts_per_iteration, group_size
        self.val_samples, self.val_batch_size, self.val_limit = val_samples, val_batch_size, val_limit
        self.columns, self.system_prompt, self.max_prompt_tokens = columns, system_prompt, max_prompt_tokens
        self.end_iteration = False
        """Set by a callback, alike on all ranks: the rest of the iteration's minibatches are empty."""
        self._ahead = Ahead(self._ask)
        self.last_rollouts: list[Rollout] = []
        """Of the newest iteration, for callbacks that show samples."""
        self.train_prompts: PromptDataset | None = None
        self.val_prompts: PromptDataset | None = None

    # ---- prompts -----------------------------------------------------------------------------------------------------

    @property
    def learner(self) -> Learner:
        """The algorithm that is trained."""
        assert self.trainer is not None
        return self.trainer.lightning_module  # type: ignore[return-value]

    def load(self, split: Literal["train", "val"]) -> PromptDataset | None:
        """The prompts to learn from, which repeat none of those held out, or these."""
        source = self.train_source if split == "train" else self.val_source
        if source is None:
            return None
        assert self.seed is not None
        prompts = load_prompts(
            source,
            self.learner.tokenizer,
            split=split,
            columns=self.columns,
            max_prompt_tokens=self._longest_prompt(split),
            system_prompt=self.system_prompt,
            rendering=self.rendering,
            limit=self.val_limit if split == "val" else None,
            num_held_out=self.num_held_out,
            seed=self.seed,
            exclude=self.val_prompts if split == "train" else None,
        )
        self.rewards.check_columns(prompts.column_names)
        for suite in filter(None, (self.verifier, self.ranker) if split == "val" else ()):
            suite.check_columns(prompts.column_names)
        return prompts

    def _longest_prompt(self, split: Literal["train", "val"]) -> int | None:
        """Tokens of a prompt that leave room for a response; longer prompts are dropped and counted."""
        if self.learner.max_positions is None:
            return self.max_prompt_tokens
        params = self.sampling if split == "train" else self.val_sampling
        room = self.learner.max_positions - params.max_new_tokens
        if room < 1 or room < (self.max_prompt_tokens or 0):
            raise ValueError(
                f"data.max_prompt_tokens={self.max_prompt_tokens} and max_new_tokens={params.max_new_tokens} are more "
                f"than the {self.learner.max_positions} positions of the model."
            )
        return self.max_prompt_tokens or room

    def setup(self, stage: str) -> None:
        """Load the prompts that the stage needs."""
        super().setup(stage)
        self.sampler.setup(self.learner.tokenizer)
        if self.val_prompts is None:
            self.val_prompts = self.load("val")
        stage = getattr(stage, "value", stage)
        if stage != "fit" and self.val_prompts is None:
            raise ValueError(f"Nothing to {stage}: give held-out prompts by data.val or data.num_held_out.")
        if stage == "fit":
            self._setup_training()

    def _setup_training(self) -> None:
        assert self.trainer is not None
        assert self.seed is not None
        is_new = self.train_prompts is None
        self._ahead.forget()
        if is_new:
            self.train_prompts = self.load("train")
        assert self.train_prompts is not None
        available = len(self.train_prompts)
        if available < self.prompts_per_iteration:
            raise ValueError(
                f"data.prompts_per_iteration={self.prompts_per_iteration} is more than the {available} prompts of "
                f"{self.train_source}."
            )
        if is_new or self.trainer.current_epoch == 0:  # a second run with the same data module begins like the first
            self.curriculum.start(self.train_prompts.column, available, self.prompts_per_iteration, self.seed)

    def forget(self) -> None:
        """Drop the prompts."""
        self.train_prompts = self.val_prompts = None

    def state_dict(self) -> dict[str, Any]:
        """The seed, and what the curriculum has observed, where something is trained."""
        if self.train_prompts is None:
            return super().state_dict()
        return super().state_dict() | {"curriculum": {type(self.curriculum).__name__: self.curriculum.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the seed of the run that is resumed, and with what its curriculum has observed."""
        super().load_state_dict(state_dict)
        if self.train_prompts is not None:  # else nothing is trained
            resume(self.curriculum, state_dict.get("curriculum", {}))

    # ---- sampling ----------------------------------------------------------------------------------------------------

    @contextmanager
    def sampling_from_policy(self) -> Iterator[None]:
        """Within it, :meth:`sample` draws from the policy as it is now."""
        self.sampler.sync(self.learner.policy)
        try:
            yield
        finally:
            self.sampler.release()

    @torch.no_grad()
    def sample(
        self, prompts: list[tuple[Prompt, int]], params: SamplingParams, *keys: int, drawing: Drawing | None = None
    ) -> list[Rollout]:
        """One scored response to each pair of prompt and sample number, in order.

        Every rank must be within :meth:`sampling_from_policy` and call this equally often.

        Args:
            prompts: Prompts with the number of the sample to draw; samples of a prompt are adjacent.
            params: How to draw.
            keys: With the run's seed, what the random numbers are a function of.
            drawing: Where they are being drawn already.
        """
        assert self.trainer is not None
        if drawing is None:
            with self.trainer.precision_plugin.forward_context():
                completions = self.sampler.sample(self._requests(prompts, *keys), params)
        else:
            completions = drawing.result()
        if not prompts:  # a rank without a share takes part in the sampling, for the sake of sharded weights
            return []
        return score(prompts, completions, self.rewards, self.learner.tokenizer)

    def _requests(self, prompts: list[tuple[Prompt, int]], *keys: int) -> list[SampleRequest]:
        assert self.seed is not None
        seed = fold_in(self.seed, *keys)
        return [SampleRequest(prompt.ids, prompt.index, sample, seed) for prompt, sample in prompts]

    def _ask(self, iteration: int) -> Asked:
        """What an iteration takes; where the sampler can work ahead, it begins with the first round."""
        assert self.trainer is not None
        order = self.curriculum.checked_order(iteration)
        asked = Asked(order, self.curriculum.metrics(iteration))
        if isinstance(self.sampler, AheadSampler):
            prompts = self._share(order[: self.prompts_per_iteration])[1]
            with self.trainer.precision_plugin.forward_context():
                asked.drawing = self.sampler.submit(self._requests(prompts, TRAIN, iteration), self.sampling)
        return asked

    def _share(self, indices: list[int]) -> tuple[list[int], list[tuple[Prompt, int]]]:
        """Which places of these prompts are this rank's, and the samples to draw for them."""
        assert self.trainer is not None
        assert self.train_prompts is not None
        rank, num_ranks = data_parallel(self.trainer)
        mine = list(range(len(indices)))[rank::num_ranks]
        return mine, each_sample(self.train_prompts, [indices[slot] for slot in mine], self.group_size)

    def _sample_round(self, indices: list[int], iteration: int, drawing: Drawing | None) -> list[Rollout]:
        """All ranks' rollouts of these prompts, in the order of prompts; each rank samples its share."""
        mine, prompts = self._share(indices)
        drawn = self.sample(prompts, self.sampling, TRAIN, iteration, drawing=drawing)
        keys = [(slot, s) for slot in mine for s in range(self.group_size)]
        merged = {k: r for part in gather_objects(list(zip(keys, drawn, strict=True))) for k, r in part}
        rollouts = [merged[key] for key in sorted(merged)]
        return with_totals(rollouts, self.rewards.composition, self.group_size)

    def _take_tallies(self) -> list[Tally]:
        """What scoring was like on each rank since this was last asked; ranks that share their data count once."""
        assert self.trainer is not None
        rank = data_parallel(self.trainer)[0]
        return list(dict(gather_objects((rank, self.rewards.take_tally()))).values())

    def collect(self, iteration: int) -> RolloutBatch:
        """Sample until the iteration is full of groups that the algorithm keeps.

        Returns:
            Its rollouts, on the CPU of every rank.
        """
        learner, size, wanted = self.learner, self.group_size, self.prompts_per_iteration
        started = time.perf_counter()
        self.rewards.take_tally()  # what validation left behind
        kept: list[Rollout] = []
        refused: list[Rollout] = []
        sampled: list[Rollout] = []
        rounds = 0
        with self.sampling_from_policy():
            asked = self._begin(iteration)
            while len(kept) < wanted * size and rounds < learner.max_rounds:
                indices = asked.order[rounds * wanted : (rounds + 1) * wanted]
                if not indices:
                    break
                part = self._sample_round(indices, iteration, None if rounds else asked.drawing)
                sampled += part
                rollouts = self._collate(part)
                keep = learner.keep_groups(rollouts, size).tolist()
                for group, kept_group in enumerate(keep):
                    (kept if kept_group else refused).extend(part[group * size : (group + 1) * size])
                rounds += 1
        tallies = self._take_tallies()
        refuse_unscored(sampled, tallies, iteration, self.max_unavailable_share)
        num_kept, missing = len(kept), wanted * size - len(kept)
        if missing > 0 and learner.partial_batch == "fill":
            kept = kept + refused[:missing]
        self.last_rollouts = sampled
        self.curriculum.observe(pass_rates(sampled, self.rewards.correct))
        if rounds != 1 or num_kept < len(sampled):
            rollouts = self._collate(kept[: wanted * size] or refused[:size])
        rollouts.kept[num_kept:] = False
        if not kept:  # nothing to learn from: an iteration of empty steps
            rollouts.loss_mask = torch.zeros_like(rollouts.loss_mask)
        rollouts.statistics = {
            **rollout_statistics(sampled, size),
            **composition_statistics(sampled, self.rewards.composition),
            **scoring_statistics(tallies),
            **asked.choice,
            **self._ahead.statistics(self.sampler, sampled),
            "rollout/rounds": float(rounds),
            "rollout/kept_share": num_kept / len(sampled),
            "rollout/filled_share": 1 - max(missing, 0) / (wanted * size),
            "perf/sample_seconds": (seconds := time.perf_counter() - started),
            "perf/sampled_tokens_per_second": sum(len(r.token_ids) for r in sampled) / max(seconds, 1e-9),
        }
        return rollouts

    def _begin(self, iteration: int) -> Asked:
        """What was asked for this iteration; it is asked for what comes after it, as far as that may be."""
        assert self.trainer is not None
        last = iteration + (self.sampler.staleness if isinstance(self.sampler, AheadSampler) else 0)
        if (epochs := self.trainer.max_epochs or -1) > 0:
            last = min(last, epochs - 1)
        asked = self._ahead.begin(iteration, last)
        self.curriculum.turn_to(iteration)
        return asked

    def _collate(self, rollouts: list[Rollout]) -> RolloutBatch:
        return collate(rollouts, self.learner.tokenizer.pad_token_id or 0, self.sampling.temperature)

    # ---- minibatches -------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> StepPlan:
        """The sizes of an iteration."""
        return self.plan_of(self.prompts_per_iteration * self.group_size, self.learner.rows_together)

    def train_dataloader(self) -> LazyLoader:
        """Sample when the first minibatch is due, then serve the minibatches."""
        plan = self.plan
        return LazyLoader(lambda: self._minibatches(plan), plan.num_minibatches)

    def _minibatches(self, plan: StepPlan) -> Iterator[Sealed]:
        assert self.trainer is not None
        assert self.seed is not None
        iteration = self.trainer.current_epoch
        self.end_iteration = False
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            rollouts = self._prepared(self.collect(iteration))
            rollouts = self.learner.annotate(rollouts, plan.num_steps, plan.minibatch_size)
        has_signal: np.ndarray | None = None
        if self.learner.skips_zero_advantages and rollouts.replayed is None:
            has_signal = rollouts.has_signal(plan.rows_together).numpy()
            rollouts.statistics["rollout/skipped_share"] = 1 - float(has_signal.mean())
        first = rollouts.statistics
        shapes = self._shapes(rollouts)
        rank = data_parallel(self.trainer)[0]
        for items in plan.steps(len(rollouts), self.seed, iteration):
            ended = self.end_iteration  # looked at between steps only, so that no step is cut in two
            of_step = rollouts[torch.from_numpy(items)]
            tokens, fresh = float(of_step.loss_mask.sum()), float(of_step.fresh_mask.sum())
            sizes: dict[str, Any] = {
                "step_tokens": tokens,
                "step_replayed_tokens": tokens - fresh,
                "step_sequences": float(of_step.loss_mask.any(-1).sum()),
            }
            sizes = dict.fromkeys(sizes, 0.0) if ended else sizes
            if has_signal is not None and has_signal[items].any():
                items = items[has_signal[items]]
            for rows in plan.minibatches(items, shapes, rank):
                usable = len(rows) and not ended
                batch = rollouts[torch.from_numpy(rows)].trimmed() if usable else rollouts.emptied(plan.rows_together)
                yield Sealed(replace(batch, **sizes, statistics=first))
                first = {}

    def _shapes(self, rollouts: RolloutBatch) -> Shapes:
        lengths, prompts = rollouts.response_lengths, rollouts.prompt_lengths
        if self.learner.shares_prompts:
            return Shapes(lengths, rollouts.prompt_index, prompts)
        return Shapes(lengths + prompts)

    def _prepared(self, collected: RolloutBatch) -> RolloutBatch:
        """What the algorithm learns from; where that is nothing, a unit of rows that the loss does not count."""
        prepared = self.learner.prepare(collected, self.group_size)
        if len(prepared):
            return prepared
        unit = collected[: self.learner.rows_together]
        no_advantage, no_token = torch.zeros(len(unit), 1), torch.zeros_like(unit.loss_mask)
        return replace(unit, advantages=no_advantage, loss_mask=no_token, statistics=prepared.statistics)

    # ---- validation --------------------------------------------------------------------------------------------------

    def val_dataloader(self) -> LazyLoader | list[Any]:
        """Lists of held-out prompts, each on one rank only; the last may be shorter, or empty on some ranks."""
        if self.val_prompts is None:
            return []
        assert self.trainer is not None
        rank, num_ranks = data_parallel(self.trainer)
        chunks = np.array_split(
            np.arange(len(self.val_prompts)), -(-len(self.val_prompts) // (self.val_batch_size * num_ranks))
        )
        shares = [chunk[rank::num_ranks].tolist() for chunk in chunks]

        def serve() -> Iterator[list[int]]:
            # Who takes the last share does not come back here: held_out_figures releases the sampler.
            self.sampler.sync(self.learner.policy)
            yield from shares

        return LazyLoader(serve, len(shares))

    def test_dataloader(self) -> LazyLoader | list[Any]:
        """As in validation."""
        return self.val_dataloader()

    def predict_dataloader(self) -> LazyLoader | list[Any]:
        """As in validation."""
        return self.val_dataloader()

    def sample_held_out(self, indices: list[int]) -> list[Rollout]:
        """``val_samples`` responses to each of these held-out prompts.

        The random numbers do not depend on the iteration: two checkpoints differ by their policies only.
        """
        assert self.val_prompts is not None
        prompts = each_sample(self.val_prompts, indices, self.val_samples)
        return self.sample(prompts, self.val_sampling, VALIDATE)

    def verify(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Held-out rollouts, with what the second verifier says of them, if there is one."""
        if self.verifier is None or self.val_prompts is None or not rollouts:
            return rollouts
        return verify(rollouts, self.val_prompts, self.verifier)

    def rank(self, rollouts: Sequence[Rollout]) -> Sequence[float | None] | None:
        """What the ranker says of held-out rollouts, ``None`` where it could not tell; ``None`` alone without one."""
        if self.ranker is None or self.val_prompts is None:
            return None
        return rank(rollouts, self.val_prompts, self.ranker) if rollouts else []
