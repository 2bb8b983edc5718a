"""Keys and values of rows that are being drawn.

The rows end at the same column, whatever their lengths, so that the next token of all of them is one column to write.
What is read is all columns there are, with few to spare: a part of them would be copied first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 16  # columns: their number is a multiple of it, since kernels are made for a number when it is first met


class RowCache:
    """Cache of ``R`` rows and all layers, written in place.

    Args:
        layers: How many.
        heads: Of keys, ``K``.
        size: Of a head, ``D``.
        scaling: Of the scores.
        like: Its type and device are those of the cache.

    Attributes:
        positions: Tokens that are there, of each row, ``[R]``.
    """

    def __init__(self, layers: int, heads: int, size: int, scaling: float, like: Tensor) -> None:
        self.heads, self.size, self.scaling = heads, size, scaling
        self.keys, self.values = ([like.new_zeros(0, heads, 0, size)] * layers for _ in range(2))
        self.positions = torch.zeros(0, dtype=torch.long, device=like.device)
        self._longest, self._end = 0, 0  # of the positions; the column of the next token

    def __len__(self) -> int:
        return len(self.positions)

    def expect_rows(self, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Make room for rows behind those that there are.

        Args:
            lengths: Of ``n`` prompts.
            counts: Rows of each.
        """
        device = self.positions.device
        self._prompts = torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device))
        of_prompts, width = torch.tensor(lengths, device=device), max(lengths)
        # Prompts come with padding on the right; it goes to the left, where nobody looks.
        columns = torch.arange(width, device=device) - (width - of_prompts.unsqueeze(1))
        self._columns = columns.clamp(min=0)[:, None, :, None]
        self._reserve(len(self) + len(self._prompts), max(width, self._longest))
        self._first = len(self)
        self.positions = torch.cat([self.positions, of_prompts[self._prompts]])
        self._longest = max(self._longest, width)

    def write_prompts(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values of the expected prompts, each ``[n, K, L, D]``, padded on the right."""
        width = keys.shape[2]
        for cache, new in ((self.keys, keys), (self.values, values)):
            aligned = new.gather(2, self._columns.expand_as(new))
            cache[layer][self._first : len(self), :, self._end - width : self._end] = aligned[self._prompts]

    def expect_tokens(self) -> None:
        """Make room for one more token of each row."""
        self._reserve(len(self), self._longest, 1)
        behind = self._end - torch.arange(self.values[0].shape[2], device=self.positions.device)
        unseen = (behind < 0) | (behind > self.positions.unsqueeze(1))
        bias = torch.zeros(unseen.shape, dtype=self.keys[0].dtype, device=unseen.device)
        self._bias = bias.masked_fill_(unseen, float("-inf")).repeat_interleave(self.heads, 0).unsqueeze(1)
        self.positions, self._longest, self._end = self.positions + 1, self._longest + 1, self._end + 1

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write the expected tokens' keys and values, ``[R, K, D]``; what their queries find, both ``[R, H, D]``."""
        all_keys, all_values = self.keys[layer][: len(self)], self.values[layer][: len(self)]
        all_keys[:, :, self._end - 1], all_values[:, :, self._end - 1] = keys, values
        # The queries that share a key are one product.
        blocks = queries.reshape(len(self) * self.heads, -1, self.size)
        scores = torch.baddbmm(self._bias, blocks, all_keys.flatten(0, 1).transpose(1, 2), alpha=self.scaling)
        return torch.bmm(scores.softmax(-1), all_values.flatten(0, 1)).view(queries.shape)

    def keep(self, rows: Tensor) -> Tensor:
        """Leave out all rows but these (sorted), moving as few as possible; their new order, as numbers of old rows."""
        count, device = len(rows), rows.device
        moved = rows[rows >= count]
        free = torch.ones(count, dtype=torch.bool, device=device)
        free[rows[rows < count]] = False
        places = free.nonzero().squeeze(1)
        order = torch.arange(count, device=device)
        order[places] = moved
        if len(moved):
            for cache in (*self.keys, *self.values):
                cache[places] = cache[moved]
        self.positions = self.positions[order]
        self._longest = int(self.positions.max()) if count else 0
        if not count:
            self._end = 0
        return order

    def _reserve(self, rows: int, before: int, after: int = 0) -> None:
        """Have room for so many rows, and so many columns before the next token's and from it on."""
        has_rows, has_columns = self.values[0].shape[0], self.values[0].shape[2]
        if rows <= has_rows and before <= self._end and self._end + after <= has_columns:
            return
        # The longer the rows, the more there is to copy, and the less a few more columns to read matter.
        spare = max(_BLOCK, before // 8)
        has_rows, has_columns = max(rows, has_rows), -(-(before + spare) // _BLOCK) * _BLOCK
        live, old, new = len(self), slice(self._end - self._longest, self._end), slice(before - self._longest, before)
        for caches in (self.keys, self.values):
            for number, cache in enumerate(caches):
                # Zeros: what nobody looks at must be finite.
                caches[number] = cache.new_zeros(has_rows, self.heads, has_columns, self.size)
                caches[number][:live, :, new] = cache[:live, :, old]
        self._end = before
