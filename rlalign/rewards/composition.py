"""From the scores of several rewards to one number: gate, clip, normalise, weight."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

Score = float | None
Normalization = Literal["group", "batch"]

OPEN = 0.5
"""A gate is open from this score on."""
LARGEST = 1e18
"""A score or total beyond it counts as infinite: single precision cannot add up the squares of larger ones."""
_EPS = 1e-4  # as in the group's advantage
_DECIMALS = 9


class Composition:
    r"""How the scores of several rewards make up one total, in this order.

    1. *Gate*: a gated reward counts where each of its gates scores at least 0.5, and is 0 elsewhere, whatever it is
       itself. Where a gate could not be computed, and none of the others is closed, there is no score. A gate that is
       itself gated counts as gated.
    2. *Clip* to the range, the gate's 0 included.
    3. *Normalise*, if a group size is given: :math:`(r - \bar r) / (s + 10^{-4})`, with the mean and the standard
       deviation (``ddof`` 1) of the scores of the prompt's ``group``, or of the whole ``batch``, those that could not
       be computed left out. Where all are equal, exactly 0.
    4. *Weight* and sum. A total without a score of a reward of non-zero weight is none, as is one beyond 1e18.

    Group by group is the decoupled normalisation of GDPO (Liu et al. 2026, https://arxiv.org/abs/2601.05242): with
    ``scale_rewards: none`` a ``GRPO`` learns from that sum as it is; the paper normalises it once more, over the batch.

    Args:
        names: Of the rewards.
        weights: Name -> weight, 1 where not given.
        gates: Name -> the reward, or the rewards, that are its gate. A gate may have weight 0.
        ranges: Name -> lowest and highest value that counts; infinity for no bound.
        normalization: Name -> ``group`` or ``batch``.

    Raises:
        ValueError: If a name is unknown, a weight or range is not usable, or gates form a cycle.
    """

    def __init__(
        self,
        names: Iterable[str],
        weights: Mapping[str, float] | None = None,
        gates: Mapping[str, str | Sequence[str]] | None = None,
        ranges: Mapping[str, Sequence[float]] | None = None,
        normalization: Mapping[str, Normalization] | None = None,
    ) -> None:
        self.names = list(names)
        used = {"weights": weights, "gates": gates, "ranges": ranges, "normalization": normalization}
        for where, mapping in used.items():
            if not isinstance(mapping or {}, Mapping):
                raise ValueError(f"reward_{where}: expected names of rewards with a value each, got {mapping!r}.")
            for name in mapping or {}:
                self.check_name(name, f"reward_{where}")
        self.weights = {name: _checked_weight(name, (weights or {}).get(name, 1.0)) for name in self.names}
        if not any(self.weights.values()):
            raise ValueError("reward_weights: all are 0, and there is nothing to learn from; give one another weight.")
        self.gates = {name: _checked_gates(name, gate) for name, gate in (gates or {}).items()}
        self._order = self._sorted_by_gates()
        self.ranges = {name: _checked_range(name, bounds) for name, bounds in (ranges or {}).items()}
        self.normalization = dict(normalization or {})
        for name, over in self.normalization.items():
            if over not in ("group", "batch"):
                raise ValueError(
                    f"reward_normalization: '{name}' is normalised over its 'group' or the 'batch', not {over!r}."
                )

    def totals(self, components: Mapping[str, Sequence[Score]], group_size: int | None = None) -> list[Score]:
        """The totals of ``N`` responses.

        Args:
            components: Each reward by name, ``[N]``, as it was computed; ``None`` where it could not be.
            group_size: Responses a prompt, adjacent ones; without it nothing is normalised.

        Returns:
            ``[N]``; ``None`` where a reward of non-zero weight has no score.
        """
        weighted = {name: weight for name, weight in self.weights.items() if weight}
        gated = self._gated(components)
        shaped = {name: self._clipped(name, gated[name]) for name in weighted}
        is_normalised = group_size is not None and any(name in self.normalization for name in weighted)
        if group_size is not None:
            for name in weighted.keys() & self.normalization.keys():
                size = group_size if self.normalization[name] == "group" else max(len(shaped[name]), 1)
                parts = [shaped[name][i : i + size] for i in range(0, len(shaped[name]), size)]
                shaped[name] = [score for part in parts for score in standardized(part)]
        totals: list[Score] = []
        for i in range(len(next(iter(components.values())))):
            scores = {name: shaped[name][i] for name in weighted}
            if None in scores.values():
                totals.append(None)
                continue
            total = sum(weighted[name] * score for name, score in scores.items() if score)
            # Totals that are equal but for rounding must stay so: a group's advantage divides by their deviation.
            total = round(total, _DECIMALS) + 0.0 if is_normalised else total
            totals.append(total if abs(total) <= LARGEST else None)
        return totals

    def shares(self, components: Mapping[str, Sequence[Score]]) -> dict[str, float]:
        """``NAME_gated_share`` and ``NAME_clipped_share`` of the rewards that have a gate or a range.

        The first is over all responses, the second over those with a score.
        """
        gated = self._gated(components)
        shares: dict[str, float] = {}
        for name in self.gates:
            closed = [self._gate(name, gated, i) == 0 for i in range(len(gated[name]))]
            shares[f"{name}_gated_share"] = sum(closed) / max(len(closed), 1)
        for name in self.ranges:
            changed = [
                clipped != score
                for score, clipped in zip(gated[name], self._clipped(name, gated[name]), strict=True)
                if score is not None
            ]
            shares[f"{name}_clipped_share"] = sum(changed) / max(len(changed), 1)
        return shares

    def check_name(self, name: str, where: str) -> None:
        """Check that there is such a reward.

        Raises:
            ValueError: If there is none; the message names the nearest.
        """
        if name not in self.names:
            near = difflib.get_close_matches(str(name), self.names, n=1, cutoff=0)[0]
            raise ValueError(f"{where}: there is no reward '{name}'; did you mean '{near}'?")

    def _gated(self, components: Mapping[str, Sequence[Score]]) -> dict[str, list[Score]]:
        """Every reward after its gates."""
        gated: dict[str, list[Score]] = {}
        for name in self._order:
            raw = components[name]
            gated[name] = [
                score if gate == 1 else gate
                for score, gate in ((score, self._gate(name, gated, i)) for i, score in enumerate(raw))
            ]
        return gated

    def _gate(self, name: str, gated: Mapping[str, Sequence[Score]], i: int) -> Score:
        """1 where all gates of a reward are open, 0 where one is closed, ``None`` where that is not known."""
        scores = [gated[gate][i] for gate in self.gates.get(name, ())]
        if any(score is not None and score < OPEN for score in scores):
            return 0.0
        return None if None in scores else 1.0

    def _clipped(self, name: str, scores: Sequence[Score]) -> list[Score]:
        if name not in self.ranges:
            return list(scores)
        low, high = self.ranges[name]
        return [None if score is None else min(max(score, low), high) for score in scores]

    def _sorted_by_gates(self) -> list[str]:
        """All names, gates before what they gate."""
        done: list[str] = []

        def visit(name: str, path: list[str]) -> None:
            if name in path:
                circle = " <- ".join([*path[path.index(name) :], name])
                raise ValueError(f"reward_gates: a reward cannot be a gate of its own gate: {circle}.")
            if name not in done:
                for gate in self.gates.get(name, ()):
                    self.check_name(gate, "reward_gates")
                    visit(gate, [*path, name])
                done.append(name)

        for name in self.names:
            visit(name, [])
        return done


def standardized(scores: Sequence[Score]) -> list[Score]:
    """Scores less their mean, over their standard deviation (``ddof`` 1) plus 1e-4; exactly 0 where all are equal.

    Args:
        scores: ``None`` where there is none; it stays so and leaves the others alone.
    """
    known = [score for score in scores if score is not None]
    if not known or max(known) == min(known):  # the mean, rounded, may differ from what all of them are
        return [None if score is None else 0.0 for score in scores]
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((score - mean) ** 2 for score in known) / (len(known) - 1))
    return [None if score is None else (score - mean) / (std + _EPS) for score in scores]


def _checked_weight(name: str, weight: float) -> float:
    if not _is_number(weight) or not math.isfinite(weight):
        raise ValueError(f"reward_weights must be finite numbers, got {weight!r} for '{name}'.")
    return float(weight)


def _checked_gates(name: str, gates: str | Sequence[str]) -> list[str]:
    found = [gates] if isinstance(gates, str) else gates
    if not isinstance(found, Sequence) or not found or not all(isinstance(gate, str) for gate in found):
        raise ValueError(f"reward_gates: '{name}' needs the name of a reward, or a list of names, got {gates!r}.")
    return list(found)


def _checked_range(name: str, bounds: Sequence[float]) -> tuple[float, float]:
    is_pair = isinstance(bounds, Sequence) and len(bounds) == 2 and all(map(_is_number, bounds))
    if not is_pair or not bounds[0] < bounds[1]:
        raise ValueError(
            f"reward_ranges: '{name}' needs the lowest and the highest value, [-1, 1], say, got "
            f"{list(bounds) if isinstance(bounds, tuple) else bounds!r}."
        )
    return float(bounds[0]), float(bounds[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
