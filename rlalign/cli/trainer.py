"""The commands that need a trainer: fit, validate, test, predict."""

import json
import os
import signal
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import rlalign.cli.classes  # noqa: F401  lets configs name classes without their path
from rlalign.algorithms.base import PolicyModule
from rlalign.callbacks.checkpoint import IterationCheckpoint
from rlalign.callbacks.progress import IterationProgress
from rlalign.checkpoints import LAST, is_whole, newest_whole
from rlalign.cli.errors import Parser, sentences
from rlalign.run_folder import CHECKPOINTS, CONFIG, RunLogger, is_used, write_atomically

RUNS = Path("runs")
RUN_VARIABLE = "RLALIGN_RUN"
"""Tells the processes that a strategy launches which run they belong to."""


class SaveConfig(SaveConfigCallback):
    """Writes the whole configuration, defaults included, to ``config.yaml`` of the run."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write it."""
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = self.parser.dump(self.config, skip_none=False)
        write_atomically(folder / CONFIG, text)
        for logger in trainer.loggers:
            logger.log_hyperparams(yaml.safe_load(text))


class ExitOnSigterm(Callback):
    """On SIGTERM, abandon the running iteration at once; the newest checkpoint is where to go on."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the place of Lightning's handler, which would wait for the end of a minibatch."""
        self.trainer = trainer
        signal.signal(signal.SIGTERM, self.exit)

    def exit(self, signum: int, frame: FrameType | None) -> NoReturn:
        """End this process, and those that it has launched, with status 143."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        launcher = self.trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        if self.trainer.world_size > 1:
            os._exit(128 + signum)  # an orderly end would wait for ranks that have ended, too
        raise SystemExit(128 + signum)


class TrainerCLI(LightningCLI):
    """LightningCLI with a folder a run, in which the configuration decides and never a checkpoint's copy of it."""

    writes = True
    """Whether fit leaves something in the folder."""

    def __init__(self, args: Sequence[str]) -> None:
        options = {"allow_abbrev": False}
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        super().__init__(
            PolicyModule,
            LightningDataModule,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults={"enable_model_summary": False, "num_sanity_val_steps": 0},
            seed_everything_default=0,
            parser_kwargs={
                **options,
                **{name: {**options, "usage": f"rlalign {name} [options]"} for name in self.subcommands()},
            },
            parser_class=Parser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=list(args),
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add what is ours."""
        parser.add_argument("--run", type=str | None, default=None, help="Name of the run: its folder is runs/NAME.")
        parser.set_defaults({"data": {"class_path": "RolloutDataModule"}})

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse what was given; Lightning would warn that a program that gives arguments has some of its own."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Lightning would let the checkpoint's hyperparameters overrule files and flags."""

    @property
    def options(self) -> Any:
        """The configuration of the command."""
        return self.config[str(self.subcommand)]

    def before_instantiate_classes(self) -> None:
        """Settle the folder and the checkpoint, before anything costs time."""
        self.folder = choose_folder(self.options, starts_run=self.subcommand == "fit" and self.writes)
        for logger in logger_configs(self.options.trainer.logger):
            if "save_dir" in logger.get("init_args", {}) and logger.init_args.save_dir in (None, "."):
                logger.init_args.save_dir = str(self.folder)
        if self.options.weights_only is None:
            self.options.weights_only = True  # a checkpoint of ours is tensors and plain values: nothing in it may run
        if self.options.ckpt_path is not None:
            self.options.ckpt_path = str(choose_checkpoint(self.options.ckpt_path, self.folder))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Point everything that writes at the folder, and add what no run should be without."""
        given = self._get(self.config_init, "trainer")
        callbacks = given.callbacks if isinstance(given.callbacks, list) else [c for c in [given.callbacks] if c]
        fits = self.subcommand == "fit"
        if fits and given.enable_checkpointing is not False and not has(callbacks, IterationCheckpoint):
            callbacks.append(IterationCheckpoint())
        if given.enable_progress_bar is False:
            callbacks[:] = [c for c in callbacks if not isinstance(c, IterationProgress)]
        elif not has(callbacks, IterationProgress):
            callbacks.append(IterationProgress())
        if fits:
            callbacks.append(ExitOnSigterm())
        kwargs |= {"default_root_dir": str(self.folder), "callbacks": callbacks, "logger": self._loggers(given.logger)}
        if not fits:
            kwargs["enable_checkpointing"] = False
            callbacks[:] = [c for c in callbacks if not isinstance(c, IterationCheckpoint)]
            self.save_config_callback = None
        return super().instantiate_trainer(**kwargs)

    def _loggers(self, given: Any) -> list[Any] | bool:
        """The CSV file, always, when training; and what the configuration asks for."""
        loggers = given if isinstance(given, list) else [given] if given not in (None, True, False) else []
        if self.subcommand == "fit" and not has(loggers, RunLogger):
            loggers = [RunLogger(self.folder), *loggers]
        return loggers or False

    def predict(self, **kwargs: Any) -> None:
        """Write the responses to ``predictions.jsonl``."""
        batches: list[Any] = self.trainer.predict(**kwargs) or []
        write_predictions(self.folder / "predictions.jsonl", [r for batch in batches for r in batch])


def logger_configs(given: Any) -> list[Any]:
    """The loggers of a configuration that are given by class."""
    return [each for each in (given if isinstance(given, list) else [given]) if hasattr(each, "class_path")]


def has(objects: list[Any], kind: type) -> bool:
    """Whether one of the objects is of this kind."""
    return any(isinstance(each, kind) for each in objects)


def choose_folder(options: Any, starts_run: bool) -> Path:
    """The folder of the run: named, that of the checkpoint it goes on from, or new by configuration and date.

    Raises:
        FileExistsError: If a run is to start in a folder that has one already.
        ValueError: If there is no way to tell which run.
    """
    checkpoint = options.ckpt_path
    is_launched = getattr(rank_zero_only, "rank", 0) != 0
    if options.trainer.default_root_dir is not None:
        raise ValueError("trainer.default_root_dir is the folder of the run; choose it by --run NAME.")
    if options.run is not None:
        folder = Path(options.run) if "/" in options.run else RUNS / options.run
    elif is_launched and (inherited := os.environ.get(RUN_VARIABLE)):
        return Path(inherited)
    elif checkpoint is not None and checkpoint != "last" and Path(checkpoint).parent.name == CHECKPOINTS:
        folder = Path(checkpoint).parent.parent
    elif checkpoint == "last":
        known = sorted(path.parent.name for path in RUNS.glob(f"*/{CHECKPOINTS}"))
        raise ValueError(
            f"--ckpt_path=last of which run? Give --run NAME; in runs/ there are: {', '.join(known) or 'none'}."
        )
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("Processes that were launched together need a name for their run: give --run NAME.")
    else:
        configs = [Path(str(path)).stem for path in options.config or []]
        # Two runs may start within a second: agents of a sweep do, and theirs have names.
        own = os.environ.get("WANDB_RUN_ID") or f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        folder = RUNS / f"{configs[-1] if configs else 'run'}-{own}"
    if starts_run and checkpoint is None and not is_launched and is_used(folder):
        raise FileExistsError(f"{folder} holds a run: continue it with --ckpt_path=last, or choose another --run NAME.")
    os.environ[RUN_VARIABLE] = str(folder)
    return folder


def choose_checkpoint(wanted: str, folder: Path) -> Path | str:
    """The checkpoint to load.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged.
    """
    path = folder / CHECKPOINTS / LAST if wanted == "last" else Path(wanted)
    if path.name == LAST and path.parent.is_dir():
        found = newest_whole(path.parent)
        if found is not None:
            return found
    if not path.exists():
        raise FileNotFoundError(
            f"--ckpt_path={wanted}: there is no checkpoint {path}. To start from the beginning, leave --ckpt_path out "
            "and use a new --run NAME."
        )
    if not is_whole(path):
        raise ValueError(f"--ckpt_path={wanted}: {path} is damaged; --ckpt_path=last takes the newest that is whole.")
    return path


def write_predictions(path: Path, rollouts: Sequence[Any]) -> None:
    """A line of JSON a response."""
    fields = ("prompt_index", "sample_index", "text", "reward", "correct", "truncated", "components")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({name: getattr(r, name) for name in fields}, ensure_ascii=False) for r in rollouts)
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    print(f"{len(rollouts)} responses in {path}")


def main(argv: Sequence[str]) -> int:
    """Run one of the trainer's commands."""
    with sentences():
        TrainerCLI(argv)
    return 0
