"""Where the time of a run goes: a trace of an iteration and a page of figures."""

from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlalign.callbacks.coefficients import fresh_metrics
from rlalign.callbacks.performance import Performance
from rlalign.callbacks.phases import VALIDATION, Clock, timed
from rlalign.callbacks.profile_facts import Facts, facts_of
from rlalign.callbacks.profile_page import page
from rlalign.callbacks.traced import Operators, Trace
from rlalign.callbacks.whole_iterations import iteration_is_over
from rlalign.rollouts.ranks import data_module, say
from rlalign.run_folder import write_atomically

TRACE, PAGE = "trace.json.gz", "profile.md"


class Profile(Callback):
    """Times the phases of some iterations, then traces one, and writes a trace and a page into the run's folder.

    ``profile.md`` tells the share of each phase (prompts, decode steps, rewards, scoring, forward, backward, optimizer,
    validation, ...), the operators that take the most in each, speed, memory and padding, and what that suggests.
    ``trace.json.gz`` is for https://ui.perfetto.dev. Timed and traced iterations are not the same, since tracing takes
    time itself. Rank 0 tells of itself; what the run computes does not change.

    Args:
        skip: Iterations of this run before those that are timed: the first ones allocate and compile.
        iterations: Iterations that are timed; one more is traced.
        decode_steps: Of the traced iteration's decode steps, the first so many are in the trace: it stays small.

    Raises:
        ValueError: If a number is too small; at the start, if the trainer has torch's profiler already.
    """

    def __init__(self, skip: int = 1, iterations: int = 1, decode_steps: int = 64) -> None:
        for name, value, least in (("skip", skip, 0), ("iterations", iterations, 1), ("decode_steps", decode_steps, 1)):
            if value < least:
                raise ValueError(f"Profile: {name} must be at least {least}, got {value}.")
        self.skip, self.iterations, self.decode_steps = skip, iterations, decode_steps
        self._performance = Performance()
        self._forget()

    def _forget(self) -> None:
        self._undo = ExitStack()
        self._clock: Clock | None = None
        self._trace: Trace | None = None
        self._figures: list[dict[str, float]] = []
        self._lengths: list[list[int]] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._calls: Counter[str] = Counter()
        self._is_told = self._has_warned = False

    # ---- iterations --------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure what the device can do.

        Raises:
            ValueError: If something else uses torch's profiler, of which there is one.
        """
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            raise ValueError("trainer.profiler=pytorch and Profile both need torch's profiler: leave one of them out.")
        self._performance.on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the first iteration of this run, and say so if it is known to be too short."""
        self._forget()
        self._first = trainer.current_epoch
        ends = trainer.max_epochs
        if ends is not None and 0 <= ends < self._first + self._needed:
            self._warn_too_short(ends - self._first)

    @property
    def _needed(self) -> int:
        return self.skip + self.iterations + 1

    def _warn_too_short(self, count: int) -> None:
        if not self._has_warned:
            what = f"only the phases are in {PAGE}, and there is no trace" if self._figures else "nothing is written"
            rank_zero_warn(
                f"Profile: this run has {count} whole iterations and {self._needed} are needed ({self.skip} to skip, "
                f"{self.iterations} to time, 1 to trace): {what}. Raise trainer.max_epochs, or lower Profile's skip."
            )
        self._has_warned = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End what was recorded of the iteration before, and begin with this one if it is its turn."""
        self._end(trainer, pl_module)
        number = trainer.current_epoch - self._first - self.skip
        if 0 <= number < self.iterations:
            self._performance.on_train_epoch_start(trainer, pl_module)
            if trainer.is_global_zero:
                self._clock = Clock(pl_module.device)
                self._undo = timed(trainer, pl_module, self._clock)
        elif number == self.iterations and trainer.is_global_zero:
            self._trace = Trace(pl_module.device, self.decode_steps)
            self._clock = Clock(pl_module.device, self._trace.begins)
            self._undo = timed(trainer, pl_module, self._clock)
            self._trace.start()

    def _times(self, trainer: Trainer) -> bool:
        return 0 <= trainer.current_epoch - self._first - self.skip < self.iterations

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count tokens and padding."""
        if self._times(trainer):
            self._performance.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What comes is validation."""
        self._performance.on_validation_start(trainer, pl_module)
        if self._clock is not None:
            self._clock.enter(VALIDATION)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """It is over."""
        self._performance.on_validation_end(trainer, pl_module)
        if self._clock is not None:
            self._clock.leave()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the figures of a timed iteration: on every rank, since metrics are looked up together."""
        if not iteration_is_over(trainer):  # it was stopped
            self._drop()
        elif self._times(trainer):
            measured = {f"perf/{k}": v for k, v in self._performance.measured(trainer, pl_module).items()}
            self._figures.append(fresh_metrics(trainer) | measured)
            rollouts = getattr(data_module(trainer), "last_rollouts", ())
            self._lengths.append([len(rollout.token_ids) for rollout in rollouts])

    def _end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Of a timed iteration, add up its phases; of the traced one, write everything."""
        if self._clock is None:
            return
        self._clock.count()
        self._undo.close()
        clock, self._clock = self._clock, None
        if self._trace is None:
            for name, seconds in clock.seconds.items():
                self._seconds[name] += seconds
            self._calls += clock.calls
            return
        trace, self._trace = self._trace, None
        trace.stop()
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        trace.write(folder / TRACE)
        self._write(trainer, pl_module, trace.operators())

    # ---- the page ----------------------------------------------------------------------------------------------------

    def _write(self, trainer: Trainer, pl_module: LightningModule, operators: dict[str, Operators]) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        facts = self._facts(trainer, pl_module, operators)
        write_atomically(folder / PAGE, page(facts, folder.name))
        self._is_told = True
        say(f"profile: {folder / PAGE}" + (f", and {folder / TRACE} for https://ui.perfetto.dev" if operators else ""))

    def _facts(self, trainer: Trainer, pl_module: LightningModule, operators: dict[str, Operators]) -> Facts:
        count = len(self._figures)
        figures = {name: fmean(each.get(name, 0.0) for each in self._figures) for name in self._figures[0]}
        return facts_of(
            trainer,
            pl_module,
            iterations=[self._first + self.skip + number for number in range(count)],
            seconds={name: value / count for name, value in self._seconds.items()},
            calls={name: value / count for name, value in self._calls.items()},
            lengths=[length for lengths in self._lengths for length in lengths],
            figures=figures,
            operators=operators,
            peak=self._performance.peak or 0.0,
        )

    # ---- ends --------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last iteration may be the traced one; where the run was too short, say what is missing."""
        self._end(trainer, pl_module)
        if not self._is_told and trainer.is_global_zero:
            self._warn_too_short(trainer.current_epoch - self._first)
            if self._figures:
                self._write(trainer, pl_module, {})

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of everything."""
        self._drop()
        if not self._is_told:
            rank_zero_warn("Profile: the run was interrupted before its iterations were recorded: nothing is written.")

    def _drop(self) -> None:
        """Leave out the iteration that goes on."""
        self._undo.close()
        self._clock = None
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
