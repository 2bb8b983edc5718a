"""A file of what the policy says."""

import json
import os
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from rlalign.rollouts.ranks import data_module

COLUMNS = ("iteration", "prompt", "response", "reward", "components", "correct", "truncated", "length")


class SampleTable(Callback):
    """Writes prompts, responses and rewards to ``samples.jsonl`` in the run folder, and to the loggers that show text.

    One JSON object a row: ``iteration``, ``prompt``, ``response``, ``reward`` (null where it could not be computed),
    ``components`` (each reward by name), ``correct``, ``truncated``, ``length`` (tokens). Weights & Biases gets a
    table, TensorBoard a text. On resume, rows of iterations that are run again are cut off.

    Args:
        every: Iterations from one writing to the next.
        rows: Responses of an iteration, spread evenly over what was sampled; all, if there are not so many.

    Raises:
        ValueError: If a number is below 1.
    """

    def __init__(self, every: int = 1, rows: int = 8) -> None:
        if every < 1 or rows < 1:
            raise ValueError(f"SampleTable: every and rows must be at least 1, got {every} and {rows}.")
        self.every, self.rows = every, rows

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Cut off the rows of iterations that are to come."""
        path = self._path(trainer)
        if trainer.is_global_zero and path.exists():
            keep_rows_before(path, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write this iteration's rows."""
        if not trainer.is_global_zero or trainer.current_epoch % self.every:
            return
        data = data_module(trainer)
        sampled = data.last_rollouts
        count = min(self.rows, len(sampled))
        rows = [self._row(trainer.current_epoch, pl_module, sampled[i * len(sampled) // count]) for i in range(count)]
        if not rows:
            return
        path = self._path(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._log_table(trainer, rows)

    @staticmethod
    def _path(trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / "samples.jsonl"

    @staticmethod
    def _row(iteration: int, pl_module: LightningModule, rollout: Any) -> dict[str, Any]:
        module: Any = pl_module
        values = (
            iteration,
            module.tokenizer.decode(rollout.prompt_ids.tolist()),
            rollout.text,
            rollout.reward,
            rollout.components,
            rollout.correct,
            rollout.truncated,
            len(rollout.token_ids),
        )
        return dict(zip(COLUMNS, values, strict=True))

    @staticmethod
    def _log_table(trainer: Trainer, rows: list[dict[str, Any]]) -> None:
        cells = [[v if k != "components" else json.dumps(v) for k, v in row.items()] for row in rows]
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_text("rollout/samples", columns=list(COLUMNS), data=cells, step=trainer.global_step)
            elif isinstance(logger, TensorBoardLogger):
                text = "\n\n".join(f"```\n{json.dumps(row, ensure_ascii=False, indent=1)}\n```" for row in rows)
                logger.experiment.add_text("rollout/samples", text, trainer.global_step)


def keep_rows_before(path: Path, iteration: int) -> None:
    """Cut off the rows of this iteration and later ones, and a last row that a kill left unfinished; atomic.

    Raises:
        ValueError: If a row before the last one is no JSON object with an iteration.
    """
    with path.open("rb") as file:
        lines = list(file)
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            if json.loads(line)["iteration"] < iteration:
                kept.append(line.rstrip(b"\n") + b"\n")
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: expected a JSON object with an iteration.") from error
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(b"".join(kept))
    os.replace(partial, path)
