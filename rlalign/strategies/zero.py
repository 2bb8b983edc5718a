"""DeepSpeed's ZeRO for models that are loaded whole before they are spread, with parts that rest."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn


class ZeROStrategy(DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy``, also for ZeRO-3: models are loaded whole, on the host, and then spread.

    Lightning would have every parameter spread as soon as it is made, in the midst of ``from_pretrained``, of the
    checks of what was loaded, and of adapters that are added.
    """

    _resting: set[int]
    """Parameters that the coming step leaves as they are, by identity."""

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Nothing: DeepSpeed spreads what it is given when it starts."""
        self._init_config_if_needed()
        yield

    def _format_config(self) -> None:
        """As Lightning's, and with the optimizer on the host it is the one that was asked for, not DeepSpeed's own."""
        super()._format_config()
        assert isinstance(self.config, dict)
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)

    def rest(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave these parameters, and their moments, as they are in the coming step; whole groups of the optimizer.

        Raises:
            ValueError: With ZeRO-3 whose optimizer is on the host: gradients of an earlier step would be left there.
        """
        self._resting = {id(parameter) for parameter in parameters}
        optimizer: Any = self.deepspeed_engine.optimizer
        if not self.zero_stage_3 or not self._resting:
            return
        if optimizer.offload_optimizer:
            raise ValueError(
                "Parts that are trained in turn do not go with ZeRO-3 offload: use ZeRO-3 without, or FSDP2."
            )
        for number, group in enumerate(optimizer.fp16_groups):
            if id(group[0]) in self._resting:
                for gradient in optimizer.averaged_gradients.get(number) or []:
                    gradient.zero_()  # those of an earlier step, which would count in the norm

    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        super()._initialize_deepspeed_train(model)
        self._resting = set()
        optimizer: Any = self.deepspeed_engine.optimizer
        groups = optimizer.fp16_groups if self.zero_stage_3 else optimizer.bit16_groups
        step = optimizer._optimizer_step

        def step_unless_resting(number: int) -> None:
            resting = [id(parameter) in self._resting for parameter in groups[number]]
            if any(resting) != all(resting):
                raise RuntimeError("What rests in a step must be whole groups of the optimizer.")
            if not all(resting):
                step(number)

        optimizer._optimizer_step = step_unless_resting
