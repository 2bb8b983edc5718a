"""Which folder a command works in, and which checkpoint it goes on from."""

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rlalign.checkpoints import LAST, is_whole, newest_whole
from rlalign.differences import base_of
from rlalign.run_folder import CHECKPOINTS, is_used

RUNS = Path("runs")
RUN_VARIABLE = "RLALIGN_RUN"
"""Tells the processes that a strategy launches which run they belong to."""


def is_launched() -> bool:
    """Whether this process is another rank than the first."""
    return getattr(rank_zero_only, "rank", 0) != 0


def choose_folder(options: Any) -> Path:
    """The folder of the run: named, that of the checkpoint it goes on from, or new by configuration and date.

    Raises:
        ValueError: If there is no way to tell which run.
    """
    checkpoint = options.ckpt_path
    if options.trainer.default_root_dir is not None:
        raise ValueError("trainer.default_root_dir is the folder of the run; choose it by --run NAME.")
    if options.run is not None:
        if options.run.strip() in ("", ".", ".."):
            raise ValueError(f"--run={options.run!r} is no name; give one, as in --run first, or a path with a slash.")
        folder = Path(options.run) if "/" in options.run else RUNS / options.run
    elif is_launched() and (inherited := os.environ.get(RUN_VARIABLE)):
        return Path(inherited)
    elif checkpoint not in (None, "last", "auto") and Path(checkpoint).parent.name == CHECKPOINTS:
        folder = Path(checkpoint).parent.parent
    elif checkpoint == "auto":
        raise ValueError("--ckpt_path=auto goes on in the folder of a run, or begins it: give --run NAME.")
    elif checkpoint == "last":
        known = sorted(path.parent.name for path in RUNS.glob(f"*/{CHECKPOINTS}"))
        raise ValueError(
            f"--ckpt_path=last of which run? Give --run NAME; in runs/ there are: {', '.join(known) or 'none'}."
        )
    elif int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1) > 1:
        raise ValueError("Processes that were launched together need a name for their run: give --run NAME.")
    else:
        configs = [Path(str(path)).stem for path in options.config or []]
        # Two runs may start within a second: agents of a sweep do, and theirs have names.
        own = os.environ.get("WANDB_RUN_ID") or f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        folder = RUNS / f"{configs[-1] if configs else 'run'}-{own}"
    os.environ[RUN_VARIABLE] = str(folder)
    return folder


def refuse_other_run(folder: Path, checkpoint: str | None) -> None:
    """Check that a run does not write over another one.

    Raises:
        FileExistsError: If the folder holds a run, and it is not its checkpoint to go on from.
    """
    if not is_used(folder):
        return
    if checkpoint is None:
        raise FileExistsError(f"{folder} holds a run: continue it with --ckpt_path=last, or choose another --run NAME.")
    if checkpoint != "last" and not Path(checkpoint).resolve().is_relative_to(folder.resolve()):
        raise FileExistsError(
            f"{folder} holds another run than that of --ckpt_path={checkpoint}: leave --run out to go on in the "
            "checkpoint's own folder, or choose another --run NAME."
        )


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
    if (base := base_of(path)) is not None and not (path.parent / base).is_file():
        raise FileNotFoundError(
            f"--ckpt_path={wanted}: {path} holds what changed since {base}, which is not beside it: put it back."
        )
    if not is_whole(path):
        raise ValueError(f"--ckpt_path={wanted}: {path} is damaged; --ckpt_path=last takes the newest that is whole.")
    return path
