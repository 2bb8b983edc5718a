"""Where the time of an iteration goes: its phases, told by what the trainer, the data module and the sampler call."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.profilers import Profiler
from torch.profiler import record_function

from rlalign.callbacks.performance import wait_for
from rlalign.rollouts.ranks import data_module

WEIGHTS, PREFILL, DECODE, DRAW = "weights of the sampler", "prefill", "decode", "drawing tokens"
REWARDS, SCORE, DATA = "rewards", "scoring", "data"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
VALIDATION, CHECKPOINT, OTHER = "validation", "checkpoint", "other"

SAMPLING = (WEIGHTS, PREFILL, DECODE, DRAW)
UPDATE = (FORWARD, BACKWARD, OPTIMIZER)
PHASES = {
    WEIGHTS: "the sampler takes over the policy's weights",
    PREFILL: "sampling: prompts",
    DECODE: "sampling: a token a row, by the model",
    DRAW: "sampling: the rest, which draws the tokens and keeps the books",
    REWARDS: "decoding and scoring responses",
    SCORE: "old and reference log-probabilities, values",
    DATA: "the rest of making minibatches, and moving them to the device",
    FORWARD: "update: the loss",
    BACKWARD: "update: its gradient",
    OPTIMIZER: "update: clipping and the optimizer",
    VALIDATION: "held-out data",
    CHECKPOINT: "saving",
    OTHER: "callbacks, logging, the loop itself",
}
"""Every phase, in the order of an iteration, and what it is."""

PREFIX = "rlalign: "
"""Of the names of phases in a trace."""

_ACTIONS = {
    "train_dataloader_next": DATA,
    "batch_to_device": DATA,
    "training_step": FORWARD,
    "backward": BACKWARD,
    "optimizer_step": OPTIMIZER,
    "save_checkpoint": CHECKPOINT,
}
"""What the trainer calls its actions, after the last dot -> phase."""


class Clock:
    """Counts seconds by phase; the time of a phase within another is its own alone. What no phase has is ``other``.

    Args:
        device: Waited for where a phase begins or ends, so that each has the time of its own work.
        begins: Told the name of each phase that begins, and how many of it there were; optional.
    """

    def __init__(self, device: torch.device, begins: Callable[[str, int], None] | None = None) -> None:
        self.device, self.begins = device, begins
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._open: list[tuple[str, record_function]] = []
        wait_for(device)
        self._last = time.perf_counter()

    def enter(self, name: str) -> None:
        """A phase begins; within validation all is validation."""
        self.count()
        if self._open and self._open[-1][0] == VALIDATION:
            name = VALIDATION
        else:
            self.calls[name] += 1
            if self.begins is not None:
                self.begins(name, self.calls[name])
        record = record_function(PREFIX + name)
        record.__enter__()
        self._open.append((name, record))

    def leave(self) -> None:
        """The newest phase ends."""
        self.count()
        _, record = self._open.pop()
        record.__exit__(None, None, None)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A phase from here to there."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def count(self) -> None:
        """Add the time since this was last called to the phase that goes on."""
        wait_for(self.device)
        now = time.perf_counter()
        self.seconds[self._open[-1][0] if self._open else OTHER] += now - self._last
        self._last = now


class _Actions(Profiler):
    """Tells a clock of the trainer's actions that are a phase, and all of them to the profiler that the trainer has."""

    def __init__(self, clock: Clock, inner: Profiler) -> None:
        super().__init__()
        self.clock, self.inner = clock, inner

    def start(self, action_name: str) -> None:
        """An action begins."""
        self.inner.start(action_name)
        if (name := _ACTIONS.get(action_name.rpartition(".")[2])) is not None:
            self.clock.enter(name)

    def stop(self, action_name: str) -> None:
        """It ends."""
        if action_name.rpartition(".")[2] in _ACTIONS:
            self.clock.leave()
        self.inner.stop(action_name)


class _TimedDecoder:
    """A decoder whose prompts and steps are phases."""

    def __init__(self, decoder: Any, clock: Clock) -> None:
        self.decoder, self.clock = decoder, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def __len__(self) -> int:
        return len(self.decoder)

    def admit(self, *args: Any) -> Any:
        """Prompts."""
        with self.clock(PREFILL):
            return self.decoder.admit(*args)

    def step(self, *args: Any) -> Any:
        """A token a row."""
        with self.clock(DECODE):
            return self.decoder.step(*args)


def timed(trainer: Trainer, module: Any, clock: Clock) -> ExitStack:
    """Have a clock told of the phases, until what is returned is closed; then everything is as it was.

    Args:
        trainer: Its profiler is taken the place of, and told everything.
        module: What is trained.
        clock: It counts.
    """
    data: Any = data_module(trainer)
    sampler = getattr(data, "sampler", None)
    undo = ExitStack()
    _replace(undo, trainer, "profiler", _Actions(clock, trainer.profiler))  # type: ignore[attr-defined]
    for owner, name, phase in (
        (data, "sample", REWARDS),
        (sampler, "sync", WEIGHTS),
        (sampler, "sample", DRAW),
        (module, "prepare", SCORE),
        (module, "annotate", SCORE),
    ):
        if callable(getattr(owner, name, None)) and sampler is not None:
            _replace(undo, owner, name, _within(clock, phase, getattr(owner, name)))
    make = getattr(sampler, "_make_decoder", None)
    if make is not None:

        def make_timed(*args: Any) -> _TimedDecoder:
            with clock(WEIGHTS):
                return _TimedDecoder(make(*args), clock)

        _replace(undo, sampler, "_make_decoder", make_timed)
    return undo


def _within(clock: Clock, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with clock(phase):
            return function(*args, **kwargs)

    return run


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until it is undone."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)
