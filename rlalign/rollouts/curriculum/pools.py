"""Prompts drawn by pools of their running pass rate."""

import difflib
import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlalign.functional.draws import hashed_uniform
from rlalign.rollouts.curriculum.base import CHOICE, Curriculum, ReadColumn


class DifficultyPools(Curriculum):
    """Draws prompts by pools of difficulty: mostly those that are sometimes answered right, and sometimes not.

    A prompt is hard up to a running pass rate of ``hard_up_to``, normal up to ``normal_up_to``, easy above, and unseen
    until it is first sampled. Prompts are drawn without replacement with the weights of their pools (exponential keys,
    Efraimidis and Spirakis 2006). The defaults are those of prime-rl.

    Args:
        hard_up_to: Highest pass rate of a hard prompt.
        normal_up_to: Highest pass rate of a normal one.
        weights: Of ``hard``, ``normal``, ``easy`` and ``unseen``, where they are not 0.2, 1, 0.2 and 1. A pool of
            weight 0 is drawn from only when nothing else is left.
        update: How far an iteration's pass rate moves the running one, in (0, 1]; the first one is taken as it is.
        by: Column of kinds of prompts. The running pass rate of a kind is the estimate for those of its prompts that
            are unseen.

    Raises:
        ValueError: If a number is out of bounds or there is no such pool.
    """

    def __init__(
        self,
        hard_up_to: float = 0.25,
        normal_up_to: float = 0.75,
        weights: dict[str, float] | None = None,
        update: float = 0.5,
        by: str | None = None,
    ) -> None:
        self.weights = {"hard": 0.2, "normal": 1.0, "easy": 0.2, "unseen": 1.0}
        for name in weights or {}:
            if name not in self.weights:
                near = difflib.get_close_matches(name, self.weights, n=1, cutoff=0)[0]
                raise ValueError(f"DifficultyPools: there is no pool '{name}'; did you mean '{near}'?")
        self.weights |= weights or {}
        if not all(0 <= weight < math.inf for weight in self.weights.values()) or not any(self.weights.values()):
            raise ValueError(f"DifficultyPools: weights must be 0 or more, and not all 0, got {self.weights}.")
        if not 0 <= hard_up_to <= normal_up_to <= 1 or not 0 < update <= 1:
            raise ValueError(
                "DifficultyPools: expected 0 <= hard_up_to <= normal_up_to <= 1 and 0 < update <= 1, got "
                f"{hard_up_to}, {normal_up_to} and {update}."
            )
        self.hard_up_to, self.normal_up_to, self.update, self.by = hard_up_to, normal_up_to, update, by

    def start(self, column: ReadColumn, num_prompts: int, wanted: int, seed: int) -> None:
        """See :class:`Curriculum`."""
        super().start(column, num_prompts, wanted, seed)
        names = [str(value) for value in column(self.by)] if self.by else []
        self.kinds = {name: number for number, name in enumerate(sorted(set(names)))}
        self.kind = torch.tensor([self.kinds[name] for name in names], dtype=torch.int64)
        self.rates = torch.full((num_prompts,), -1.0, dtype=torch.float64)
        """Running pass rate of each prompt, -1 where it is unseen."""
        self.kind_rates = torch.full((len(self.kinds),), -1.0, dtype=torch.float64)
        """The same of each kind."""

    def pools(self) -> list[str]:
        """The pool of each prompt."""
        rates = self.rates
        if self.by:
            rates = torch.where(rates < 0, self.kind_rates[self.kind], rates)
        pool = (rates >= 0).long() + (rates > self.hard_up_to) + (rates > self.normal_up_to)
        return [("unseen", "hard", "normal", "easy")[number] for number in pool.tolist()]

    def order(self, iteration: int) -> list[int]:
        """See :class:`Curriculum`."""
        weights = torch.tensor([self.weights[pool] for pool in self.pools()], dtype=torch.float64)
        uniform = hashed_uniform(self.seed, CHOICE, iteration, torch.arange(self.num_prompts))
        times = -torch.log1p(-uniform)  # until the first event, at rate 1
        last = weights == 0
        order = torch.where(last, times, times / weights.masked_fill(last, 1)).argsort(stable=True)
        return [*order[~last[order]].tolist(), *order[last[order]].tolist()]

    def observe(self, pass_rates: Mapping[int, float]) -> None:
        """See :class:`Curriculum`."""
        of_kind: dict[int, list[float]] = {}
        for prompt, rate in pass_rates.items():
            self._move(self.rates, prompt, rate)
            if self.by:
                of_kind.setdefault(int(self.kind[prompt]), []).append(rate)
        for kind, rates in of_kind.items():
            self._move(self.kind_rates, kind, fmean(rates))

    def _move(self, rates: Tensor, index: int, rate: float) -> None:
        before = float(rates[index])
        rates[index] = rate if before < 0 else before + self.update * (rate - before)

    def metrics(self, iteration: int) -> dict[str, float]:
        """The share of each pool in all prompts."""
        pools = self.pools()
        return {f"rollout/curriculum/{name}_share": pools.count(name) / len(pools) for name in self.weights}

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Curriculum`."""
        return {"rates": self.rates.clone(), "kinds": list(self.kinds), "kind_rates": self.kind_rates.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :class:`Curriculum`."""
        if len(state_dict["rates"]) != self.num_prompts:
            raise ValueError(
                f"The run is resumed with {self.num_prompts} prompts, and the curriculum of its checkpoint knows the "
                f"pass rates of {len(state_dict['rates'])}: resume it with the same data."
            )
        self.rates = state_dict["rates"].clone()
        for name, rate in zip(state_dict["kinds"], state_dict["kind_rates"].tolist(), strict=True):
            if name in self.kinds:
                self.kind_rates[self.kinds[name]] = rate
