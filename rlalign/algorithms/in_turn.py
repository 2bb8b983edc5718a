"""Parts of a module that are trained in turn by one optimizer."""

from abc import ABC, abstractmethod
from typing import Any

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
        """Check the strategy, and where moments are spread let all of them be there from the start.

        Raises:
            ValueError: If it moves what has no gradient.
        """
        super().on_fit_start()
        if self.trainer.strategy.handles_gradient_accumulation and not hasattr(self.trainer.strategy, "rest"):
            name = type(self).__name__
            raise ValueError(
                f"{name} trains parts of its weights in turn, which Lightning's DeepSpeedStrategy cannot: use "
                "rlalign.strategies.zero.ZeROStrategy."
            )
        if self.device_mesh is not None:
            begin_moments(self.trainer.optimizers[0])

    def idle_loss(self) -> Tensor | float:
        """Zero, made of every trained parameter of the idle part."""
        is_spread = self.device_mesh is not None or getattr(self.trainer.strategy, "zero_stage_3", False)
        if is_spread:  # sharded parts exchange gradients only where they computed something
            return 0.0
        return 0.0 * torch.stack([parameter.sum() for parameter in trained(self.idle)]).sum()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Take away the gradients of the idle part, before they are clipped and used."""
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "rest"):
            strategy.rest(trained(self.idle))
        for parameter in trained(self.idle):
            parameter.grad = None
        super().on_before_optimizer_step(optimizer)


@torch.no_grad()
def begin_moments(optimizer: Optimizer) -> None:
    """Have the moments that a first step would make, without one: a sharded checkpoint must hold all or none."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
