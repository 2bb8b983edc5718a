"""Pairs of responses to one prompt, a preferred one and another, made of what was sampled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlalign.rollouts.batch import RolloutBatch

Kind = Literal["annotated", "unlikely", "perturbed", "stale"]
"""What the other response of a pair is: the annotator's last, or a negative of its own kind."""


class Pair(NamedTuple):
    """Two rows of a batch."""

    chosen: int
    """Row of the preferred response."""
    rejected: int
    """Row of the other one, or of one with the same prompt."""
    kind: Kind = "annotated"
    response: tuple[int, ...] | None = None
    """Tokens of the other response where it is no row of the batch."""


class Group(NamedTuple):
    """The responses to one prompt that were scored."""

    best: int
    """Row of the highest score, the first of several."""
    worst: int
    """Row of the lowest score, the first of several."""
    best_score: float
    worst_score: float

    @property
    def is_tie(self) -> bool:
        """Whether all have one score."""
        return self.worst_score == self.best_score

    @property
    def pair(self) -> Pair | None:
        """The best against the worst; none where they are no better than each other."""
        return None if self.is_tie else Pair(self.best, self.worst)


def scored_groups(scores: Tensor, usable: Tensor, group_size: int) -> list[Group | None]:
    """The best and the worst response to each prompt.

    Args:
        scores: ``[B]``, NaN where a response has none.
        usable: False where a response must not be learned from, ``[B]``.
        group_size: Responses a prompt, adjacent ones.

    Returns:
        ``B / group_size`` groups, ``None`` for a prompt without a usable response that has a score.
    """
    counts = usable & ~scores.isnan()
    values = scores.tolist()
    groups: list[Group | None] = []
    for start in range(0, len(values), group_size):
        rows = [row for row in range(start, start + group_size) if counts[row]]
        if not rows:
            groups.append(None)
            continue
        best, worst = max(rows, key=values.__getitem__), min(rows, key=values.__getitem__)
        groups.append(Group(best, worst, values[best], values[worst]))
    return groups


def paired_rows(rollouts: RolloutBatch, pairs: Sequence[Pair], pad_id: int) -> RolloutBatch:
    """The rows of pairs, the preferred response at ``2i`` and the other one at ``2i + 1``.

    A response that is no row of the batch takes the prompt of the row that its pair names. No policy sampled it here:
    its ``sampler_logprobs`` are 0, its ``sample_index`` is -1, and it has no reward.

    Args:
        rollouts: ``[B]`` rows.
        pairs: What to take of them.
        pad_id: Token id of padding.
    """
    rows = torch.tensor([row for pair in pairs for row in (pair.chosen, pair.rejected)], dtype=torch.long)
    batch = rollouts[rows]
    made = {2 * i + 1: pair.response for i, pair in enumerate(pairs) if pair.response is not None}
    if not made:
        return batch
    assert batch.sampler_logprobs is not None
    width = batch.response_mask.shape[1]
    extra = max(0, max(len(response) for response in made.values()) - width)
    batch = replace(
        batch,
        input_ids=pad(batch.input_ids, (0, extra), value=pad_id),
        attention_mask=pad(batch.attention_mask, (0, extra)),
        response_mask=pad(batch.response_mask, (0, extra)),
        loss_mask=pad(batch.loss_mask, (0, extra)),
        sampler_logprobs=pad(batch.sampler_logprobs, (0, extra)),
    )
    start = batch.input_ids.shape[1] - width - extra
    assert batch.sampler_logprobs is not None
    for row, response in made.items():
        is_token = torch.arange(width + extra) < len(response)
        batch.input_ids[row, start:] = pad_id
        batch.input_ids[row, start : start + len(response)] = torch.tensor(response)
        batch.attention_mask[row, start:] = batch.response_mask[row] = batch.loss_mask[row] = is_token
        batch.sampler_logprobs[row] = 0.0
    others = torch.tensor(list(made))
    batch.sample_index[others], batch.rewards[others] = -1, 0.0
    for flags in (batch.valid, batch.correct, batch.truncated):
        flags[others] = False
    for component in batch.components.values():
        component[others] = float("nan")
    return batch
