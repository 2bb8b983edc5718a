"""reasoning-gym's tasks and their own scorers."""

import base64
import difflib
import importlib.util
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlalign.rewards.base import BatchedReward
from rlalign.rewards.extract import final_answer
from rlalign.rewards.pool import Lost, WorkerPool

_NEEDS_EXTRA = "reasoning-gym's tasks need the extra 'tasks': pip install 'rlalign[tasks]'."


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
        raise ImportError(_NEEDS_EXTRA) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(DATASETS))}."
        raise ValueError(f"reasoning-gym has no task '{name}'; {hint}")
    try:
        return reasoning_gym.create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning-gym's task '{name}' refuses {dict(config)}: {error}.") from error


class ReasoningGymScorer(BatchedReward):
    """The score of a reasoning-gym task's own ``score_answer`` for the answer of a response.

    The answer is the whole response without its thinking, or its last ``<answer>`` block. The task is the one that the
    example names in its ``metadata``. Scorers run in worker processes, since some evaluate the answer as Python, and
    some never come to an end: what is evaluated is checked first, and an answer over the time limit gets 0, as does one
    that a scorer raises on, unless that cannot judge the right answer either: ``None`` (``unjudgeable``). Answers that
    a scorer is known to mistake for right ones get 0.

    Args:
        partial_credit: Whether a score between 0 and 1 counts; else only a full one does. Many tasks give some to any
            text that contains the right answer, which invites listing candidates.
        time_limit: Seconds an answer.
        workers: Processes; by default the cores, shared by the ranks of a node.

    Attributes:
        counts: ``timeouts``, ``scorer_failures`` and ``unjudgeable`` so far.

    Raises:
        ImportError: If reasoning-gym is not installed.
    """

    columns = ("answer", "metadata")

    def __init__(self, partial_credit: bool = False, time_limit: float = 5.0, workers: int | None = None) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ImportError(_NEEDS_EXTRA)
        self.partial_credit = partial_credit
        self.counts: Counter[str] = Counter()
        self._pool = WorkerPool("rlalign.rewards.workers.reasoning_gym_scores:score", time_limit, workers)

    def __call__(self, examples: Sequence[Mapping[str, Any]], responses: Sequence[str]) -> list[float | None]:
        """Score responses, ``responses[i]`` being one to ``examples[i]``, in [0, 1].

        Raises:
            ValueError: If an example names no task.
        """
        for example in examples:
            if not isinstance(example.get("metadata"), Mapping) or "source_dataset" not in example["metadata"]:
                raise ValueError(
                    "The example has no metadata with source_dataset, the task of reasoning-gym it is from."
                )
        found = self._scores(examples, [self.answer(response) for response in responses])
        lost = [i for i, score in enumerate(found) if isinstance(score, Lost)]
        golds = [examples[i].get("answer") for i in lost]
        judged = self._scores([examples[i] for i in lost], golds)
        for i, gold, of_gold in zip(lost, golds, judged, strict=True):
            self.counts["timeouts" if found[i].reason == "timeout" else "scorer_failures"] += 1
            cannot = isinstance(of_gold, Lost) or (gold is not None and of_gold < 1)
            self.counts["unjudgeable"] += cannot
            found[i] = None if cannot else 0.0
        return [score if score is None or self.partial_credit else float(score >= 1) for score in found]

    def _scores(self, examples: Sequence[Mapping[str, Any]], answers: Sequence[str | None]) -> list[Any]:
        items = [
            base64.b64encode(pickle.dumps((example["metadata"]["source_dataset"], answer, dict(example)))).decode()
            for example, answer in zip(examples, answers, strict=True)
        ]
        return self._pool.run(items)

    def answer(self, response: str) -> str | None:
        """What the response answers, ``None`` if nothing."""
        return final_answer(response) or None

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
