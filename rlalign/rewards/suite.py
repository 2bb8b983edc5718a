"""Several rewards as one."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlalign.rewards.base import Response, Unavailable
from rlalign.rewards.checks import check_count, check_rewards
from rlalign.rewards.composition import LARGEST, OPEN, Composition, Normalization, Score

log = logging.getLogger(__name__)


@dataclass
class Scores:
    """What a suite says of ``N`` responses.

    Attributes:
        components: Each reward by name, ``[N]``, as it was computed; ``None`` where it could not be.
        total: Gated, clipped, weighted and summed, not normalised, ``[N]``; ``None`` where a reward of non-zero weight
            could not be computed.
        correct: Whether the reward that tells right from wrong is at least 0.5, ``[N]``.
        unavailable: Where the total, or what tells right from wrong, is missing because what judges could not be
            reached, ``[N]``.
        errors: ``NAME/none``, ``NAME/not_finite``, ``NAME/exception`` and ``NAME/unavailable`` -> how many scores were
            lost to it.
    """

    components: dict[str, list[Score]]
    total: list[Score]
    correct: list[bool]
    unavailable: list[bool]
    errors: Counter[str] = field(default_factory=Counter)


@dataclass
class Tally:
    """What scoring was like over several calls.

    Attributes:
        seconds: Each reward by name -> time spent in it.
        counts: ``NAME_COUNT`` -> by how much what the reward NAME counts in its ``counts`` has grown.
        unavailable: Each reward that could not reach what judges -> why, the first time, in one line.
        errors: Each reward that ever raised -> the first exception, in one line.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class RewardSuite:
    """Several rewards, put together by a :class:`~rlalign.rewards.composition.Composition`.

    A reward is ``reward(example, response) -> float | None``; one with the attribute ``batched = True`` takes lists of
    both and returns a list. Where one gives ``None``, raises, or gives a number that is not finite (or beyond 1e18,
    which single precision cannot square), that response has no total. If a batched one raises, it is called again with
    one response at a time, so that only those are lost on which it raises alone; unless it says that what judges is
    :class:`~rlalign.rewards.base.Unavailable`.

    Attributes:
        composition: How the scores become one number.
        first_errors: Name -> the first exception that this reward raised, in one line; it was logged with its
            traceback. Later ones are counted, and a warning comes when every response of 2, 4, 8, ... calls in a row is
            lost to them.

    Args:
        rewards: Name -> reward.
        weights: Name -> weight, 1 where not given. A reward of weight 0 is computed and reported only.
        correct: Name of the reward that tells right from wrong, by its own score, gated or not; the first by default.
        gates: See :class:`~rlalign.rewards.composition.Composition`, as for ``ranges`` and ``normalization``.
        ranges: See there.
        normalization: See there.

    Raises:
        ValueError: If there is no reward, one is no reward (:func:`~rlalign.rewards.checks.check_rewards`), a name is
            unknown, or a setting of the composition is not usable.
    """

    def __init__(
        self,
        rewards: Mapping[str, Callable[..., Any]],
        weights: Mapping[str, float] | None = None,
        correct: str | None = None,
        gates: Mapping[str, str | Sequence[str]] | None = None,
        ranges: Mapping[str, Sequence[float]] | None = None,
        normalization: Mapping[str, Normalization] | None = None,
    ) -> None:
        check_rewards(rewards)
        self.rewards = dict(rewards)
        self.composition = Composition(self.rewards, weights, gates, ranges, normalization)
        self.correct = next(iter(self.rewards)) if correct is None else correct
        self.composition.check_name(self.correct, "correct")
        self.first_errors: dict[str, str] = {}
        self._tally = Tally()
        self._lost_calls: Counter[str] = Counter()
        self._counted: dict[str, str] = {}
        self._unread: set[str] = set()
        self._unreached: set[str] = set()

    def __call__(self, examples: Sequence[dict[str, Any]], responses: Sequence[Response]) -> Scores:
        """Score responses, ``responses[i]`` being one to ``examples[i]``.

        Raises:
            ValueError: If there are not as many examples as responses, a batched reward returns another number, or
                something else is logged under the name of what one counts.
        """
        if len(examples) != len(responses):
            raise ValueError(f"There are {len(examples)} examples and {len(responses)} responses; they must pair up.")
        errors: Counter[str] = Counter()
        values = {name: self._timed(name, examples, responses) for name in self.rewards}
        components = {name: self._scores(name, values[name], errors) for name in self.rewards}
        total = self.composition.totals(components)
        correct = [score is not None and score >= OPEN for score in components[self.correct]]
        unavailable = [
            isinstance(values[self.correct][i], Unavailable)
            or (total[i] is None and any(isinstance(of_reward[i], Unavailable) for of_reward in values.values()))
            for i in range(len(responses))
        ]
        return Scores(components, total, correct, unavailable, errors)

    def take_tally(self) -> Tally:
        """What scoring was like since this was last asked."""
        tally, self._tally = self._tally, Tally()
        tally.errors = dict(self.first_errors)
        return tally

    def answers(self, responses: Iterable[str]) -> list[str | None]:
        """What each response answers, read by the ``answer`` method of the reward named ``correct``; else its text.

        Where that method raises, the response has no vote; the first time is logged.
        """
        read = getattr(self.rewards[self.correct], "answer", None) or (lambda response: response.strip() or None)
        found = [_attempt(read, response) for response in responses]
        failure = next((value for value in found if isinstance(value, Exception)), None)
        if failure is not None and self.correct not in self._unread:
            self._unread.add(self.correct)
            log.warning("%s: answer() raised; the response has no vote.", self._who(self.correct), exc_info=failure)
        return [None if value is None or isinstance(value, Exception) else str(value) for value in found]

    def check_columns(self, column_names: Sequence[str]) -> None:
        """Check that the data have the columns that the rewards say they read.

        They say so by the attribute ``columns``, and by a method ``check_columns(column_names)`` that raises where one
        of several would do.

        Raises:
            ValueError: If one is missing; the message names it, the reward, and the columns that are there.
        """
        for name, reward in self.rewards.items():
            if check := getattr(reward, "check_columns", None):
                try:
                    check(column_names)
                except ValueError as error:
                    raise ValueError(f"Reward '{name}': {error}") from error
            for column in getattr(reward, "columns", ()):
                if column not in column_names:
                    raise ValueError(
                        f"Reward '{name}' reads the column '{column}', and the data have none of that name: "
                        f"{', '.join(column_names)}. Name it in columns, or give the reward another key."
                    )

    def _timed(self, name: str, examples: Sequence[dict[str, Any]], responses: Sequence[Response]) -> list[Any]:
        """What a reward gives each response; the tally has how long it took and what it counted."""
        before = dict(getattr(self.rewards[name], "counts", ()))
        started = time.perf_counter()
        values = self._values(name, examples, responses)
        tally = self._tally
        tally.seconds[name] = tally.seconds.get(name, 0.0) + time.perf_counter() - started
        for what, count in dict(getattr(self.rewards[name], "counts", ())).items():
            key = check_count(name, what, self.rewards, self._counted)
            tally.counts[key] = tally.counts.get(key, 0) + count - before.get(what, 0)
        return values

    def _scores(self, name: str, values: Sequence[Score | Exception], errors: Counter[str]) -> list[Score]:
        """The scores among what a reward gave; what is lost is counted in ``errors``."""
        scores: list[Score] = []
        for value in values:
            if isinstance(value, Unavailable):
                errors[f"{name}/unavailable"] += 1
                self._tally.unavailable.setdefault(name, _in_one_line(value))
            elif isinstance(value, Exception):
                errors[f"{name}/exception"] += 1
            elif value is None or not abs(value) <= LARGEST:
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
            if len(pairs) == 1 or isinstance(together, Unavailable):
                return [together] * len(pairs)
            return [value for example, response in pairs for value in self._values(name, [example], [response])]
        if len(together) != len(responses):
            raise ValueError(f"{self._who(name)} returned {len(together)} scores for {len(responses)} responses.")
        return [_attempt(_as_number, value) for value in together]

    def _report(self, name: str, failures: list[Exception], num_responses: int) -> None:
        """Log the first exception of a reward, and later on that it does nothing but raise."""
        if len(failures) < num_responses:
            self._lost_calls[name] = 0
        if not failures:
            return
        where = self._who(name)
        raised = next((failure for failure in failures if not isinstance(failure, Unavailable)), None)
        if raised is not None and name not in self.first_errors:
            self.first_errors[name] = f"{type(raised).__name__}: {_in_one_line(raised)}"
            log.warning("%s raised; the sample is left out, later ones are counted.", where, exc_info=raised)
        if raised is None and name not in self._unreached:
            self._unreached.add(name)
            reason = _in_one_line(failures[0]).rstrip(".")
            log.warning("%s: %s. The sample is left out, later ones are counted.", where, reason)
        if len(failures) == num_responses:
            self._lost_calls[name] += 1
            calls = self._lost_calls[name]
            if calls >= 2 and calls & (calls - 1) == 0:
                log.warning("%s raised on every response of %d calls in a row, last %r.", where, calls, failures[-1])

    def _who(self, name: str) -> str:
        return f"Reward '{name}' ({_qualified_name(self.rewards[name])})"


def _attempt(compute: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or the exception that it raises.

    A reward is anybody's code, run on text that a model made up: one failure costs one sample, not the run.
    """
    try:
        return compute(*arguments)
    except Exception as error:
        return error


def _as_number(value: Any) -> Score | Exception:
    if value is None or isinstance(value, Exception):
        return value
    if isinstance(value, str):
        raise TypeError(f"a reward must be a number or None, got the string '{value[:50]}'")
    return float(value)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _qualified_name(reward: Any) -> str:
    target = reward if hasattr(reward, "__qualname__") else type(reward)
    return f"{target.__module__}.{target.__qualname__}"
