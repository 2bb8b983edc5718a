"""Several rewards as one."""

import difflib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlalign.rewards.base import Response

log = logging.getLogger(__name__)

Score = float | None


@dataclass
class Scores:
    """What a suite says of ``N`` responses.

    Attributes:
        components: Each reward by name, ``[N]``, before weighting; ``None`` where it could not be computed.
        total: Weighted sum, ``[N]``; ``None`` where a reward of non-zero weight could not be computed.
        correct: Whether the reward that tells right from wrong is at least 0.5, ``[N]``.
        errors: ``NAME/none``, ``NAME/not_finite`` and ``NAME/exception`` -> how many scores were lost to it.
    """

    components: dict[str, list[Score]]
    total: list[Score]
    correct: list[bool]
    errors: Counter[str] = field(default_factory=Counter)


class RewardSuite:
    """Several rewards, weighted and summed.

    A reward is ``reward(example, response) -> float | None``; one with the attribute ``batched = True`` takes lists of
    both and returns a list. Where one gives ``None``, a number that is not finite, or raises, that response has no
    total. If a batched one raises, it is called again with one response at a time, so that only those are lost on which
    it raises alone.

    Attributes:
        first_errors: Name -> the first exception that this reward raised, in one line; it was logged with its
            traceback. Later ones are counted, and a warning comes when every response of 2, 4, 8, ... calls in a row is
            lost to them.

    Args:
        rewards: Name -> reward.
        weights: Name -> weight, 1 where not given. A reward of weight 0 is computed and reported only.
        correct: Name of the reward that tells right from wrong; the first by default.

    Raises:
        ValueError: If there is no reward, or a name in ``weights`` or ``correct`` is unknown.
    """

    def __init__(
        self,
        rewards: Mapping[str, Callable[..., Any]],
        weights: Mapping[str, float] | None = None,
        correct: str | None = None,
    ) -> None:
        if not rewards:
            raise ValueError("A suite needs at least one reward.")
        self.rewards = dict(rewards)
        for name in weights or {}:
            self._check_name(name, "weights")
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in self.rewards}
        if not all(map(math.isfinite, self.weights.values())):
            raise ValueError(f"Reward weights must be finite, got {self.weights}.")
        self.correct = next(iter(self.rewards)) if correct is None else correct
        self._check_name(self.correct, "correct")
        self.first_errors: dict[str, str] = {}
        self._lost_calls: Counter[str] = Counter()

    def __call__(self, examples: Sequence[dict[str, Any]], responses: Sequence[Response]) -> Scores:
        """Score responses, ``responses[i]`` being one to ``examples[i]``.

        Raises:
            ValueError: If there are not as many examples as responses, or a batched reward returns another number.
        """
        if len(examples) != len(responses):
            raise ValueError(f"There are {len(examples)} examples and {len(responses)} responses; they must pair up.")
        errors: Counter[str] = Counter()
        components = {name: self._score(name, examples, responses, errors) for name in self.rewards}
        weighted = {name: weight for name, weight in self.weights.items() if weight}
        total: list[Score] = []
        for i in range(len(responses)):
            scores = {name: components[name][i] for name in weighted}
            lost = any(score is None for score in scores.values())
            total.append(None if lost else sum(weighted[name] * score for name, score in scores.items() if score))
        correct = [score is not None and score >= 0.5 for score in components[self.correct]]
        return Scores(components, total, correct, errors)

    def answers(self, responses: Iterable[str]) -> list[str | None]:
        """What each response answers, read by the ``answer`` method of the reward named ``correct``; else its text."""
        read = getattr(self.rewards[self.correct], "answer", None) or (lambda response: response.strip() or None)
        return [read(response) for response in responses]

    def check_columns(self, column_names: Sequence[str]) -> None:
        """Check that the data have the columns that the rewards say they read (attribute ``columns``).

        Raises:
            ValueError: If one is missing; the message names it, the reward, and the columns that are there.
        """
        for name, reward in self.rewards.items():
            for column in getattr(reward, "columns", ()):
                if column not in column_names:
                    raise ValueError(
                        f"Reward '{name}' reads the column '{column}', and the data have none of that name: "
                        f"{', '.join(column_names)}. Name it in columns, or give the reward another key."
                    )

    def _score(
        self, name: str, examples: Sequence[dict[str, Any]], responses: Sequence[Response], errors: Counter[str]
    ) -> list[Score]:
        """One reward of every response; what is lost is counted in ``errors``."""
        values = self._values(name, examples, responses)
        scores: list[Score] = []
        for value in values:
            if isinstance(value, Exception):
                errors[f"{name}/exception"] += 1
            elif value is None or not math.isfinite(value):
                errors[f"{name}/none" if value is None else f"{name}/not_finite"] += 1
            else:
                scores.append(value)
                continue
            scores.append(None)
        self._report(name, [value for value in values if isinstance(value, Exception)], len(values))
        return scores

    def _values(
        self, name: str, examples: Sequence[dict[str, Any]], responses: Sequence[Response]
    ) -> list[Score | Exception]:
        """What a reward gives each response, or raises on it."""
        reward = self.rewards[name]
        pairs = list(zip(examples, responses, strict=True))
        if not getattr(reward, "batched", False):
            return [_attempt(lambda e, r: _as_number(reward(e, r)), *pair) for pair in pairs]
        together = _attempt(lambda: list(reward(list(examples), list(responses))))
        if isinstance(together, Exception):
            if len(pairs) == 1:
                return [together]
            return [value for example, response in pairs for value in self._values(name, [example], [response])]
        if len(together) != len(responses):
            raise ValueError(
                f"Reward '{name}' ({_qualified_name(reward)}) returned {len(together)} scores for "
                f"{len(responses)} responses."
            )
        return [_attempt(_as_number, value) for value in together]

    def _report(self, name: str, failures: list[Exception], num_responses: int) -> None:
        """Log the first exception of a reward, and later on that it does nothing but raise."""
        if len(failures) < num_responses:
            self._lost_calls[name] = 0
        if not failures:
            return
        where = f"Reward '{name}' ({_qualified_name(self.rewards[name])})"
        if name not in self.first_errors:
            self.first_errors[name] = " ".join(f"{type(failures[0]).__name__}: {failures[0]}".split())
            log.warning("%s raised; the sample is left out, later ones are counted.", where, exc_info=failures[0])
        if len(failures) == num_responses:
            self._lost_calls[name] += 1
            calls = self._lost_calls[name]
            if calls >= 2 and calls & (calls - 1) == 0:
                log.warning("%s raised on every response of %d calls in a row, last %r.", where, calls, failures[-1])

    def _check_name(self, name: str, where: str) -> None:
        if name not in self.rewards:
            near = difflib.get_close_matches(name, self.rewards, n=1, cutoff=0)[0]
            raise ValueError(f"{where}: there is no reward '{name}'; did you mean '{near}'?")


def _attempt(compute: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or the exception that it raises.

    A reward is anybody's code, run on text that a model made up: one failure costs one sample, not the run.
    """
    try:
        return compute(*arguments)
    except Exception as error:
        return error


def _as_number(value: Any) -> Score:
    if value is None:
        return None
    if isinstance(value, str):
        raise TypeError(f"a reward must be a number or None, got the string '{value[:50]}'")
    return float(value)


def _qualified_name(reward: Any) -> str:
    target = reward if hasattr(reward, "__qualname__") else type(reward)
    return f"{target.__module__}.{target.__qualname__}"
