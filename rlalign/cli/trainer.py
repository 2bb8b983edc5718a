"""The commands that need a trainer: fit, validate, test, predict."""

import difflib
import os
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import yaml
from jsonargparse import SUPPRESS
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

import rlalign.cli.classes  # noqa: F401  lets configs name classes without their path
from rlalign.algorithms.base import PolicyModule, RolloutModule
from rlalign.algorithms.module import TrainedModule
from rlalign.callbacks.band import Band
from rlalign.callbacks.checkpoint import IterationCheckpoint
from rlalign.callbacks.profile import Profile
from rlalign.callbacks.progress import IterationProgress
from rlalign.callbacks.whole_iterations import refuse_partial_iterations
from rlalign.checkpoints import iterations_of, newest_whole
from rlalign.cli.errors import Parser, sentences
from rlalign.cli.folders import choose_checkpoint, choose_folder, is_launched, refuse_other_run
from rlalign.cli.output import Farewell, be_quiet, changes
from rlalign.cli.predictions import CheckPick, Pick, write_predictions
from rlalign.rollouts.ranks import gather_objects
from rlalign.run_folder import CHECKPOINTS, CONFIG, RunLogger, claim, make_folder, release, write_atomically


class SaveConfig(SaveConfigCallback):
    """Writes the whole configuration, defaults included, to ``config.yaml`` of the run."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write it."""
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = self.parser.dump(reusable(self.config, folder), skip_unset=False)
        if (folder / CONFIG).exists():
            for line in changes(yaml.safe_load((folder / CONFIG).read_text()), yaml.safe_load(text)):
                print(f"changed since the run began: {line}")
        write_atomically(folder / CONFIG, text)
        for logger in trainer.loggers:
            logger.log_hyperparams(yaml.safe_load(text))


def reusable(config: Any, folder: Path) -> Any:
    """A configuration without what is of one run only: name, checkpoint it went on from, whether profiled, folder."""
    config = config.clone()
    for name in ("run", "ckpt_path", "profile"):
        config.pop(name, None)
    for logger in logger_configs(config.trainer.logger):
        if logger.get("init_args", {}).get("save_dir") == str(folder):
            logger.init_args.save_dir = "."
    return config


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
    may_go_on = False
    """Whether what the folder holds is this run, begun before (``--ckpt_path=auto``)."""
    lock: IO[str] | None = None
    """Held while this process trains in the folder."""

    def __init__(self, args: Sequence[str]) -> None:
        options = {"allow_abbrev": False}
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        be_quiet()
        refuse_missing_configs(args)
        try:
            self._run(args, options)
        finally:
            if self.lock is not None:
                release(self.folder, self.lock)

    def _run(self, args: Sequence[str], options: dict[str, Any]) -> None:
        """Parse, build, and run the command: LightningCLI does all of it when it is made."""
        super().__init__(
            TrainedModule,
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

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
        """Add what is of one command only."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            text = "Write a trace of an iteration and a page on where the time goes into the run's folder."
            parser.add_argument("--profile", action="store_true", default=SUPPRESS, help=text)  # of no other command
        if subcommand == "predict":
            text = "What is written: all responses, or one a prompt, by the ranker (best) or by majority."
            parser.add_argument("--pick", type=Pick, default="all", help=text)
        return parser

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
        self.folder = choose_folder(self.options)
        if self.options.ckpt_path == "auto":
            self.may_go_on = True
            found = newest_whole(self.folder / CHECKPOINTS) if self.folder.is_dir() else None
            self.options.ckpt_path = None if found is None else "last"
        for logger in logger_configs(self.options.trainer.logger):
            if "save_dir" in logger.get("init_args", {}) and logger.init_args.save_dir in (None, "."):
                logger.init_args.save_dir = str(self.folder)
        if self.options.weights_only is None:
            self.options.weights_only = True  # a checkpoint of ours is tensors and plain values: nothing in it may run
        trains = self.subcommand == "fit" and self.writes and not is_launched()
        if trains and (self.options.ckpt_path is None or self.folder.is_dir()):
            self._claim()
        if self.options.ckpt_path is not None:
            self.options.ckpt_path = str(choose_checkpoint(self.options.ckpt_path, self.folder))
            done, wanted = iterations_of(Path(self.options.ckpt_path)) or 0, self.options.trainer.max_epochs
            if trains and wanted is not None and 0 <= wanted < done:
                raise ValueError(
                    f"The checkpoint is of a run after {done} iterations, and trainer.max_epochs is {wanted}: raise it "
                    "to go on."
                )
        if trains and self.lock is None:
            self._claim()
        if self.subcommand == "predict" and not is_launched():
            make_folder(self.folder)

    def _claim(self) -> None:
        self.lock = claim(self.folder)
        refuse_other_run(self.folder, "last" if self.may_go_on else self.options.ckpt_path)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Point everything that writes at the folder, and add what no run should be without."""
        given = self._get(self.config_init, "trainer")
        callbacks = given.callbacks if isinstance(given.callbacks, list) else [c for c in [given.callbacks] if c]
        callbacks = last_of_each(callbacks)
        fits = self.subcommand == "fit"
        if fits and given.enable_checkpointing is not False and not has(callbacks, IterationCheckpoint):
            callbacks.append(IterationCheckpoint())
        if given.enable_progress_bar is False:
            callbacks[:] = [c for c in callbacks if not isinstance(c, IterationProgress)]
        elif not has(callbacks, IterationProgress):
            callbacks.append(IterationProgress())
        if fits and self.options.get("profile") and not has(callbacks, Profile):
            callbacks.append(Profile())
        if fits:
            callbacks += [ExitOnSigterm(), Farewell()]
        kwargs |= {"default_root_dir": str(self.folder), "callbacks": callbacks, "logger": self._loggers(given.logger)}
        if not fits:
            kwargs["enable_checkpointing"] = False
            callbacks[:] = [c for c in callbacks if not isinstance(c, Checkpoint)]
            self.save_config_callback = None
        trainer = super().instantiate_trainer(**kwargs)
        if fits:
            refuse_partial_iterations(trainer)
        return trainer

    def _loggers(self, given: Any) -> list[Any] | bool:
        """The CSV file, always, when training; and what the configuration asks for."""
        loggers = given if isinstance(given, list) else [given] if given not in (None, True, False) else []
        if self.subcommand == "fit" and not has(loggers, RunLogger):
            loggers = [RunLogger(self.folder), *loggers]
        return loggers or False

    def predict(self, **kwargs: Any) -> None:
        """Write the responses, those of all ranks, or those picked among them.

        Raises:
            ValueError: If the algorithm samples none.
        """
        if not isinstance(self.model, RolloutModule):
            place = "model.policy.model" if isinstance(self.model, PolicyModule) else "the model of data.ranker"
            raise ValueError(
                f"predict writes sampled responses, and {type(self.model).__name__} samples none: rlalign export its "
                f"checkpoint, and predict with the configuration of a method that does and the folder as {place}."
            )
        pick = self.options.pick
        self.trainer.callbacks.append(CheckPick(pick))  # type: ignore[attr-defined]
        batches: list[Any] = self.trainer.predict(**kwargs) or []
        rollouts = gather_rollouts(self.trainer, [r for batch in batches for r in batch])
        if self.trainer.is_global_zero:
            write_predictions(self.folder, rollouts, pick, self.datamodule.rewards.answers)


def refuse_missing_configs(args: Sequence[str]) -> None:
    """Check that the files given by ``--config`` are there.

    Raises:
        FileNotFoundError: If one is not; the message names the nearest in ``configs``.
    """
    given = [b for a, b in pairwise(args) if a in ("--config", "-c")]
    given += [a.removeprefix("--config=") for a in args if a.startswith("--config=")]
    for name in given:
        if not Path(name).is_file():
            known = [str(path) for path in Path("configs").rglob("*.yaml")]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            raise FileNotFoundError(f"--config: there is no file {name}{f'; did you mean {near[0]}?' if near else '.'}")


def logger_configs(given: Any) -> list[Any]:
    """The loggers of a configuration that are given by class."""
    return [each for each in (given if isinstance(given, list) else [given]) if hasattr(each, "class_path")]


def has(objects: list[Any], kind: type) -> bool:
    """Whether one of the objects is of this kind."""
    return any(isinstance(each, kind) for each in objects)


def last_of_each(callbacks: Sequence[Any]) -> list[Any]:
    """The callbacks, without those that are given again later, so that an option of an earlier file can be changed.

    Those of one class are the same, but for what they monitor, and but for checkpoints of Lightning's own kind.
    """
    of_name: dict[Any, Any] = {}
    for callback in callbacks:
        name = type(callback), getattr(callback, "monitor", None) if isinstance(callback, Band) else None
        if type(callback) is ModelCheckpoint:
            name = type(callback), id(callback)
        if name in of_name:
            print(f"trainer.callbacks: the {type(callback).__name__} that is given last takes the place of the other")
            del of_name[name]
        of_name[name] = callback
    return list(of_name.values())


def gather_rollouts(trainer: Trainer, rollouts: list[Any]) -> list[Any]:
    """The rollouts of all ranks, once each, in the order of prompts and samples.

    Raises:
        RuntimeError: If the other ranks have ended already, and theirs are lost.
    """
    parts = gather_objects(rollouts)
    if len(parts) < trainer.world_size:
        raise RuntimeError("predict needs processes that last: use trainer.strategy=ddp, or trainer.devices=1.")
    # Ranks that hold parts of one layer have the same ones.
    found = {(r.prompt_index, r.sample_index): r for part in parts for r in part}
    return [found[key] for key in sorted(found)]


def main(argv: Sequence[str]) -> int:
    """Run one of the trainer's commands."""
    with sentences():
        TrainerCLI(argv)
    return 0
