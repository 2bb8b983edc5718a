"""What the profiler of torch saw of an iteration: operators, by the phase that they ran in."""

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rlalign.callbacks.phases import DECODE, PREFIX


@dataclass
class Operators:
    """Of one phase."""

    seconds: float = 0.0
    """That the phase took while it was traced."""
    ranges: int = 0
    """Times that it was traced."""
    self_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of each operator, without those that it calls; on a GPU, of its kernels."""
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def busy(self) -> float:
        """Share of the phase that operators take; on a GPU, kernels."""
        return sum(self.self_seconds.values()) / self.seconds if self.seconds else 0.0

    def top(self, count: int) -> list[str]:
        """The operators that take the most, the first first."""
        return sorted(self.self_seconds, key=lambda name: -self.self_seconds[name])[:count]


class Trace:
    """Traces an iteration, of its decode steps the first ones only, so that the file stays small.

    Args:
        device: That computes.
        decode_steps: How many of the iteration's decode steps are traced.
    """

    def __init__(self, device: torch.device, decode_steps: int) -> None:
        self.device, self.decode_steps = device, decode_steps
        self.activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self.profiler = profile(activities=self.activities)
        self._collects = True

    def start(self) -> None:
        """Begin."""
        self.profiler.start()

    def begins(self, phase: str, number: int) -> None:
        """Collect what comes, or not; told when a phase begins."""
        wanted = phase != DECODE or number <= self.decode_steps
        if wanted != self._collects:
            self.profiler.toggle_collection_dynamic(wanted, self.activities)
            self._collects = wanted

    def stop(self) -> None:
        """End."""
        self.profiler.stop()

    def write(self, path: Path) -> None:
        """Write what Perfetto and Chrome open, in one step."""
        partial = path.with_name(f".partial.{path.name}")
        self.profiler.export_chrome_trace(str(partial))
        os.replace(partial, path)

    def operators(self) -> dict[str, Operators]:
        """What was traced, by phase."""
        return by_phase(self.profiler.events() or (), on_gpu=self.device.type == "cuda")


def by_phase(events: Iterable[Any], on_gpu: bool) -> dict[str, Operators]:
    """Operators by the innermost phase that goes on when they begin, in whatever thread: a backward pass has its own.

    Args:
        events: Of the profiler; phases are those whose name begins with :data:`~rlalign.callbacks.phases.PREFIX`.
        on_gpu: Count the time of kernels.
    """
    found: dict[str, Operators] = defaultdict(Operators)
    on_cpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    goes_on: list[Any] = []
    for event in sorted(on_cpu, key=lambda event: (event.time_range.start, -event.time_range.end)):
        while goes_on and goes_on[-1].time_range.end <= event.time_range.start:
            goes_on.pop()
        if event.name.startswith(PREFIX):
            length = event.time_range.elapsed_us() / 1e6
            if goes_on:
                found[_phase(goes_on[-1])].seconds -= length
            found[_phase(event)].seconds += length
            found[_phase(event)].ranges += 1
            goes_on.append(event)
        elif goes_on:
            of_phase = found[_phase(goes_on[-1])]
            spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            of_phase.self_seconds[event.name] += spent / 1e6
            of_phase.calls[event.name] += 1
    return dict(found)


def _phase(event: Any) -> str:
    return str(event.name).removeprefix(PREFIX)
