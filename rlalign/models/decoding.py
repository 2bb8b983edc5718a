"""What draws tokens by a model: rows come in with their prompts, take a token each at every step, and leave."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlalign.models.scoring import adjust_logits, at_least_float32, cache_argument, position_ids


class Decoder(Protocol):
    """Keeps the cache of ``R`` rows, each of which has its own length."""

    compacts_at: float
    """Share of the rows that must be over before leaving them out pays."""
    admits_late: bool
    """Whether rows can come in while others are on their way."""

    def __len__(self) -> int:
        """Rows in the cache, ``R``."""

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Compute prompts, and add rows behind those that there are.

        Args:
            prompts: Token ids, ``n`` prompts.
            counts: Rows of each.

        Returns:
            Logits of the token after the prompt, one for each new row, ``[sum(counts), V]``.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Take one more token for each row, ``[R]``; the logits of the one after it, ``[R, V]``."""

    def keep(self, rows: Tensor) -> Tensor:
        """Leave out all rows but these (sorted); the order in which they are now, as their old numbers."""


class ModuleDecoder:
    """Any causal language model of transformers, by its own modules and cache.

    Args:
        model: The model; what it says is its own, to the bit.
        pad_id: Token id of padding.
    """

    compacts_at = 0.25  # copying the cache costs about as much as a few steps of the dead rows
    admits_late = False

    def __init__(self, model: PreTrainedModel, pad_id: int) -> None:
        self.model, self.pad_id = model, pad_id
        self.cache_argument = cache_argument(model)
        self.mask = torch.zeros(0, 0, dtype=torch.bool, device=model.device)
        self.positions = torch.zeros(0, dtype=torch.long, device=model.device)

    def __len__(self) -> int:
        return len(self.mask)

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Compute prompts, each once, for rows that are the only ones."""
        assert not len(self)
        width, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[self.pad_id] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=device)
        self.cache = DynamicCache(config=self.model.config)
        logits = self._logits(ids, mask, position_ids(mask))
        rows = torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device))
        if len(rows) > len(counts):
            self.cache.batch_select_indices(rows)
        self.mask, self.positions = mask[rows], mask[rows].sum(-1)
        return logits[rows]

    def step(self, tokens: Tensor) -> Tensor:
        """Take one more token for each row."""
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        logits = self._logits(tokens.unsqueeze(1), self.mask, self.positions.unsqueeze(1))
        self.positions = self.positions + 1
        return logits

    def keep(self, rows: Tensor) -> Tensor:
        """Leave out all rows but these; their order stays."""
        if len(rows) < len(self):
            self.cache.batch_select_indices(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]
        return rows

    def _logits(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Of the last position, ``[R, V]``."""
        cached = {"use_cache": True, self.cache_argument: self.cache}
        states = self.model.base_model(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions, **cached
        ).last_hidden_state
        head = self.model.get_output_embeddings()
        return at_least_float32(adjust_logits(head(states[:, -1]), self.model.config))
