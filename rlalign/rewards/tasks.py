"""reasoning-gym's tasks and their own scorers."""

import difflib
from collections.abc import Mapping
from typing import Any

from rlalign.rewards.base import NamedReward
from rlalign.rewards.extract import final_answer


def create_task(name: str, config: Mapping[str, Any]) -> Any:
    """A reasoning-gym data set.

    Args:
        name: Of the task, ``chain_sum``, say.
        config: Its parameters, ``size`` and ``seed`` among them.

    Raises:
        ImportError: If reasoning-gym is not installed.
        ValueError: If there is no such task or parameter, or the task refuses a value.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("reasoning-gym's tasks need the extra 'tasks': pip install 'rlalign[tasks]'.") from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(DATASETS))}."
        raise ValueError(f"reasoning-gym has no task '{name}'; {hint}")
    try:
        return reasoning_gym.create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning-gym's task '{name}' refuses {dict(config)}: {error}.") from error


class ReasoningGymScorer(NamedReward):
    """The score of a reasoning-gym task's own ``score_answer`` for the answer of a response.

    The answer is the whole response without its thinking, or its last ``<answer>`` block. The task is the one that the
    example names in its ``metadata``.

    Args:
        partial_credit: Whether a score between 0 and 1 counts; else only a full one does. Many tasks give some to any
            text that contains the right answer, which invites listing candidates.
    """

    columns = ("answer", "metadata")

    def __init__(self, partial_credit: bool = False) -> None:
        self.partial_credit = partial_credit
        self._tasks: dict[str, Any] = {}

    def __call__(self, example: dict[str, Any], response: str) -> float:
        """Score one response, in [0, 1]."""
        name = example["metadata"]["source_dataset"]
        if name not in self._tasks:
            self._tasks[name] = create_task(name, {"size": 1, "seed": 0})
        score = float(self._tasks[name].score_answer(self.answer(response), example))
        return score if self.partial_credit else float(score >= 1)

    def answer(self, response: str) -> str | None:
        """What the response answers, ``None`` if nothing."""
        return final_answer(response) or None
