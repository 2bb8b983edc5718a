"""A sampler whose responses end when their time has come."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from workload import Case

from rlalign.models.decoding import Decoder
from rlalign.rollouts.sampling.local import LocalSampler


class Forced:
    """A decoder whose rows never end before their time, and end then."""

    def __init__(self, decoder: Decoder, case: Case, end: int) -> None:
        self.decoder, self.case, self.end = decoder, case, end
        self.compacts_at, self.admits_late = decoder.compacts_at, decoder.admits_late
        self.left = torch.zeros(0, dtype=torch.long)

    def __len__(self) -> int:
        return len(self.decoder)

    def _of(self, logits: Tensor, left: Tensor) -> Tensor:
        logits[:, self.end] = float("-inf")
        logits[left <= 1] = float("-inf")
        logits[left <= 1, self.end] = 0.0
        return logits

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Rows, numbered as they come."""
        logits = self.decoder.admit(prompts, counts)
        new = torch.tensor([self.case.length(row) for row in range(sum(counts))], device=logits.device)
        self.left = torch.cat([self.left.to(logits.device), new])
        return self._of(logits, new)

    def step(self, tokens: Tensor) -> Tensor:
        """A token each."""
        self.left = self.left - 1
        return self._of(self.decoder.step(tokens), self.left)

    def keep(self, rows: Tensor) -> Tensor:
        """Some of the rows."""
        order = self.decoder.keep(rows)
        self.left = self.left.to(order.device)[order]
        return order


class ToLength(LocalSampler):
    """A sampler of responses whose lengths are given."""

    def __init__(self, case: Case, **options: Any) -> None:
        super().__init__(**options)
        self.case = case

    def _make_decoder(self, model: Any) -> Any:
        return Forced(super()._make_decoder(model), self.case, self.end_ids[0])
