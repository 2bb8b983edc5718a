"""Scores of reasoning-gym's own scorers, some of which evaluate the answer as Python."""

import ast
import base64
import importlib
import pickle
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import reasoning_gym

_EVALUATED = (
    "reasoning_gym.algorithmic.binary_matrix",
    "reasoning_gym.algorithmic.spiral_matrix",
    "reasoning_gym.algorithmic.string_insertion",
    "reasoning_gym.games.n_queens",
)
"""Modules whose scorers call ``eval`` on the answer, for a list written in it."""
for _name in _EVALUATED:
    vars(importlib.import_module(_name))["eval"] = ast.literal_eval

_SUM = re.compile(r"(?!.*(?:\*\s*\*|/\s*/))[\d\s+\-*/()]*", re.DOTALL)
_POLYNOMIAL = re.compile(r"(?:[\d\s+\-*/()]|\b[A-Za-z]\b)*")
_FUNCTION = re.compile(r"(?:[\d\s+\-*/().]|\b(?:[A-Za-z]|pi|exp|log|ln|sqrt|Abs|a?(?:sin|cos|tan|cot|sec|csc)h?)\b)*")
_ALLOWED = {
    "countdown": _SUM,
    "puzzle24": _SUM,
    "polynomial_multiplication": _POLYNOMIAL,
    "simple_integration": _FUNCTION,
    "intermediate_integration": _FUNCTION,
    "complex_arithmetic": re.compile(
        r"[\d\s+\-*.eEijIJ()]*"
    ),  # else "nan" is as far from the right answer as can be: 0
    "game_of_life_halting": re.compile(r"\s*(?:true|false)\s*", re.IGNORECASE),
}
"""Task -> what an answer may consist of. The scorers of the first five have sympy evaluate it as Python; that of
``complex_arithmetic`` takes "nan" for right, and that of ``game_of_life_halting`` any text at all (0.1.25)."""


def score(item: str) -> float:
    """The score of an answer, in [0, 1] as the task has it.

    Args:
        item: Task, answer and example, pickled, in base 64: JSON would change tuples and keys that are numbers.
    """
    task, answer, example = pickle.loads(base64.b64decode(item))
    if answer is not None and not (_is_allowed(task, answer) and _meets_what_scorers_forget(task, answer, example)):
        return 0.0
    return float(_task(task).score_answer(answer, example))


def _is_allowed(task: str, answer: str) -> bool:
    return task not in _ALLOWED or _ALLOWED[task].fullmatch(answer) is not None


def _meets_what_scorers_forget(task: str, answer: str, example: dict[str, Any]) -> bool:
    """Conditions without which a wrong answer would get the full score (0.1.25)."""
    if task == "puzzle24":  # any four numbers pass there
        return sorted(map(int, re.findall(r"\d+", answer))) == sorted(example["metadata"]["numbers"])
    if task == "game_of_life_halting":
        return answer.strip().lower() == str(example["answer"]).lower()
    if task == "coin_flip":  # the beginning of the right answer passes there: "0" for 0.25
        try:
            return abs(Fraction(answer.replace(",", "")) - Fraction(example["answer"])) <= Fraction(1, 10_000)
        except (ValueError, ZeroDivisionError):
            return False
    return True


@lru_cache(maxsize=256)
def _task(name: str) -> Any:
    return reasoning_gym.create_dataset(name, size=1, seed=0)
