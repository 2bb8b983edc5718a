"""Optimizers that change their ways after a while."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW


class AdamThenSGD(AdamW):
    r"""AdamW for the first steps, then plain gradient descent at a fraction of the rate.

    .. math:: \theta \leftarrow \theta - \alpha f\, (g + \lambda\, \theta) \quad \text{after } n \text{ steps}

    with the rate :math:`\alpha` of the moment (a schedule goes on moving it), the factor :math:`f` and the weight decay
    :math:`\lambda`. Adam's step is about the size of the rate whatever the gradient is; that of descent is as small as
    the gradient, so that the policy settles. The moments are dropped at the change, and with them their memory.

    The number of steps is kept with the optimizer's state, so that a resumed run changes where it would have.

    Args:
        params: Parameters, or groups of them.
        lr: Rate :math:`\alpha` of both.
        adam_steps: Steps of Adam, 0 or more.
        sgd_factor: The factor :math:`f`, above 0.
        betas: Of Adam's moments.
        eps: Added to Adam's denominator.
        weight_decay: The decay :math:`\lambda` of both, decoupled.

    Raises:
        ValueError: If a number is out of bounds.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        adam_steps: int = 500,
        sgd_factor: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if adam_steps < 0 or not sgd_factor > 0:
            raise ValueError(
                f"AdamThenSGD: adam_steps must be 0 or more and sgd_factor above 0, got {adam_steps} and {sgd_factor}."
            )
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        for group in self.param_groups:
            group |= {"adam_steps": adam_steps, "sgd_factor": sgd_factor, "steps_done": 0}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the closure is called once."""
        if all(group["steps_done"] < group["adam_steps"] for group in self.param_groups):
            loss = super().step(closure)
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.state.clear()
            for group in self.param_groups:
                rate = group["lr"] * group["sgd_factor"]
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.mul_(1 - rate * group["weight_decay"]).add_(parameter.grad, alpha=-rate)
        for group in self.param_groups:
            group["steps_done"] += 1
        return loss


class OneBitAdam(AdamW):
    r"""AdamW whose variance is frozen after a warm-up, so that the rest is linear in the gradient.

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1)\, g, \quad
              \theta \leftarrow (1 - \alpha \lambda)\, \theta - \alpha \frac{m / (1 - \beta_1^t)}{\sqrt{v_n} + \epsilon}

    with :math:`v_n` the variance of the last of :math:`n` steps of AdamW, its bias corrected. With
    ``strategy.compression=onebit`` gradients are then sent in one bit a number: what that loses comes with the next
    one, and in a linear rule, it makes up for it. A number that had no gradient until then has no size to divide by,
    and stays where it is. The article finds the end of the warm-up where the variance settles, at 15 to 25% of all
    steps.

    Source: Tang et al. 2021, algorithm 1 (https://arxiv.org/abs/2102.02888).

    Args:
        params: Parameters, or groups of them.
        lr: Rate :math:`\alpha`.
        warmup_steps: Steps :math:`n` of AdamW, 1 or more.
        betas: Of the moments.
        eps: Added to the denominator.
        weight_decay: The decay :math:`\lambda`, decoupled.

    Raises:
        ValueError: If a number is out of bounds.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if warmup_steps < 1:
            raise ValueError(f"OneBitAdam: warmup_steps must be 1 or more, got {warmup_steps}.")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        for group in self.param_groups:
            group |= {"warmup_steps": warmup_steps, "steps_done": 0}

    @property
    def is_frozen(self) -> bool:
        """Whether the warm-up is over."""
        return all(group["steps_done"] >= group["warmup_steps"] for group in self.param_groups)

    def size_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The root of the second moment of a parameter's gradients, of its shape; 0 where there was no gradient yet."""
        moment = self.state.get(parameter, {}).get("exp_avg_sq")
        return torch.zeros_like(parameter) if moment is None else moment.sqrt()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the closure is called once, before it is decided which kind of step it is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.is_frozen:
            for group in self.param_groups:
                self._frozen_step(group)
        else:
            super().step()
        for group in self.param_groups:
            group["steps_done"] += 1
        return loss

    def _frozen_step(self, group: dict[str, Any]) -> None:
        beta, beta_of_variance = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None or not (state := self.state[parameter]):
                continue
            if "frozen_at" not in state:
                state["frozen_at"] = float(state["step"])
            state["step"] += 1
            mean = state["exp_avg"].lerp_(parameter.grad, 1 - beta)
            variance = state["exp_avg_sq"] / (1 - beta_of_variance ** state["frozen_at"])
            size = variance.sqrt_().add_(group["eps"]).mul_(1 - beta ** float(state["step"]))
            size.masked_fill_(state["exp_avg_sq"] == 0, float("inf"))
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, size, value=-group["lr"])
