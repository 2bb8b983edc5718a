"""What a reward is: any callable of an example and a response."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Response(str):
    """The text of a response, which also knows how it was made.

    A reward that needs only the text takes it as the string it is.

    Attributes:
        num_tokens: Tokens of the response, the end token included.
        truncated: Whether the length limit cut it.
        prefill: What the prompt already put into the mouth of the assistant (a ``<think>``, say).
        token_ids: Its tokens, the end token included; ``None`` where they are not known.
    """

    num_tokens: int
    truncated: bool
    prefill: str
    token_ids: tuple[int, ...] | None

    def __new__(
        cls,
        text: str,
        num_tokens: int = 0,
        truncated: bool = False,
        prefill: str = "",
        token_ids: Sequence[int] | None = None,
    ) -> "Response":
        """Make the string and hang its attributes on it."""
        self = super().__new__(cls, text)
        self.num_tokens, self.truncated, self.prefill = num_tokens, truncated, prefill
        self.token_ids = None if token_ids is None else tuple(token_ids)
        return self

    def __getnewargs__(self) -> tuple:
        return str(self), self.num_tokens, self.truncated, self.prefill, self.token_ids


class Unavailable(Exception):
    """What judges could not be reached (no sandbox starts, the server is down): no fault of the response.

    A reward raises it, or a batched one returns it in the place of a score. The sample is left out and counted.
    """


class Reward(Protocol):
    """``reward(example, response)``: a number, or ``None`` where none can be given (the sample leaves its group).

    It may have these attributes:

    - ``batched = True``: it takes lists of examples and of responses, and returns a list, in which an exception stands
      for a score that was lost to it.
    - ``columns``, a tuple: the columns that it reads, checked when the data are loaded.
    - ``counts``, a ``Counter``: running totals of what is worth knowing (time-outs, say); the increase of an iteration
      is logged as ``rollout/reward/NAME_COUNT``.
    - ``check_columns(column_names)``, a method that raises ``ValueError`` where any of several columns would do and
      none is there.
    - ``answer(response)``, a method: what a response answers, ``None`` if nothing; for the votes of a majority.
    """

    def __call__(self, example: dict[str, Any], response: str) -> float | None:
        """Score one response to one example (a row of the data, every column of it)."""


class NamedReward(ABC):
    """Base of the rewards that a configuration may name without their path; any other callable is as good a reward."""

    @abstractmethod
    def __call__(self, example: Any, response: Any) -> Any:
        """Score one response, or lists of them (:class:`BatchedReward`)."""


class BatchedReward(NamedReward):
    """A :class:`NamedReward` that takes lists, to score them together: in parallel, or in one pass of a model."""

    batched = True

    @abstractmethod
    def __call__(
        self, examples: Sequence[Mapping[str, Any]], responses: Sequence[str]
    ) -> Sequence[float | Exception | None]:
        """Score responses, ``responses[i]`` being one to ``examples[i]``; an exception stands for what it lost."""
