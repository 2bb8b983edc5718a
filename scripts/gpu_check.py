#!/usr/bin/env python3
"""What a GPU does with rlalign, in less than eight minutes and without a network.

usage: gpu_check.py [--device cuda|cpu] [--small | --tiny] [--limit 480] [SECTION ...]

Checks of what has to agree, steps of GRPO with their speed and memory (also of TRL, where it is installed), sampling
against ``generate`` of transformers, and a learning run. The model is a random one with the sizes of Qwen2-0.5B, and
the embedded one where something is to be learned, so that nothing is downloaded. Each section runs in a process of its
own, which is ended when its time is up; what fails is a row that says so, and the rest still runs. The most important
come first. Rows are printed as they come and once more as a table at the end; the exit status is 1 where a check or a
section failed. With ``--small`` or ``--tiny`` it runs on a CPU.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHILD = ROOT / "scripts" / "bench" / "on_device.py"
NEEDED = (
    "torch",
    "lightning",
    "transformers",
    "peft",
    "torchmetrics",
    "jsonargparse",
    "datasets",
    "matplotlib",
    "rich",
)


@dataclass(frozen=True)
class Section:
    """A part of the check."""

    title: str
    seconds: float
    """After which it is ended."""


SECTIONS = {
    "machine": Section("machine", 60),
    "model": Section("model", 60),
    "correctness": Section("correct", 90),
    "step": Section("GRPO step", 90),
    "sampling": Section("sampling", 90),
    "trl": Section("TRL step", 100),
    "learning": Section("learning", 120),
    "lora": Section("LoRA step", 60),
    "whole_rows": Section("whole rows", 60),
    "checkpointing": Section("checkpointed", 60),
}
"""In the order of importance; ``machine`` and ``model`` are always run."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    section: str
    what: str
    value: str

    @property
    def failed(self) -> bool:
        """Whether it says that something is wrong."""
        return self.value.startswith("failed")

    def __str__(self) -> str:
        return f"{self.section:<13} {self.what:<44} {self.value}"


def run(name: str, arguments: list[str], seconds: float) -> list[Row]:
    """The rows of a section, printed as they come.

    Args:
        name: Of the section.
        arguments: Of the process that runs it.
        seconds: After which it is ended.
    """
    title = SECTIONS[name].title
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    rows: list[Row] = []
    is_late = threading.Event()

    def add(what: str, value: str) -> None:
        rows.append(Row(title, what, value))
        print(rows[-1], flush=True)

    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, str(CHILD), name, *arguments]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )

        def end() -> None:
            is_late.set()
            os.killpg(process.pid, signal.SIGKILL)  # it is not yet waited for, so that the number is still its own

        timer = threading.Timer(seconds, end)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            mark, _, rest = line.rstrip("\n").partition("\t")
            if mark == "row":
                add(*rest.split("\t", 1))
        timer.cancel()
        status = process.wait()
        if is_late.is_set():
            add("", f"failed: not done after {seconds:.0f} s")
        elif status:
            errors.seek(0)
            said = [line.strip() for line in errors if line.strip()]
            add("", f"failed: {said[-1][:160] if said else f'status {status}'}")
    return rows


def check(device: str, size: str, limit: float, chosen: list[str]) -> list[Row]:
    """All rows.

    Args:
        device: ``cuda`` or ``cpu``.
        size: ``full``, ``small`` or ``tiny``.
        limit: Seconds that all of it may take.
        chosen: Sections, besides ``machine`` and ``model``.
    """
    began = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, section in SECTIONS.items():
            if name not in ("machine", "model", *chosen):
                continue
            left = limit - (time.monotonic() - began)
            if left < 1:
                rows.append(Row(section.title, "", f"left out: the {limit:g} s are over"))
                print(rows[-1], flush=True)
                continue
            started = time.monotonic()
            rows += run(name, [device, size, folder], min(section.seconds, left))
            print(f"{section.title:<13} ({time.monotonic() - started:.0f} s)", flush=True)
    return rows


def versions() -> list[Row]:
    """Of what is installed.

    Raises:
        SystemExit: If something is missing that nothing runs without; the message names all of it.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"gpu_check: not installed: {', '.join(missing)}. `pip install -e .` in {ROOT} brings them.")
    from importlib.metadata import version

    shown = ("torch", "lightning", "transformers", "peft")
    text = ", ".join(f"{name} {version(name)}" for name in shown)
    return [Row("machine", "versions", f"{text}, Python {sys.version.split()[0]}")]


def main() -> int:
    """Run it, and print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"Those of {', '.join(SECTIONS)}; all by default."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", action="store_true", help="A model of 4 layers, 32 responses of 32 tokens.")
    sizes.add_argument("--tiny", action="store_true", help="Only to see whether it runs.")
    parser.add_argument("--limit", type=float, default=480, help="Seconds that all of it may take.")
    options = parser.parse_args()
    if unknown := set(options.sections) - SECTIONS.keys():
        parser.error(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}.")
    size = "tiny" if options.tiny else "small" if options.small else "full"
    rows = versions()
    print(rows[0], flush=True)
    rows += check(options.device, size, options.limit, options.sections or list(SECTIONS))
    print(f"\ngpu_check: {options.device}, {size}\n" + "\n".join(map(str, rows)))
    failures = sum(row.failed for row in rows)
    print(f"gpu_check: {failures} failed of {len(rows)} rows")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
