"""Rewards by regular expressions: of an answer, and of a format."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from rlalign.rewards.base import NamedReward
from rlalign.rewards.extract import gold_text


class RegexMatch(NamedReward):
    r"""1 if what a pattern finds in a response is the right answer, else 0.

    The last match counts, the first group of it if the pattern has one. An empty match is no answer.

    Args:
        pattern: Searched in all of the response; ``.`` matches line breaks as well. ``#### (-?\d+)``, say. In the
            syntax of the package regex, which is that of ``re`` and more.
        key: Column of the right answer; ``None``: any match is right.
        time_limit: Seconds for a search, since some patterns take for ever on some texts; after it there is no match.

    Attributes:
        counts: ``timeouts`` so far.

    Raises:
        ValueError: If the pattern is no regular expression, or the time limit not above 0.
    """

    def __init__(self, pattern: str, key: str | None = "answer", time_limit: float = 1.0) -> None:
        try:
            self.pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"'{pattern}' is not a regular expression: {error}.") from error
        if not time_limit > 0:
            raise ValueError(f"time_limit must be above 0 seconds, got {time_limit}.")
        self.key, self.time_limit = key, time_limit
        self.counts: Counter[str] = Counter()
        self.columns = () if key is None else (key,)

    def __call__(self, example: Mapping[str, Any], response: str) -> float | None:
        """Score one response."""
        found = self.answer(response)
        if self.key is None:
            return float(found is not None)
        gold = gold_text(example, self.key)
        return None if gold is None else float(found == gold)

    def answer(self, response: str) -> str | None:
        """What the pattern finds, without surrounding space; ``None`` if nothing."""
        text = getattr(response, "prefill", "") + str(response)
        try:
            matches = list(self.pattern.finditer(text, timeout=self.time_limit))
        except TimeoutError:
            self.counts["timeouts"] += 1
            return None
        if not matches:
            return None
        return (matches[-1][1 if self.pattern.groups else 0] or "").strip() or None


class FormatReward(NamedReward):
    """1 if a response is exactly one block of each tag, in order, none of them empty; else 0.

    ``<think>a</think> <answer>9</answer>``, say, with nothing but space around the blocks. A further tag of the same
    names anywhere, also in capitals, with space or with attributes, makes it 0. What the prompt put into the
    assistant's mouth is part of what is judged.

    Args:
        tags: Names of the blocks, all different.
    """

    def __init__(self, tags: Sequence[str] = ("think", "answer")) -> None:
        if isinstance(tags, str) or not tags or "" in tags:
            raise ValueError(f"tags must be a list that names at least one block, ['think'] say, got {tags!r}.")
        if len({tag.casefold() for tag in tags}) < len(tags):
            raise ValueError(f"tags must be all different, got {list(tags)}.")
        self.tags = tuple(tags)
        names = "|".join(map(re.escape, self.tags))
        self._marks = re.compile(rf"<\s*+(?:/\s*+)?(?:{names})(?:[\s/][^<>]*+)?>", re.IGNORECASE)
        blocks = (rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>" for tag in self.tags)
        self._pattern = re.compile(r"\s*" + r"\s*".join(blocks) + r"\s*", re.DOTALL)

    def __call__(self, example: Mapping[str, Any], response: str) -> float:
        """Score one response; the example does not matter."""
        text = getattr(response, "prefill", "") + response
        if len(self._marks.findall(text)) != 2 * len(self.tags):  # first, since it keeps the match below linear
            return 0.0
        match = self._pattern.fullmatch(text)
        return float(match is not None and all(body.strip() for body in match.groups()))
