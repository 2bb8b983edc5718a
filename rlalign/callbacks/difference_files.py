"""Lightning's way to files, for checkpoints that hold only what changed."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from rlalign.differences import KEY, difference, read_checkpoint


class DifferenceCheckpointIO(TorchCheckpointIO):
    """Writes a difference where it is told a base, and reads either kind.

    Attributes:
        base: The file of a whole checkpoint that the next one to be written is to stand on; ``None`` for a whole one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base: Path | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint, or what changed since the base."""
        written = checkpoint if self.base is None else difference(checkpoint, self.base)
        super().save_checkpoint(written, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; the base of a difference is read from beside it."""
        found: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return read_checkpoint(Path(path)) if KEY in found else found


def install(strategy: Any) -> None:
    """Let a strategy read and write differences, unless it has files of its own kind."""
    current: CheckpointIO = strategy.checkpoint_io
    if type(current) is TorchCheckpointIO:
        strategy.checkpoint_io = DifferenceCheckpointIO()
