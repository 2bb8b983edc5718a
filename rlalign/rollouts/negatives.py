"""Responses to learn to avoid: other ones than those that an annotator puts last."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlalign.functional.draws import fold_in
from rlalign.functional.reductions import masked_mean
from rlalign.rollouts.batch import RolloutBatch
from rlalign.rollouts.pairs import Group, Kind, Pair, scored_groups

_STREAM = 2  # of the random numbers of a seed: 0 and 1 are those of sampling


class Negatives:
    """Draws for each pair which kind its other response is, and makes it.

    - ``unlikely``: of the prompt's samples that are not scored as high as the best one, the least likely under the
      policy that sampled it, by its mean log-probability a token. Samples without a score take part.
    - ``perturbed``: the best response with some tokens swapped with their neighbour, dropped or replaced; only where
      the annotator calls another response worse, so that the best is good.
    - ``stale``: what the annotator put last when the prompt was sampled in an earlier iteration, by an older policy,
      if its score of then is below that of the best now.

    A pair for which its kind cannot be had gets the annotator's last instead; where all have one score there is none.

    Args:
        unlikely: Share of the pairs that this kind is drawn for, like the next two; the rest gets the annotator's last.
        perturbed: Likewise.
        stale: Likewise.
        noise: Share of the tokens of a response that is edited, one token at least.
        max_stale: Responses that are kept, the newest one of each prompt; the oldest ones go first.

    Raises:
        ValueError: If shares are out of bounds.
    """

    def __init__(
        self,
        unlikely: float = 0.0,
        perturbed: float = 0.0,
        stale: float = 0.0,
        noise: float = 0.1,
        max_stale: int = 4096,
    ) -> None:
        self.shares: dict[Kind, float] = {"unlikely": unlikely, "perturbed": perturbed, "stale": stale}
        if min(self.shares.values()) < 0 or not sum(self.shares.values()) <= 1:
            raise ValueError(f"The shares of negatives must be 0 or more, and 1 at most together, got {self.shares}.")
        if not 0 < noise <= 1 or max_stale < 1:
            raise ValueError(f"noise must be in (0, 1] and max_stale at least 1, got {noise} and {max_stale}.")
        self.noise, self.max_stale = noise, max_stale
        self._stale: dict[int, tuple[tuple[int, ...], float]] = {}

    def choose(
        self, rollouts: RolloutBatch, scores: Tensor, group_size: int, vocabulary: Sequence[int], seed: int, epoch: int
    ) -> list[Pair | None]:
        """One pair a prompt, ``None`` where nothing is known to be worse than something else.

        Args:
            rollouts: An iteration.
            scores: The annotator's, ``[B]``, NaN where a response has none.
            group_size: Responses a prompt, adjacent ones.
            vocabulary: Tokens that may replace others.
            seed: Of the run.
            epoch: The iteration.
        """
        usable = rollouts.loss_mask.any(-1)
        assert rollouts.sampler_logprobs is not None
        likelihood = masked_mean(rollouts.sampler_logprobs, rollouts.response_mask, dim=1).tolist()
        values = scores.tolist()
        pairs: list[Pair | None] = []
        for number, group in enumerate(scored_groups(scores, usable, group_size)):
            if group is None:
                pairs.append(None)
                continue
            rows = range(number * group_size, (number + 1) * group_size)
            prompt = int(rollouts.prompt_index[group.best])
            keys = (seed, _STREAM, epoch, prompt)
            kind, pair = self.kind(*keys), None
            if kind == "unlikely":
                below = [row for row in rows if usable[row] and not values[row] >= group.best_score]
                pair = Pair(group.best, min(below, key=likelihood.__getitem__), kind) if below else None
            elif kind == "perturbed":
                pair = self._perturbed(rollouts, group, vocabulary, keys)
            elif kind == "stale":
                pair = self._older(rollouts, group, prompt)
            pairs.append(pair or group.pair)
            if self.shares["stale"]:
                self._remember(prompt, _tokens(rollouts, group.worst), group.worst_score)
        return pairs

    def kind(self, *keys: int) -> Kind:
        """The kind that these keys draw."""
        draw = fold_in(*keys, 0) / 2**63
        for kind, share in self.shares.items():
            if draw < share:
                return kind
            draw -= share
        return "annotated"

    def _perturbed(
        self, rollouts: RolloutBatch, group: Group, vocabulary: Sequence[int], keys: tuple[int, ...]
    ) -> Pair | None:
        if group.is_tie:
            return None
        ids = _tokens(rollouts, group.best)
        kept = 0 if rollouts.truncated[group.best] else 1  # where it was to end is no noise
        edited = perturbed(ids[: len(ids) - kept], vocabulary, self.noise, *keys, 1)
        if edited is None:
            return None
        return Pair(group.best, group.best, "perturbed", edited + ids[len(ids) - kept :])

    def _older(self, rollouts: RolloutBatch, group: Group, prompt: int) -> Pair | None:
        ids, score = self._stale.get(prompt, ((), float("inf")))
        if not score < group.best_score or ids == _tokens(rollouts, group.best):
            return None
        return Pair(group.best, group.best, "stale", ids)

    def _remember(self, prompt: int, ids: tuple[int, ...], score: float) -> None:
        self._stale.pop(prompt, None)
        self._stale[prompt] = (ids, score)
        while len(self._stale) > self.max_stale:
            del self._stale[next(iter(self._stale))]

    def state_dict(self) -> dict[str, Any]:
        """The older responses, the oldest first."""
        return {"stale": [(p, torch.tensor(ids, dtype=torch.int32), s) for p, (ids, s) in self._stale.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the older responses of the run that is resumed."""
        self._stale = {}
        for prompt, ids, score in state["stale"]:
            self._remember(prompt, tuple(ids.tolist()), score)


def perturbed(ids: tuple[int, ...], vocabulary: Sequence[int], noise: float, *keys: int) -> tuple[int, ...] | None:
    """A response with some of its tokens edited; never the same.

    Args:
        ids: Its tokens, ``[t]``, without an end token.
        vocabulary: Tokens that may replace others, at least two.
        noise: Share of the tokens to edit, one at least: each is swapped with the next one, dropped or replaced.
        keys: What the random numbers are a function of.

    Returns:
        Its tokens, as many or fewer; ``None`` for a response without any.
    """
    if not ids:
        return None
    tokens = list(ids)
    for number in range(max(1, round(noise * len(ids)))):
        place, how = fold_in(*keys, number, 0) % len(tokens), fold_in(*keys, number, 1) % 3
        if how == 0 and place + 1 < len(tokens):
            tokens[place], tokens[place + 1] = tokens[place + 1], tokens[place]
        elif how == 1 and len(tokens) > 1:
            del tokens[place]
        else:
            tokens[place] = _another(tokens[place], vocabulary, *keys, number, 2)
    if tuple(tokens) == ids:
        place = fold_in(*keys, -1) % len(tokens)
        tokens[place] = _another(tokens[place], vocabulary, *keys, -2)
    return tuple(tokens)


def _another(token: int, vocabulary: Sequence[int], *keys: int) -> int:
    place = fold_in(*keys) % len(vocabulary)
    return vocabulary[place] if vocabulary[place] != token else vocabulary[(place + 1) % len(vocabulary)]


def _tokens(rollouts: RolloutBatch, row: int) -> tuple[int, ...]:
    """The response of a row, its end token included."""
    start = rollouts.input_ids.shape[1] - rollouts.response_mask.shape[1]
    return tuple(rollouts.input_ids[row, start : start + int(rollouts.response_lengths[row])].tolist())
