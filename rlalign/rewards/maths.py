r"""A reward for answers in maths."""

import importlib.util
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from rlalign.rewards.base import BatchedReward, Unavailable
from rlalign.rewards.extract import SOURCES, boxed, gold_text, stated_answer
from rlalign.rewards.maths_quantity import Quantity, quantity, same_quantity
from rlalign.rewards.maths_text import choice, normalise, words
from rlalign.rewards.pool import Lost, WorkerPool

_JUDGE = "rlalign.rewards.workers.maths_equal:judge"
_WARM_UP = [  # the parser learns its grammar while it reads, which costs the first formulas ten times the time
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    (r"\sqrt[3]{x}+2\pi", r"-\sqrt{3}e^{-x}"),
    ("y=2x+1", "2x-y+1=0"),
    (r"\{1, x_1\}", r"(1, \infty)"),
    (r"1 < x \le 2", "(1,2]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\log_2(8)\cdot\sin(x)"),
    (r"\int_0^1 x dx", r"|x|!"),
]
Pair = tuple[str, str | None]  # the right answer and the one given, if any
Verdict = str | Unavailable  # equal, different, unparseable, unparseable_gold, timeout, error


class MathReward(BatchedReward):
    r"""1 if the answer of a response equals the right one as mathematics, else 0.

    What a response answers is looked for as :func:`rlalign.rewards.extract.stated_answer` says; the right answer is
    what follows the last ``####``, or the last ``\boxed{}``, or all of the column. Plain numbers (thousands,
    currencies, units, percent, fractions), words and letters of choices are compared here, exactly, see
    :func:`rlalign.rewards.maths_quantity.same_quantity`. Expressions, equations, lists, sets, tuples, intervals,
    inequalities and matrices are read by math-verify's parser in worker processes and compared as
    :func:`rlalign.rewards.workers.maths_equal.same` says. Naming several candidates does not help: a list equals only
    a list.

    An answer over the time limit scores 0 and is counted. So is one that math-verify cannot parse, one whose parsing
    takes all of a worker's memory, and one that is too long. A right answer that cannot be parsed, or not within
    the time limit, gives ``None``. An answer of which a worker dies twice is :class:`rlalign.rewards.base.Unavailable`.

    Attributes:
        counts: Responses so far with ``timeouts``, ``unparseable`` answers, answers ``too_long``, right answers
            ``unparseable_gold``, and ``worker_deaths``.

    Args:
        key: Column of the right answer.
        time_limit: Seconds that a worker may take for an answer.
        workers: Worker processes; by default the cores of this process divided by the ranks of the node.
        extract: Where answers are looked for, in this order.
        max_characters: Longer answers are none.
        cache_size: Pairs of right answer and answer whose verdict is remembered, time-outs included.
        memory_mib: Address space of a worker in MiB.

    Raises:
        ImportError: If math-verify is not installed.
        ValueError: If a number is not positive or ``extract`` has an unknown name.
    """

    def __init__(
        self,
        key: str = "answer",
        time_limit: float = 5.0,
        workers: int | None = None,
        extract: Sequence[str] = ("tag", "boxed", "hashes", "phrase", "line"),
        max_characters: int = 1000,
        cache_size: int = 100_000,
        memory_mib: int = 2048,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathReward needs the extra 'math': pip install 'rlalign[math]'.")
        if unknown := [name for name in extract if name not in SOURCES]:
            raise ValueError(f"extract: there is no answer source '{unknown[0]}'; there are {', '.join(SOURCES)}.")
        for name, value in (("max_characters", max_characters), ("cache_size", cache_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.key, self.extract, self.max_characters, self.cache_size = key, extract, max_characters, cache_size
        self.columns = (key,)
        self.counts: Counter[str] = Counter()
        self.pool = WorkerPool(
            "rlalign.rewards.workers.maths_equal:judge", time_limit, workers, memory_mib, warm_up=_WARM_UP
        )
        self._cache: OrderedDict[Pair, Verdict] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(
        self, examples: Sequence[Mapping[str, Any]], responses: Sequence[str]
    ) -> list[float | Exception | None]:
        """Score responses, ``responses[i]`` being one to ``examples[i]``."""
        pairs = [self._pair(example, response) for example, response in zip(examples, responses, strict=True)]
        verdicts = self._verdicts([pair for pair in pairs if pair])
        return [self._score(verdicts[pair]) if pair else None for pair in pairs]

    def answer(self, response: str) -> str | None:
        """What the response answers; equal plain numbers, choices and words give equal strings."""
        text = self._read(response)
        if text is None:
            return None
        number = quantity(text)
        if number is not None:
            return str(number.value / 100 if number.percent else number.value)
        return choice(text, alone=True) or words(text) or text

    def close(self) -> None:
        """End the worker processes; the next call starts new ones."""
        self.pool.close()

    def _read(self, response: str) -> str | None:
        text = stated_answer(response, self.extract)
        if text is not None and len(text) > self.max_characters:
            return None
        return None if text is None else normalise(text) or None

    def _pair(self, example: Mapping[str, Any], response: str) -> Pair | None:
        """The right answer and the one given, normalised; ``None`` without a right one."""
        gold = gold_text(example, self.key)
        gold = normalise(boxed(gold) or gold) if gold else None
        if not gold:
            self._count("unparseable_gold")
            return None
        text = stated_answer(response, self.extract)
        if text is not None and len(text) > self.max_characters:
            self._count("too_long")
            text = None
        return gold, None if text is None else normalise(text) or None

    def _verdicts(self, pairs: Sequence[Pair]) -> dict[Pair, Verdict]:
        """Verdict of each different pair."""
        verdicts: dict[Pair, Verdict] = {}
        unknown: list[Pair] = []
        for pair in dict.fromkeys(pairs):
            known = self._remembered((pair[0], None))  # that the right answer cannot be read in time
            verdict = known if known == "unparseable_gold" else self._remembered(pair) or quick_verdict(*pair)
            if verdict is None:
                unknown.append(pair)
            else:
                verdicts[pair] = verdict
        if unknown:
            verdicts |= self._judged(unknown)
        return verdicts

    def _judged(self, pairs: list[Pair]) -> dict[Pair, Verdict]:
        """Verdicts of worker processes; where one took too long or failed, the right answer is looked at alone."""
        verdicts = dict(zip(pairs, self._run(pairs), strict=True))
        late = {gold for (gold, answer), verdict in verdicts.items() if verdict in ("timeout", "error")}
        alone: list[Pair] = [(gold, None) for gold in late]
        bad: dict[str, Verdict] = {}
        for (gold, _), verdict in zip(alone, self._run(alone), strict=True):
            if verdict != "different":
                bad[gold] = verdict if isinstance(verdict, Unavailable) else "unparseable_gold"
                self._remember((gold, None), bad[gold])
        for pair in verdicts:
            if pair[0] in bad and verdicts[pair] in ("timeout", "error"):
                verdicts[pair] = bad[pair[0]]
            self._remember(pair, verdicts[pair])
        return verdicts

    def _run(self, pairs: list[Pair]) -> list[Verdict]:
        if not pairs:
            return []
        try:
            return [_verdict(result) for result in self.pool.run(pairs)]
        except (RuntimeError, OSError) as error:
            return [Unavailable(f"No worker process for maths: {error}")] * len(pairs)

    def _score(self, verdict: Verdict) -> float | Exception | None:
        if isinstance(verdict, Unavailable):
            self._count("worker_deaths")
            return verdict
        match verdict:
            case "timeout":
                self._count("timeouts")
            case "unparseable" | "error":
                self._count("unparseable")
            case "unparseable_gold":
                self._count("unparseable_gold")
                return None
        return float(verdict == "equal")

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _remembered(self, pair: Pair) -> Verdict | None:
        with self._lock:
            if pair in self._cache:
                self._cache.move_to_end(pair)
            return self._cache.get(pair)

    def _remember(self, pair: Pair, verdict: Verdict) -> None:
        if isinstance(verdict, Unavailable):  # it may be the machine's fault
            return
        with self._lock:
            self._cache[pair] = verdict
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)


def _verdict(result: str | Lost) -> Verdict:
    """What a worker said; an exception in it is the answer's, since sympy raises on much."""
    if not isinstance(result, Lost):
        return result
    if result.reason == "death":
        return Unavailable("A worker process died of this answer, twice.")
    return result.reason


def quick_verdict(gold: str, answer: str | None) -> Verdict | None:
    """Verdict on a pair that needs no worker process: plain quantities, choices, words; else ``None``."""
    right = quantity(gold)
    if right is not None:
        return _quick_number(right, answer)
    if letter := choice(gold, alone=True):
        return _equal(answer is not None and choice(answer) == letter)
    if text := words(gold):
        return _equal(answer is not None and words(answer) == text)
    return None


def _quick_number(right: Quantity, answer: str | None) -> Verdict | None:
    given = None if answer is None else quantity(answer)
    if given is not None:
        return _equal(same_quantity(right, given))
    return "different" if answer is None or words(answer) else None


def _equal(verdict: bool) -> Verdict:
    return "equal" if verdict else "different"
