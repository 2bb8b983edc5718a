"""Rewards of the length of a response, in tokens; :class:`~rlalign.rewards.SoftOverlong` is another."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlalign.rewards.base import BatchedReward, NamedReward, Response


class CosineLength(BatchedReward):
    r"""Rescales another reward by length: short right responses are worth most, short wrong ones cost most.

    .. math:: R = \begin{cases} \mathrm{cos}(n; r^c_0, r^c_L) & \text{right} \\
        \mathrm{cos}(n; r^w_0, r^w_L) & \text{wrong} \\ r_e & n \ge L_{max} \end{cases}, \qquad
        \mathrm{cos}(n; r_0, r_L) = r_L + \tfrac12 (r_0 - r_L) (1 + \cos(\pi n / L_{max}))

    A response is right if the other reward is at least 0.5; where that gives ``None`` or an exception, so does this.

    Source: Yeo et al. 2025 (arXiv 2502.03373), section 4.2, whose values are the defaults.

    Args:
        reward: Tells right from wrong.
        max_tokens: :math:`L_{max}`; the end token counts.
        right_short: :math:`r^c_0`, of a right response without tokens.
        right_long: :math:`r^c_L`, of a right one just below :math:`L_{max}`.
        wrong_short: :math:`r^w_0`.
        wrong_long: :math:`r^w_L`.
        exceeded: :math:`r_e`.

    Attributes:
        counts: Those of the other reward.
    """

    def __init__(
        self,
        reward: NamedReward | Callable[..., Any],
        max_tokens: int,
        right_short: float = 2.0,
        right_long: float = 1.0,
        wrong_short: float = -10.0,
        wrong_long: float = 0.0,
        exceeded: float = -10.0,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
        values = (right_short, right_long, wrong_short, wrong_long, exceeded)
        if not all(map(math.isfinite, values)):
            raise ValueError(f"The values of CosineLength must be finite, got {values}.")
        self.reward: Any = reward
        self.max_tokens, self.exceeded = max_tokens, exceeded
        self.right, self.wrong = (right_short, right_long), (wrong_short, wrong_long)
        self.columns = tuple(getattr(reward, "columns", ()))
        counts: Any = getattr(reward, "counts", None)
        self.counts: Counter[str] = Counter() if counts is None else counts

    def __call__(
        self, examples: Sequence[Mapping[str, Any]], responses: Sequence[str]
    ) -> list[float | Exception | None]:
        """Score responses, ``responses[i]`` being one to ``examples[i]``.

        Raises:
            TypeError: If a response is a plain string, which does not know its tokens.
        """
        lengths = [_num_tokens(response, "CosineLength") for response in responses]
        if getattr(self.reward, "batched", False):
            values = list(self.reward(list(examples), list(responses)))
        else:
            values = [self.reward(example, response) for example, response in zip(examples, responses, strict=True)]
        if len(values) != len(lengths):
            raise ValueError(f"The reward of CosineLength returned {len(values)} scores for {len(lengths)} responses.")
        return [
            value if value is None or isinstance(value, Exception) else self._scale(float(value), length)
            for value, length in zip(values, lengths, strict=True)
        ]

    def check_columns(self, column_names: Sequence[str]) -> None:
        """As the other reward does."""
        if check := getattr(self.reward, "check_columns", None):
            check(column_names)

    def _scale(self, value: float, length: int) -> float:
        if not math.isfinite(value):
            return value
        if length >= self.max_tokens:
            return self.exceeded
        at_zero, at_limit = self.right if value >= 0.5 else self.wrong
        return at_limit + 0.5 * (at_zero - at_limit) * (1 + math.cos(math.pi * length / self.max_tokens))

    def answer(self, response: str) -> str | None:
        """What the other reward says that the response answers."""
        read = getattr(self.reward, "answer", None)
        found = read(response) if read else response.strip()
        return found or None

    def close(self) -> None:
        """Let the other reward free what it holds."""
        close = getattr(self.reward, "close", None)
        if close:
            close()


class TargetLength(NamedReward):
    r"""Discourages lengths away from a target (``exact``), or rewards staying below it (``max``).

    .. math:: R_{exact} = -\alpha |n_{target} - n|, \qquad
        R_{max} = \mathrm{clip}(\alpha (n_{target} - n) + \delta, 0, 1)

    The paper adds the first to the accuracy, and multiplies the accuracy by the second: name ``max`` as reward and gate
    it by the accuracy, with weight 0 for the accuracy itself.

    Source: Aggarwal & Welleck 2025 (arXiv 2503.04697), the reward of L1-Exact and of L1-Max; their
    :math:`\alpha = 0.0003` is the default, as is :math:`\delta = 0.5`.

    Args:
        tokens: :math:`n_{target}` for all examples.
        key: Column of the target, if each example has its own (the prompt must then say it).
        kind: ``exact`` or ``max``.
        alpha: Reward a token.
        delta: Of ``max``: the reward at the target.
    """

    def __init__(
        self,
        tokens: int | None = None,
        key: str | None = None,
        kind: str = "exact",
        alpha: float = 0.0003,
        delta: float = 0.5,
    ) -> None:
        if (tokens is None) == (key is None):
            raise ValueError("TargetLength needs either tokens, one target for all examples, or key, their column.")
        if tokens is not None and tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {tokens}.")
        if kind not in ("exact", "max"):
            raise ValueError(f"kind must be 'exact' or 'max', got '{kind}'.")
        if not (alpha > 0 and math.isfinite(alpha) and 0 <= delta <= 1):
            raise ValueError(f"alpha must be above 0 and delta in [0, 1], got {alpha} and {delta}.")
        self.tokens, self.key, self.kind, self.alpha, self.delta = tokens, key, kind, alpha, delta
        self.columns = () if key is None else (key,)

    def __call__(self, example: Mapping[str, Any], response: str) -> float | None:
        """Score one response; an example without a target gives ``None``.

        Raises:
            TypeError: If the response is a plain string, which does not know its tokens.
            ValueError: If the example has no such column.
        """
        target: Any = self.tokens
        if self.key is not None:
            if self.key not in example:
                raise ValueError(f"The example has no column '{self.key}'; it has {', '.join(example)}.")
            target = example[self.key]
        if target is None:
            return None
        left = float(target) - _num_tokens(response, "TargetLength")
        if self.kind == "exact":
            return -self.alpha * abs(left)
        return min(max(self.alpha * left + self.delta, 0.0), 1.0)


def _num_tokens(response: str, name: str) -> int:
    if not isinstance(response, Response):
        raise TypeError(f"{name} needs a Response, which knows its number of tokens, not a plain string.")
    return response.num_tokens
