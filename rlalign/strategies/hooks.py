"""How ranks average their gradients: as they are, or in fewer bytes.

A hook is called by DDP with every bucket of gradients, as soon as the backward pass has filled it, and gives their mean
over ranks. What it remembers is kept by parameter, not by bucket: DDP makes buckets anew after the first step.

torch has hooks of its own, but that for PowerSGD begins exchanges from within the callbacks of others: over gloo their
order then differs from rank to rank, and the process is aborted. Here all exchanges are made in the order of buckets.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

State = dict[str, Any]
Future = torch.futures.Future[Tensor]


class MeanHook:
    """The mean in a type of its own; by default that of the gradients, as without a hook.

    Args:
        dtype: In which gradients are sent and summed up, after they were divided by the number of ranks.

    Attributes:
        sent: Bytes that this rank has sent so far.
        plain: Bytes that it would have sent without compression.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.sent = self.plain = 0.0

    def begin(self, _: None, bucket: dist.GradBucket) -> Future:
        """Begin to average a bucket."""
        buffer = bucket.buffer()
        self.plain += ring_bytes(buffer)
        return self.average(bucket, buffer)

    def average(self, bucket: dist.GradBucket, buffer: Tensor) -> Future:
        """Average its buffer ``[N]`` in place."""
        short = buffer.div_(dist.get_world_size()).to(self.dtype or buffer.dtype)
        self.sent += ring_bytes(short)
        exchange = dist.all_reduce(short, async_op=True)
        assert exchange is not None
        return exchange.get_future().then(lambda future: buffer.copy_(future.value()[0]))

    def state(self) -> State:
        """What it must know to go on, for a checkpoint."""
        return {}

    def restore(self, state: State, device: torch.device) -> None:
        """Go on from there."""


class _ErrorFeedback(MeanHook):
    """What a compression loses of a gradient is added to the next one (Seide et al. 2014; Karimireddy et al. 2019).

    Args:
        names: Of each parameter, to keep its error by.
        starts: Whether compression has begun; until then gradients are averaged as they are.
    """

    def __init__(self, names: dict[Tensor, str], starts: Callable[[], bool]) -> None:
        super().__init__()
        self.names, self.starts = names, starts
        self.errors: dict[str, Tensor] = {}

    def average(self, bucket: dist.GradBucket, buffer: Tensor) -> Future:
        """Average as they are in the beginning, then compressed."""
        if not self.starts():
            return super().average(bucket, buffer)
        parts = [(self.names[p], g) for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)]
        self.compress(parts)
        done: Future = torch.futures.Future()
        done.set_result(buffer)
        return done

    def compress(self, parts: list[tuple[str, Tensor]]) -> None:
        """Put the mean over ranks into gradients, each with the name of its parameter, and note what was lost."""
        raise NotImplementedError

    def with_error(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient and what was lost before, as a matrix ``[rows, columns]``; a vector has one row."""
        whole = gradient + self.errors[name].view_as(gradient) if name in self.errors else gradient.clone()
        return whole.view(1, -1) if whole.ndim < 2 else whole.flatten(1)

    def state(self) -> State:
        """Errors of this rank."""
        return {"errors": dict(self.errors)}

    def restore(self, state: State, device: torch.device) -> None:
        """Take the errors of this rank."""
        self.errors = {name: error.to(device) for name, error in state["errors"].items()}


class OneBitHook(_ErrorFeedback):
    r"""The sign of each number in units of its size, and a scale for each row of a matrix.

    .. math:: x = \frac{g}{s} + e, \quad \hat x = \mathrm{sign}(x)\, \frac{\lVert x \rVert_1}{n}, \quad
              e \leftarrow x - \hat x, \quad g \leftarrow s\, \overline{\hat x}

    over a row of :math:`n` numbers, with the mean over ranks and the size :math:`s = \sqrt{v}` by which the optimizer
    will divide. The article compresses the momentum as it is, with a scale for a whole buffer. A number whose gradients
    are small beside the others' then gets one of their size, is divided by its own, and moves by many times the rate;
    on policy gradients, which differ by orders of magnitude, that ended training within a few steps. Every rank sends
    its signs to all others, which is less than plain gradients take on fewer than 64 ranks.

    Source: Tang et al. 2021, 1-bit Adam, algorithm 1 (https://arxiv.org/abs/2102.02888).

    Args:
        names: Of each parameter, to keep its error by.
        starts: Whether compression has begun; until then gradients are averaged as they are.
        size_of: The size :math:`s` of each number of a parameter, of its shape and the same on all ranks; where it is
            0, there will be no gradient.
    """

    def __init__(
        self, names: dict[Tensor, str], starts: Callable[[], bool], size_of: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(names, starts)
        self.parameters = {name: parameter for parameter, name in names.items()}
        self.size_of = size_of

    def in_sizes(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient over the size of its numbers, ``[...]``; 0 where that is 0."""
        size = self.size_of(self.parameters[name])
        return torch.where(size > 0, gradient / size, 0.0)

    def compress(self, parts: list[tuple[str, Tensor]]) -> None:
        """See the class."""
        wholes = [self.with_error(name, self.in_sizes(name, gradient)) for name, gradient in parts]
        scales = torch.cat([whole.abs().mean(1) for whole in wholes])
        bits = pack_signs(torch.cat([whole.flatten() for whole in wholes]))
        all_scales, all_bits = _gathered(scales), _gathered(bits)
        self.sent += (dist.get_world_size() - 1) * (bits.nbytes + scales.nbytes)
        numel = sum(whole.numel() for whole in wholes)
        rank, count = dist.get_rank(), len(all_bits)
        total = [torch.zeros_like(whole) for whole in wholes]
        for number, (their_scales, their_bits) in enumerate(zip(all_scales, all_bits, strict=True)):
            signs = unpack_signs(their_bits, numel, scales.dtype)
            rows = signs.split([whole.numel() for whole in wholes])
            of_rows = their_scales.split([len(whole) for whole in wholes])
            for i, ((name, _), whole) in enumerate(zip(parts, wholes, strict=True)):
                found = rows[i].view_as(whole) * of_rows[i].unsqueeze(1)
                total[i] += found
                if number == rank:
                    self.errors[name] = whole - found
        for (name, gradient), summed in zip(parts, total, strict=True):
            gradient.copy_(summed.div_(count).view_as(gradient).mul_(self.size_of(self.parameters[name])))


class PowerSGDHook(_ErrorFeedback):
    r"""A product of two thin matrices for each matrix: one step of the power method, from where the last one ended.

    .. math:: X = G + E, \quad P = \mathrm{orth}(\overline{X Q}), \quad Q \leftarrow \overline{X^\top P}, \quad
              \hat X = P Q^\top, \quad E \leftarrow X - \hat X

    with means over ranks. Vectors, and matrices that would not shrink by half, are averaged as they are.

    Source: Vogels et al. 2019, algorithms 1 and 2 (https://arxiv.org/abs/1905.13727).

    Args:
        names: Of each parameter, to keep its error by.
        warmup_steps: Of plain averaging before.
        rank: Columns of the thin matrices.
    """

    def __init__(self, names: dict[Tensor, str], warmup_steps: int, rank: int) -> None:
        super().__init__(names, lambda: self.steps >= self.warmup_steps)
        self.warmup_steps, self.rank, self.steps = warmup_steps, rank, 0
        self.right: dict[str, Tensor] = {}

    def average(self, bucket: dist.GradBucket, buffer: Tensor) -> Future:
        """Count steps, too."""
        future = super().average(bucket, buffer)
        self.steps += bucket.is_last()
        return future

    def compress(self, parts: list[tuple[str, Tensor]]) -> None:
        """See the class."""
        thin = [(name, gradient) for name, gradient in parts if self._shrinks(gradient)]
        plain = [gradient for _, gradient in parts if not self._shrinks(gradient)]
        self._mean(plain)
        if not thin:
            return
        wholes = [self.with_error(name, gradient) for name, gradient in thin]
        for (name, _), whole in zip(thin, wholes, strict=True):
            if name not in self.right:
                self.right[name] = self._start(name, whole)
        lefts = [whole @ self.right[name] for (name, _), whole in zip(thin, wholes, strict=True)]
        self._mean(lefts)
        rights = [whole.T @ _orthogonal(left) for left, whole in zip(lefts, wholes, strict=True)]
        self._mean(rights)
        for (name, gradient), whole, left, right in zip(thin, wholes, lefts, rights, strict=True):
            found = left @ right.T
            self.errors[name], self.right[name] = whole - found, right
            gradient.copy_(found.view_as(gradient))

    def _shrinks(self, gradient: Tensor) -> bool:
        rows, columns = len(gradient), gradient.numel() // max(len(gradient), 1)
        return gradient.ndim > 1 and 2 * self.rank * (rows + columns) <= rows * columns

    def _start(self, name: str, whole: Tensor) -> Tensor:
        """A random right matrix ``[columns, rank]``, the same on all ranks."""
        generator = torch.Generator().manual_seed(sum(name.encode()))
        return torch.randn(whole.shape[1], self.rank, generator=generator).to(whole)

    def _mean(self, tensors: list[Tensor]) -> None:
        """Average tensors over ranks, in place and in one exchange."""
        if not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(dist.get_world_size())
        self.sent += ring_bytes(flat)
        dist.all_reduce(flat)
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def state(self) -> State:
        """Errors of this rank, right matrices and steps."""
        return super().state() | {"right": dict(self.right), "steps": self.steps}

    def restore(self, state: State, device: torch.device) -> None:
        """Go on from there."""
        super().restore(state, device)
        self.right = {name: right.to(device) for name, right in state["right"].items()}
        self.steps = state["steps"]


def ring_bytes(tensor: Tensor) -> float:
    """Bytes that a rank sends when a tensor is summed up around a ring: all but its own share, twice."""
    return 2 * (1 - 1 / dist.get_world_size()) * tensor.nbytes


def pack_signs(x: Tensor) -> Tensor:
    """Whether each of ``[N]`` numbers is at least 0, eight in a byte: ``[(N + 7) // 8]``."""
    bits = torch.nn.functional.pad((x >= 0).to(torch.uint8), (0, -len(x) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Of ``count`` numbers, 1 where it was at least 0 and -1 elsewhere."""
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return bits.flatten()[:count].to(dtype).mul_(2).sub_(1)


def _gathered(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks, in their order."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def _orthogonal(x: Tensor) -> Tensor:
    """Columns made orthonormal in place, one after the other (Gram-Schmidt); none where there is next to nothing."""
    for i in range(x.shape[1]):
        column = x[:, i]
        column.sub_(x[:, :i] @ (x[:, :i].T @ column))
        column.div_(column.norm().clamp_(min=torch.finfo(x.dtype).tiny))
    return x
