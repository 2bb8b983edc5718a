"""DeepSpeed's ZeRO for models that are loaded whole before they are spread."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.strategies import DeepSpeedStrategy


class ZeROStrategy(DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy``, also for ZeRO-3: models are loaded whole, on the host, and then spread.

    Lightning would have every parameter spread as soon as it is made, in the midst of ``from_pretrained``, of the checks
    of what was loaded, and of adapters that are added.
    """

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Nothing: DeepSpeed spreads what it is given when it starts."""
        self._init_config_if_needed()
        yield
