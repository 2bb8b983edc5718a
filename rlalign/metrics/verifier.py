"""A second, independent verifier beside the reward that is trained on."""

import torch
from torch import Tensor

from rlalign.metrics.responses import Mean


class _Comparison(Mean):
    """A mean that is NaN, not 0, if nothing was seen on any rank: 0 would say that there is no difference."""

    def compute(self) -> Tensor:
        """The mean, float32."""
        return super().compute() if self.count else torch.full_like(self.total, torch.nan).float()


class VerifierPass(_Comparison):
    """Share of right responses by the second verifier, among those that it could score."""

    def update(self, verified: Tensor) -> None:
        """Add responses, ``[n]``, bool."""
        self.add(verified)


class VerifierGap(_Comparison):
    """Share of right responses by the reward less that by the second verifier, over responses that both could score.

    It grows where a policy learns to please the reward rather than to be right.
    """

    higher_is_better = False

    def update(self, differences: Tensor) -> None:
        """Add responses, ``[n]``: 1 where only the reward calls one right, -1 where only the verifier does, else 0."""
        self.add(differences)


class UnverifiedRate(Mean):
    """Share of the responses that the second verifier could not score."""

    higher_is_better = False

    def update(self, unverified: Tensor) -> None:
        """Add responses, any shape, bool."""
        self.add(unverified)
