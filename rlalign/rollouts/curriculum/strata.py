"""Prompts drawn in strata by workers, each with frequencies of its own."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlalign.functional.draws import hashed_permutation, hashed_uniform
from rlalign.rollouts.curriculum.base import CHOICE, Curriculum, ReadColumn


class StratifiedWorkers(Curriculum):
    r"""Workers that draw prompts in strata, each oftener where it has found more to learn, and what undoes the bias.

    Worker :math:`w` draws a prompt of stratum :math:`s` with the frequency

    .. math:: q_w(s) = \epsilon\, p_s + (1 - \epsilon) \frac{p_s u_w(s)}{\sum_{s'} p_{s'} u_w(s')}, \qquad
        u_w(s) = 4 \bar r (1 - \bar r) + u_0

    where :math:`p_s` is the stratum's share of the data and :math:`\bar r` the running pass rate of the worker's own
    prompts of it; what it has not seen counts as 1/2. The first term keeps every stratum in the data. A loss whose
    terms are weighed by :math:`p_s / q_w(s)` (:meth:`importance`) is, in expectation, that of prompts drawn evenly, as
    long as no stratum runs out of prompts within an iteration: the fullest one then takes its place.

    The workers take the places of an iteration in turn, wherever these are sampled: on how many ranks changes nothing.

    Args:
        by: Column of the data whose values are the strata; without one, prompts are one stratum.
        num_workers: Workers, at most the prompts of an iteration.
        exploration: Share :math:`\epsilon` of draws that go by the data, in (0, 1].
        floor: Least interest :math:`u_0` in a stratum that is always, or never, answered right; above 0.
        update: How far an iteration's pass rate moves the running one, in (0, 1].

    Raises:
        ValueError: If a number is out of bounds.
    """

    def __init__(
        self,
        by: str | None = None,
        num_workers: int = 4,
        exploration: float = 0.2,
        floor: float = 0.05,
        update: float = 0.3,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"StratifiedWorkers: num_workers must be at least 1, got {num_workers}.")
        if not (0 < exploration <= 1 and 0 < update <= 1 and 0 < floor < math.inf):
            raise ValueError(
                "StratifiedWorkers: expected exploration and update in (0, 1] and a floor above 0, got "
                f"{exploration}, {update} and {floor}."
            )
        self.by, self.num_workers = by, num_workers
        self.exploration, self.floor, self.update = exploration, floor, update

    def start(self, column: ReadColumn, num_prompts: int, wanted: int, seed: int) -> None:
        """See :class:`Curriculum`."""
        super().start(column, num_prompts, wanted, seed)
        if self.num_workers > wanted:
            raise ValueError(
                f"StratifiedWorkers: {self.num_workers} workers share the {wanted} prompts of an iteration; take fewer."
            )
        names = [str(value) for value in column(self.by)] if self.by else [""] * num_prompts
        self.names = sorted(set(names))
        """Of the strata."""
        numbers = {name: number for number, name in enumerate(self.names)}
        self.stratum = torch.tensor([numbers[name] for name in names])
        """Of each prompt, ``[num_prompts]``."""
        self.shares = torch.bincount(self.stratum, minlength=len(self.names)).double() / num_prompts
        self.rates = torch.full((self.num_workers, len(self.names)), 0.5, dtype=torch.float64)
        """Running pass rates, ``[num_workers, num_strata]``."""
        self.worker = torch.zeros(num_prompts, dtype=torch.long)
        """Which worker drew each prompt of the iteration, ``[num_prompts]``."""
        self.weight = torch.ones(num_prompts)
        """Share over frequency, of each prompt of the iteration, ``[num_prompts]``."""
        self._ordered: dict[int, tuple[Tensor, Tensor]] = {}
        """Of each iteration that was ordered and is not over, these two."""

    def frequencies(self) -> Tensor:
        """How often each worker draws each stratum, ``[num_workers, num_strata]``; rows sum to 1."""
        interest = self.shares * (4 * self.rates * (1 - self.rates) + self.floor)
        adapted = interest / interest.sum(1, keepdim=True)
        return self.exploration * self.shares + (1 - self.exploration) * adapted

    def order(self, iteration: int) -> list[int]:
        """See :class:`Curriculum`."""
        frequencies = self.frequencies()
        cumulative, weights = frequencies.cumsum(1), self.shares / frequencies
        uniform = hashed_uniform(self.seed, CHOICE, iteration, torch.arange(self.num_prompts)).tolist()
        shuffled = hashed_permutation(self.num_prompts, self.seed, CHOICE, iteration, 1)
        left = [shuffled[self.stratum[shuffled] == s].tolist() for s in range(len(self.names))]
        order: list[int] = []
        self.worker, self.weight = torch.zeros_like(self.worker), torch.ones_like(self.weight)
        self._ordered[iteration] = (self.worker, self.weight)
        for place in range(self.num_prompts):
            worker = place % self.num_workers
            wanted = int((cumulative[worker] <= uniform[place] * cumulative[worker, -1]).sum())
            if not left[wanted]:
                wanted = max(range(len(left)), key=lambda s: len(left[s]))
            prompt = left[wanted].pop()
            self.worker[prompt], self.weight[prompt] = worker, weights[worker, self.stratum[prompt]]
            order.append(prompt)
        return order

    def turn_to(self, iteration: int) -> None:
        """See :class:`Curriculum`."""
        self.worker, self.weight = self._ordered[iteration]
        self._ordered = {number: drawn for number, drawn in self._ordered.items() if number >= iteration}

    def importance(self, prompts: Tensor) -> Tensor:
        """The stratum's share of the data over the frequency with which its worker draws it, ``[B]``, float32.

        Args:
            prompts: Of the iteration that :meth:`order` was last asked for or :meth:`turn_to` has turned to, ``[B]``.
        """
        return self.weight[prompts]

    def observe(self, pass_rates: Mapping[int, float]) -> None:
        """See :class:`Curriculum`."""
        seen: dict[tuple[int, int], list[float]] = {}
        for prompt, rate in pass_rates.items():
            seen.setdefault((int(self.worker[prompt]), int(self.stratum[prompt])), []).append(rate)
        for place, rates in seen.items():
            self.rates[place] += self.update * (sum(rates) / len(rates) - self.rates[place])

    def metrics(self, iteration: int) -> dict[str, float]:
        """How even the workers' draws are, and how large weights get."""
        q = self.frequencies()
        entropy = -(q * q.log()).sum(1).mean() / max(math.log(len(self.names)), 1e-12)
        return {
            "rollout/curriculum/evenness": float(entropy) if len(self.names) > 1 else 1.0,
            "rollout/curriculum/max_weight": float((self.shares / q).max()),
        }

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Curriculum`."""
        return {"rates": self.rates.clone(), "names": list(self.names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :class:`Curriculum`."""
        if state_dict["names"] != self.names or len(state_dict["rates"]) != self.num_workers:
            raise ValueError(
                f"The run is resumed with {self.num_workers} workers and the strata {', '.join(self.names)}; its "
                f"checkpoint has {len(state_dict['rates'])} and {', '.join(state_dict['names'])}: resume it with the "
                "same."
            )
        self.rates = state_dict["rates"].clone()
