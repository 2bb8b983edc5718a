"""Parts of a module that are trained in turn by one optimizer."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlalign.algorithms.module import TrainedModule


class TrainedInTurn(TrainedModule, ABC):
    """What is idle takes part in the backward pass with gradient 0, as DDP needs it, and in no step of the optimizer.

    A subclass says what is idle in this iteration, and adds :meth:`idle_loss` to its loss. Neither weight decay nor
    moments of the optimizer move what has no gradient.
    """

    @property
    @abstractmethod
    def idle(self) -> nn.Module:
        """The part that this iteration does not train; alike on all ranks."""

    def on_fit_start(self) -> None:
        """Check the strategy.

        Raises:
            ValueError: If it moves what has no gradient.
        """
        super().on_fit_start()
        if self.trainer.strategy.handles_gradient_accumulation:
            name = type(self).__name__
            raise ValueError(f"{name} trains parts of its weights in turn, which DeepSpeed cannot: use DDP or FSDP2.")

    def idle_loss(self) -> Tensor | float:
        """Zero, made of every trained parameter of the idle part."""
        if self.device_mesh is not None:  # sharded parts exchange gradients only where they computed something
            return 0.0
        return 0.0 * torch.stack([parameter.sum() for parameter in trained(self.idle)]).sum()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Take away the gradients of the idle part, before they are clipped and used."""
        for parameter in trained(self.idle):
            parameter.grad = None
        super().on_before_optimizer_step(optimizer)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
