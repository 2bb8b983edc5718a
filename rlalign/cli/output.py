"""What the command line says of a run besides its progress."""

import logging
import warnings
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from transformers.utils import logging as transformers_logging

NOISE = (
    r".*isinstance\(treespec, LeafSpec\).*",  # between versions of torch and Lightning
    r".*is_gradient_checkpointing.*",  # between versions of peft and transformers
    r".*does not have many workers.*",  # rollouts are made in this process
    r"Total length of `\w+` across ranks is zero.*",  # no held-out prompts were asked for
)


def be_quiet() -> None:
    """Leave out what libraries say of themselves; warnings about the run stay."""
    warnings.formatwarning = lambda message, category, *place, **line: f"warning: {message}\n"
    for pattern in NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    transformers_logging.disable_progress_bar()


def changes(before: Any, now: Any, where: str = "") -> list[str]:
    """What differs between two configurations, a line for each setting."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*before, *(name for name in now if name not in before)]
        return [line for n in names for line in changes(before.get(n), now.get(n), f"{where}.{n}" if where else str(n))]
    return [] if before == now else [f"{where}: {before} -> {now}"]


class Farewell(Callback):
    """Says at the end where the run is, how far it came, and how to go on if it is not over."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Of a run that ended in order, or that a callback has stopped."""
        done, wanted = trainer.current_epoch, trainer.max_epochs
        undeclared: Any = trainer
        reasons = [getattr(callback, "ended", None) for callback in undeclared.callbacks]
        self._say(trainer, "all" if done == wanted else f"{done} of {wanted}", next(filter(None, reasons), None))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Of a run that was interrupted."""
        if isinstance(exception, KeyboardInterrupt):
            self._say(trainer, f"{trainer.current_epoch} of {trainer.max_epochs}")

    @rank_zero_only
    def _say(self, trainer: Trainer, iterations: str, ended: str | None = None) -> None:
        folder = trainer.default_root_dir
        name = folder.removeprefix("runs/")
        more = "" if iterations == "all" else f"; go on with --run {name} --ckpt_path=last"
        more = f"; it is over: {ended}" if ended else more
        print(f"{folder}: {iterations} iterations{more}")
