"""Rows of a minibatch as one sequence without padding, in which a prompt that rows share is there once.

Everything but attention computes tokens one by one, and does not care whose they are. Attention is told by
:class:`FlatRows`, which goes through the model as an argument: each prompt attends to itself, each response to its
prompt and itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Block:
    """Adjacent pieces of the flat sequence, ``b`` of them, that attend side by side; padded for this alone.

    Attributes:
        lengths: Of the pieces, ``[b]``.
        longest: Of them.
        places: Where each token is among ``b * longest`` padded ones, ``[sum(lengths)]``; ``None`` if none is padded.
        prompts: Which prompt each one continues, ``[b]``; ``None`` for the block of the prompts.
        seen: Where its queries look, among the tokens of prompts and then its own, ``[b, 1, longest, P + longest]``.
    """

    lengths: Tensor
    longest: int
    places: Tensor | None
    prompts: Tensor | None = None
    seen: Tensor | None = None

    @classmethod
    def of(cls, lengths: Tensor, prompts: Tensor | None = None, prompt_lengths: Tensor | None = None) -> "Block":
        """A block of pieces of these lengths, which continue some of the prompts."""
        longest = int(lengths.max())
        columns = torch.arange(longest, device=lengths.device)
        inside = columns < lengths.unsqueeze(1)
        places = None if inside.all() else inside.flatten().nonzero().squeeze(1)
        if prompts is None or prompt_lengths is None:
            return cls(lengths, longest, places)
        columns_of_prompt = torch.arange(int(prompt_lengths.max()), device=lengths.device)
        of_prompt = columns_of_prompt < prompt_lengths[prompts].unsqueeze(1)
        own = columns <= columns.unsqueeze(1)
        rows = len(lengths)
        seen = torch.cat([of_prompt.unsqueeze(1).expand(-1, longest, -1), own.expand(rows, -1, -1)], -1)
        return cls(lengths, longest, places, prompts, seen.unsqueeze(1))

    def padded(self, x: Tensor) -> Tensor:
        """``[sum(lengths), ...] -> [b, longest, ...]``."""
        found: Tensor = x if self.places is None else _Padded.apply(x, self.places, len(self.lengths) * self.longest)
        return found.unflatten(0, (-1, self.longest))

    def taken(self, x: Tensor) -> Tensor:
        """``[b, longest, ...] -> [sum(lengths), ...]``."""
        x = x.flatten(0, 1)
        found: Tensor = x if self.places is None else _Taken.apply(x, self.places)
        return found


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(x)
        return x.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.size, *gradient.shape[1:]).index_copy_(0, places, gradient), None


@dataclass(frozen=True)
class FlatRows:
    """How the tokens of a minibatch are laid flat: the prompts, then the responses, the longest first.

    Attributes:
        blocks: Of the prompts, then of responses of similar lengths.
        tokens: Which of the ``B x L`` tokens of the minibatch each one is, ``[N]``.
        before: Where the state is that predicts each column of the response, ``[B, T]``.
    """

    blocks: Sequence[Block]
    tokens: Tensor
    before: Tensor

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, num_tokens: int, with_last: bool = False) -> "FlatRows":
        """Lay rows flat.

        Args:
            input_ids: Prompt and response, ``[B, P + T]``.
            attention_mask: True on real tokens, ``[B, P + T]``; each row has one in its prompt.
            num_tokens: Columns of the response, ``T``.
            with_last: The state after the last column, too: ``before`` has ``T + 1`` columns.
        """
        (rows, length), mask = input_ids.shape, attention_mask.bool()
        width, device = length - num_tokens, input_ids.device
        prompt_mask, response_mask = mask[:, :width], mask[:, width:]
        if not with_last:  # the last token of a row predicts nothing
            response_mask = response_mask & (response_mask.flip(1).cumsum(1).flip(1) > 1)
        distinct, prompt_of_row = torch.cat([input_ids[:, :width], prompt_mask.long()], 1).unique(
            dim=0, return_inverse=True
        )
        numbers = torch.arange(rows, device=device)
        first = numbers.new_full((len(distinct),), rows).scatter_reduce(0, prompt_of_row, numbers, "amin")
        prompt_lengths, lengths = prompt_mask[first].sum(1), response_mask.sum(1)
        order = lengths.argsort(descending=True, stable=True)
        order = order[: int((lengths > 0).sum())]
        blocks = [Block.of(prompt_lengths)]
        for part in _similar(order, lengths[order].tolist()):
            blocks.append(Block.of(lengths[part], prompt_of_row[part], prompt_lengths))
        number = numbers.unsqueeze(1) * length + torch.arange(length, device=device)
        prompts, responses = number[:, :width][first], number[:, width:][order]
        tokens = torch.cat([prompts[prompt_mask[first]], responses[response_mask[order]]])
        # The state that predicts a token is that of the token before it; a response's first follows its prompt's last.
        ends = prompt_lengths.cumsum(0)
        starts = torch.zeros_like(lengths).scatter(0, order, ends[-1] + lengths[order].cumsum(0) - lengths[order])
        count = response_mask.cumsum(1)
        count = torch.cat([torch.zeros_like(count[:, :1]), count if with_last else count[:, :-1]], 1)
        before = torch.where(count > 0, starts.unsqueeze(1) + count - 1, ends[prompt_of_row].unsqueeze(1) - 1)
        return cls(blocks, tokens, before)

    def attend(self, attend: Callable[..., tuple[Tensor, Any]], *states: Tensor) -> tuple[Tensor, None]:
        """Attention of the flat sequence.

        Args:
            attend: Of queries ``[b, H, Q, D]``, keys and values ``[b, G, S, D]`` and a mask, causal without one.
            states: Queries, keys and values, ``[1, H or G, N, D]``. There may be more tokens than those of the rows:
                they attend to nothing.

        Returns:
            ``[1, N, H, D]``.
        """
        sizes = [int(block.lengths.sum()) for block in self.blocks]
        filling = states[0].shape[2] - sum(sizes)
        pieces = zip(*(x.squeeze(0).transpose(0, 1).split([*sizes, filling])[:-1] for x in states), strict=True)
        found: list[Tensor] = []
        of_prompts: list[Tensor] = []
        for block, piece in zip(self.blocks, pieces, strict=True):
            queries, *seen = (block.padded(x).transpose(1, 2) for x in piece)
            if block.prompts is None:
                of_prompts = seen
            else:
                prompts = block.prompts
                seen = [torch.cat([x.index_select(0, prompts), y], 2) for x, y in zip(of_prompts, seen, strict=True)]
            found.append(block.taken(attend(queries, *seen, block.seen)[0]))
        if filling:
            found.append(found[0].new_zeros(filling, *found[0].shape[1:]))
        return torch.cat(found).unsqueeze(0), None


def _similar(order: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
    """Adjacent rows of which none is shorter than half of the longest; lengths are falling."""
    start = 0
    for number in range(1, len(lengths) + 1):
        if number == len(lengths) or lengths[number] * 2 < lengths[start]:
            yield order[start:number]
            start = number
