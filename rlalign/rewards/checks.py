"""What is checked of rewards before the first response is scored."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

LOGGED = ("std", "unscored_share", "gated_share", "clipped_share")
"""What is logged of every reward beside its mean, as ``rollout/reward/NAME_std`` and so on."""


def check_rewards(rewards: Mapping[str, Callable[..., Any]]) -> None:
    """Check that rewards can be called, and that what is logged of them can be told apart.

    Args:
        rewards: Name -> reward.

    Raises:
        ValueError: If there is none, a name cannot be part of a metric's name, what is logged of two would have the
            same name, or a reward is no callable or says of itself what makes no sense.
    """
    if not isinstance(rewards, Mapping) or not rewards:
        raise ValueError(f"rewards must be at least one reward by name, {{correct: ...}}, say, got {rewards!r}.")
    for name, reward in rewards.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
            raise ValueError(
                f"rewards: {name!r} cannot be part of a metric's name; use letters, digits, '_', '-', '.' and '+'."
            )
        _check_reward(name, reward)
    for name in rewards:
        for what in LOGGED:
            if f"{name}_{what}" in rewards:
                raise ValueError(
                    f"rewards: '{name}_{what}' is the name under which the reward '{name}' is logged; take another."
                )
    counted: dict[str, str] = {}
    for name, reward in rewards.items():
        for what in getattr(reward, "counts", ()):
            check_count(name, what, rewards, counted)


def _check_reward(name: str, reward: Any) -> None:
    if inspect.isclass(reward):
        raise ValueError(f"Reward '{name}' is the class {reward.__name__}; make one: {reward.__name__}(...).")
    if not callable(reward):
        raise ValueError(f"Reward '{name}' must be callable as reward(example, response), got {reward!r}.")
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        raise ValueError(f"Reward '{name}' is asynchronous; only what TRLReward and VerlReward wrap may be.")
    if not isinstance(getattr(reward, "counts", {}), Mapping):
        raise ValueError(f"Reward '{name}': its attribute counts must be a Counter, got {reward.counts!r}.")
    columns = getattr(reward, "columns", ())
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise ValueError(f"Reward '{name}': its attribute columns must be a tuple, ('answer',), say, got {columns!r}.")


def check_count(name: str, what: str, names: Iterable[str], counted: dict[str, str]) -> str:
    """Under what name a count is logged, after ``rollout/reward/``.

    Args:
        name: Of the reward that counts.
        what: It counts.
        names: Of all rewards.
        counted: Name under which a count was logged -> the reward that counted it; this one is added.

    Raises:
        ValueError: If something else is logged under that name.
    """
    key = f"{name}_{what}"
    if counted.setdefault(key, name) == name and not any(
        key == other or key in (f"{other}_{logged}" for logged in LOGGED) for other in names
    ):
        return key
    raise ValueError(
        f"Reward '{name}' counts '{what}', and something else is logged as rollout/reward/{key}: rename it."
    )
