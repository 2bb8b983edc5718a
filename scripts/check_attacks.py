"""Grade a file of attacks on graders of code, and see what they leave behind.

    python scripts/check_attacks.py attacks.py [--tier 1|2]

The file is Python that you trust, with ``ENTRY`` (a function's name), ``PROMPT``, ``TESTS`` (pairs of arguments and
value), ``MARK`` and ``ATTACKS``: name -> (source, ``zero`` or ``one``, kind). An answer of ``one`` is honest. One that
kills everything it can (``a27``) is run in tier 1 only, one that leaves files for the next (``persist``) is run twice.

Run nothing else that uses the sandbox meanwhile: its processes would be taken for leftovers.

The last line is ``attacks P/N controls C/M leftovers L``: attacks that scored above 0 (must be 0), honest answers that
scored 1 (must be all), and processes, files and broken graders left (must be 0).
"""

import argparse
import importlib.util
import os
import site
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

from rlalign.rewards.code import CodeReward
from rlalign.rewards.code.launch import UIDS
from rlalign.rewards.code.limits import MARK

DEADLINE = 5.0
FILES = ("sitecustomize.py", "usercustomize.py", "json.py", "tests.py", "conftest.py", "rlsb_x.pth")
LINKS = ("result.json", "out.txt", "solution.py", "verdict")


def load(path: Path) -> ModuleType:
    """Import a file by its path."""
    spec = importlib.util.spec_from_file_location("attacks", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def processes(marks: tuple[str, ...]) -> dict[int, str]:
    """Processes with one of the marks in their command line, or of a user that sandboxes run as."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            owner = folder.stat().st_uid
        except OSError:  # ended meanwhile
            continue
        if int(folder.name) != os.getpid() and (owner in UIDS or any(mark in command for mark in marks)):
            found[int(folder.name)] = command
    return found


def files() -> set[str]:
    """Files that an answer may have left where it had no business, and folders of sandboxes."""
    here = {os.getcwd(), os.path.expanduser("~"), *sys.path, *site.getsitepackages(), str(Path(__file__).parents[1])}
    shared = {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"}
    found = {str(path) for folder in shared | here for path in Path(folder or ".").glob("rlsb_*")}
    found |= {os.path.join(folder, name) for folder in shared | here for name in (*FILES, *LINKS)}
    return {path for path in found if os.path.lexists(path)} | set(map(str, Path(tempfile.gettempdir()).iterdir()))


def main() -> int:
    """Grade, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tier", type=int, choices=(1, 2), help="the best that works by default")
    arguments = parser.parse_args()
    module = load(arguments.file)
    with tempfile.TemporaryDirectory() as folder:  # what is left in it comes from here
        os.chmod(folder, 0o711)
        tempfile.tempdir = folder
        return check(module, arguments.tier)


def check(module: ModuleType, tier: int | None) -> int:
    """Grade every answer of a file; 0 if all is well."""
    reward = CodeReward(tier=tier or "auto", timeout=DEADLINE, workers=1)
    print(f"tier {reward.tier}")
    lines = [f"    assert candidate(*{tuple(given)!r}) == {value!r}" for given, value in module.TESTS]
    example = {
        "prompt": module.PROMPT,
        "entry_point": module.ENTRY,
        "test": "\n".join(["def check(candidate):", *lines]),
    }

    def grade(source: str) -> float | Exception | None:
        return reward([example], [f"```python\n{source}```"])[0]

    honest = next(source for source, expected, _ in module.ATTACKS.values() if expected == "one")
    marks = (MARK, module.MARK)
    files_before, processes_before = files(), processes(marks)
    attacks = controls = succeeded = passed = leftovers = 0
    for name, (source, expected, kind) in module.ATTACKS.items():
        if name.startswith("a27") and reward.tier != 1:
            print(f"{name}: left out, it needs a PID namespace")
            continue
        begin = time.monotonic()
        score = grade(source)
        seconds = time.monotonic() - begin
        if kind == "persist":
            score = max(score, grade(source), key=lambda value: value if isinstance(value, float) else -1.0)
        faults = [f"process {pid}: {text}" for pid, text in processes(marks).items() if pid not in processes_before]
        faults += [f"file {path}" for path in sorted(files() - files_before)]
        if seconds > DEADLINE + 2:
            faults.append(f"it took {seconds:.1f} s")
        if grade(honest) != 1.0:
            faults.append("an honest answer does not pass any more")
        leftovers += len(faults)
        if expected == "zero":
            attacks, succeeded = attacks + 1, succeeded + (score != 0.0)
        else:
            controls, passed = controls + 1, passed + (score == 1.0)
        print(f"{name}: {score} in {seconds:.2f} s" + "".join(f"\n    {fault}" for fault in faults))
    reward.close()
    print(f"counts: {dict(reward.counts)}")
    print(f"attacks {succeeded}/{attacks} controls {passed}/{controls} leftovers {leftovers}")
    return int(succeeded > 0 or passed < controls or leftovers > 0)


if __name__ == "__main__":
    sys.exit(main())
