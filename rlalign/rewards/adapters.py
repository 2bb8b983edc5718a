"""Reward functions that were written for TRL or verl, used as they are."""

import asyncio
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlalign.rewards.base import BatchedReward

log = logging.getLogger(__name__)

_TRL_GIVES = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
_TRL_HIDES = ("prompt", "completion", *_TRL_GIVES, "trainer_state", "environments")
_VERL_GIVES = ("data_source", "solution_str", "ground_truth", "extra_info")


class TRLReward(BatchedReward):
    """A reward function written for TRL's trainers: ``f(prompts, completions, **columns) -> list[float | None]``.

    It gets lists, an entry a response: ``prompts``, ``completions`` (for a prompt of messages, a list with the one
    message of the assistant, else text; what the prompt put into the assistant's mouth is part of it),
    ``completion_ids``, and every other column of the data. ``log_extra`` and ``log_metric`` are there and write to the
    log of this module, at level DEBUG. A function without ``**kwargs`` gets what it names. It may be ``async``.

    Args:
        function: The function, or where it is: ``package.module:function`` or ``path/to/file.py:function``.
        kwargs: Further arguments by name, over the columns.

    Raises:
        ImportError: If there is no such module or file, or it cannot be imported.
        ValueError: If it has no such function, or one that needs TRL's trainer (``trainer_state``, ``environments``).
    """

    def __init__(self, function: str | Callable[..., Any], kwargs: dict[str, Any] | None = None) -> None:
        self.function, self.kwargs = load_function(function), dict(kwargs or {})
        self._accepted, required = _parameters(self.function)
        for name in ("trainer_state", "environments"):
            if name in required and name not in self.kwargs:
                raise ValueError(
                    f"{_name(self.function)} needs '{name}', which only TRL's trainer has: give it a default, or a "
                    "value in kwargs."
                )
        self.columns = ("prompt", *(name for name in required if name not in (*_TRL_HIDES, *self.kwargs)))

    def __call__(self, examples: Sequence[Mapping[str, Any]], responses: Sequence[str]) -> list[float | None]:
        """Score responses, ``responses[i]`` being one to ``examples[i]``.

        Raises:
            ValueError: If the function wants ``completion_ids`` and a response does not know its tokens.
        """
        turns = [_turn(example["prompt"], response) for example, response in zip(examples, responses, strict=True)]
        names = dict.fromkeys(name for example in examples for name in example if name not in _TRL_HIDES)
        arguments = {name: [example.get(name) for example in examples] for name in names}
        arguments |= {"prompts": [prompt for prompt, _ in turns], "completions": [reply for _, reply in turns]}
        ids: list[Any] = [getattr(response, "token_ids", None) for response in responses]
        if all(found is not None for found in ids):
            arguments["completion_ids"] = [list(found) for found in ids]
        elif self._accepted is not None and "completion_ids" in self._accepted:
            raise ValueError(
                f"{_name(self.function)} wants completion_ids, and these responses do not know their tokens."
            )
        arguments |= {"log_extra": _log, "log_metric": _log} | self.kwargs
        (scores,) = _awaited([_call(self.function, self._accepted, arguments)])
        if isinstance(scores, Exception):
            raise scores
        return list(scores)


class VerlReward(BatchedReward):
    """A reward function written for verl: ``f(data_source, solution_str, ground_truth, extra_info)``.

    It returns a number or a dictionary with a ``score``, or raises: that sample is lost. One for batches
    (``solution_strs`` and so on, lists) is known by its arguments and returns a list of either. The right answer is
    ``reward_model["ground_truth"]`` of the example, else its column ``key``; ``solution_str`` starts with what the
    prompt put into the assistant's mouth; ``extra_info`` has ``num_turns`` and ``rollout_reward_scores``, as verl adds
    them. It may be ``async``.

    Args:
        function: The function, or where it is: ``package.module:function`` or ``path/to/file.py:function``.
        kwargs: Further arguments by name (verl's ``reward_kwargs``).
        key: Column of the right answer where there is no ``reward_model``.
        data_source: What is given where the data have no column ``data_source``.

    Raises:
        ImportError: If there is no such module or file, or it cannot be imported.
        ValueError: If it has no such function, or one with other arguments.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        kwargs: dict[str, Any] | None = None,
        key: str = "answer",
        data_source: str = "",
    ) -> None:
        self.function, self.kwargs, self.key, self.data_source = (
            load_function(function),
            dict(kwargs or {}),
            key,
            data_source,
        )
        self._accepted, required = _parameters(self.function)
        self._plural = "solution_strs" in (self._accepted or required)
        given = {f"{name}s" if self._plural else name for name in _VERL_GIVES} | set(self.kwargs)
        missing = [name for name in required if name not in given]
        if missing:
            raise ValueError(
                f"{_name(self.function)} needs '{missing[0]}', which is none of verl's arguments "
                f"({', '.join(_VERL_GIVES)}): give it in kwargs."
            )

    def __call__(
        self, examples: Sequence[Mapping[str, Any]], responses: Sequence[str]
    ) -> list[float | Exception | None]:
        """Score responses, ``responses[i]`` being one to ``examples[i]``; an exception stands for what it lost.

        Raises:
            ValueError: If an example has no column of the right answer.
        """
        rows = [self._arguments(example, response) for example, response in zip(examples, responses, strict=True)]
        if self._plural:
            lists = {f"{name}s": [row[name] for row in rows] for name in _VERL_GIVES}
            (values,) = _awaited([_call(self.function, self._accepted, lists | self.kwargs)])
            if isinstance(values, Exception):
                raise values
        else:
            values = _awaited([_attempt(_call, self.function, self._accepted, row | self.kwargs) for row in rows])
        return [_attempt(_score, value, self.function) for value in values]

    def check_columns(self, column_names: Sequence[str]) -> None:
        """Check that the data have a right answer.

        Raises:
            ValueError: If they have none.
        """
        if "reward_model" not in column_names and self.key not in column_names:
            raise ValueError(
                f"There is neither reward_model.ground_truth nor a column '{self.key}'; there are "
                f"{', '.join(column_names)}."
            )

    def _arguments(self, example: Mapping[str, Any], response: str) -> dict[str, Any]:
        return {
            "data_source": example.get("data_source", self.data_source),
            "solution_str": getattr(response, "prefill", "") + str(response),
            "ground_truth": self._ground_truth(example),
            "extra_info": {"num_turns": None, "rollout_reward_scores": {}, **(example.get("extra_info") or {})},
        }

    def _ground_truth(self, example: Mapping[str, Any]) -> Any:
        nested = example.get("reward_model")
        if isinstance(nested, Mapping) and "ground_truth" in nested:
            return nested["ground_truth"]
        if self.key not in example:
            raise ValueError(
                f"The example has neither reward_model.ground_truth nor a column '{self.key}'; it has "
                f"{', '.join(example)}."
            )
        return example[self.key]


def load_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function that a string names; a function is returned as it is.

    Args:
        function: ``package.module:function``, or ``path/to/file.py:function``, relative to the working folder.

    Raises:
        ImportError: If there is no such module or file, or it cannot be imported.
        ValueError: If the string has another form, or the module no such function.
    """
    if not isinstance(function, str):
        if not callable(function):
            raise ValueError(f"function must be callable, or say where it is, got {function!r}.")
        return function
    place, _, name = function.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(f"'{function}' must be written 'module:function' or 'path/to/file.py:function'.")
    module = _load_file(Path(place).expanduser()) if place.endswith(".py") else _load_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, there, n=1, cutoff=0)
        hint = f"did you mean '{near[0]}'?" if near else "it has none at all."
        raise ValueError(f"'{place}' has no function '{name}'; {hint}")
    loaded: Callable[..., Any] = found
    return loaded


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ImportError(f"There is no module '{name}' to be imported from here.") from error
        raise


def _load_file(path: Path) -> Any:
    """A file as a module, imported once."""
    if not path.is_file():
        raise ImportError(f"There is no file '{path}'.")
    name = f"reward_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _parameters(function: Callable[..., Any]) -> tuple[set[str] | None, list[str]]:
    """The arguments that a function takes by name, ``None`` if it takes any, and those that it must be given."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if takes_any else {p.name for p in named}, required


def _call(function: Callable[..., Any], accepted: set[str] | None, arguments: Mapping[str, Any]) -> Any:
    """What a function returns, given those of the arguments that it takes."""
    return function(**{name: value for name, value in arguments.items() if accepted is None or name in accepted})


def _attempt(compute: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or what it raises: it is anybody's code, and one failure costs one sample."""
    try:
        return compute(*arguments)
    except Exception as error:
        return error


def _awaited(results: list[Any]) -> list[Any]:
    """The results of functions, those of asynchronous ones awaited together; an exception stands for its result."""
    if not any(map(inspect.isawaitable, results)):
        return results

    async def wait() -> list[Any]:
        waiting = {i: result for i, result in enumerate(results) if inspect.isawaitable(result)}
        values = await asyncio.gather(*waiting.values(), return_exceptions=True)
        done = dict(zip(waiting, values, strict=True))
        return [done.get(i, result) for i, result in enumerate(results)]

    with ThreadPoolExecutor(1) as pool:  # this thread may run a loop of its own (a notebook does)
        return pool.submit(asyncio.run, wait()).result()


def _turn(prompt: Any, response: str) -> tuple[Any, Any]:
    """A prompt and the reply to it, as TRL has them."""
    if isinstance(prompt, str):
        return prompt, getattr(response, "prefill", "") + str(response)
    messages = [dict(message) for message in prompt]
    prefill = getattr(response, "prefill", "")
    if messages and messages[-1].get("role") == "assistant":
        begun = messages.pop().get("content") or ""
        prefill = prefill or begun
    return messages, [{"role": "assistant", "content": prefill + str(response)}]


def _score(value: Any, function: Callable[..., Any]) -> float | Exception | None:
    if isinstance(value, Exception):
        return value
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(f"{_name(function)} returned a dictionary without a 'score': {value!r:.100}.")
        value = value["score"]
    return None if value is None else float(value)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _log(name: str, value: Any) -> None:
    log.debug("%s: %s", name, value)
