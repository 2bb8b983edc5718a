"""Code that is run against tests."""

import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlalign.rewards.base import BatchedReward, Unavailable
from rlalign.rewards.code.answers import check_layout, extract_code, read_tests
from rlalign.rewards.code.folders import private_folder, remove_orphans
from rlalign.rewards.code.limits import START_SECONDS, Limits, Tier
from rlalign.rewards.code.worker import pack
from rlalign.rewards.pool import Lost, WorkerPool

log = logging.getLogger(__name__)

_WORKER = "rlalign.rewards.code.worker:run"
_START_OF_ONE = 0.25  # seconds that the start of one more sandbox may take, where each test has its own
_WORKER_MIB = 8192  # of a worker, in which tests compute with what answers return


class CodeReward(BatchedReward):
    """The code of a response, run in a sandbox against the tests of the example.

    The tests stay outside: the functions of the answer are called from there, and what they return, or what a program
    prints, is compared there. See ``docs/sandbox.md`` for the layouts of tests and for what each tier of the sandbox
    guarantees. Where no sandbox starts, the sample is left out (``Unavailable``), never scored 0.

    Attributes:
        counts: ``timeouts``, ``sandbox_failures`` and ``no_code`` so far.

    Args:
        key: Column of the tests; ``null``: known by the columns that are there (HumanEval, MBPP, APPS and others).
        score: ``all``: 1 if every test passes, else 0; ``share``: the share of tests that pass. A ``check`` function
            (HumanEval) is one test.
        tier: The tier to use; ``auto``: the best of 1 and 2 that works here.
        timeout: Wall time of an answer, all its tests together, seconds; its CPU time as well.
        memory_mb: Address space of an answer, MiB.
        tolerance: By how much a float may differ from the right one, relative to it; ``check`` functions and
            assertions compare by themselves.
        workers: Answers that run at once; the cores of this machine, divided by the ranks on it, by default.
        allow_unsafe: Whether ``tier: 3`` is allowed, which keeps an answer from nothing: it reads, writes and sends
            what it likes. Only for code that you trust, or on a machine that you would give away.

    Raises:
        ValueError: If a number is out of bounds.
        RuntimeError: If the tier does not work here; the message says why.
    """

    def __init__(
        self,
        key: str | None = None,
        score: Literal["all", "share"] = "all",
        tier: int | Literal["auto"] = "auto",
        timeout: float = 10.0,
        memory_mb: int = 1024,
        tolerance: float = 1e-6,
        workers: int | None = None,
        allow_unsafe: bool = False,
    ) -> None:
        if score not in ("all", "share"):
            raise ValueError(f"score must be 'all' or 'share', got '{score}'.")
        if tier not in ("auto", 1, 2, 3):
            raise ValueError(f"tier must be 'auto', 1, 2 or 3, got '{tier}'.")
        if not (0 < timeout < math.inf and memory_mb >= 64 and tolerance >= 0 and (workers is None or workers > 0)):
            raise ValueError(
                f"timeout={timeout} and workers={workers} must be positive, memory_mb={memory_mb} at least 64, "
                f"tolerance={tolerance} not negative."
            )
        if tier == 3 and not allow_unsafe:
            raise RuntimeError(
                "Tier 3 keeps an answer from nothing: it reads, writes and sends what it likes. Set allow_unsafe to "
                "true if that is all right."
            )
        self.key, self.score, self.tolerance = key, score, tolerance
        self.columns = () if key is None else (key,)
        self.limits = Limits(float(timeout), memory_mb << 20)
        self.counts: Counter[str] = Counter(timeouts=0, sandbox_failures=0, no_code=0)
        self._pool = WorkerPool(_WORKER, 60.0, workers, memory_mib=_WORKER_MIB)
        self._lock = threading.Lock()
        self._tier = self._probe([1, 2] if tier == "auto" else [int(tier)])

    @property
    def tier(self) -> int:
        """The tier that answers run in: 1 (namespaces), 2 (landlock and seccomp) or 3 (limits only)."""
        return self._tier.number

    def __call__(
        self, examples: Sequence[Mapping[str, Any]], responses: Sequence[str]
    ) -> list[float | Exception | None]:
        """Score responses, in parallel.

        Returns:
            A score each; ``Unavailable`` where no sandbox started, ``ValueError`` where the tests cannot be used.
        """
        scores: list[float | Exception | None] = [0.0] * len(responses)
        jobs: dict[int, dict[str, Any]] = {}
        for i, (example, response) in enumerate(zip(examples, responses, strict=True)):
            try:
                job = self._job(example, response)
            except ValueError as error:
                scores[i] = error
                continue
            if job is None:
                self.counts["no_code"] += 1
            else:
                jobs[i] = job
        for i, result in zip(jobs, self._run(list(jobs.values())), strict=True):
            scores[i] = self._score(result)
        return scores

    def check_columns(self, column_names: Sequence[str]) -> None:
        """Check that the data have tests.

        Raises:
            ValueError: If they have none in a known layout.
        """
        if self.key is None:
            check_layout(column_names)

    def answer(self, response: str) -> str | None:
        """The code of a response, ``None`` if there is none."""
        return extract_code(response)

    def close(self) -> None:
        """End the worker processes; they are started again when needed."""
        self._pool.close()

    def _job(self, example: Mapping[str, Any], response: str) -> dict[str, Any] | None:
        """What a worker shall do; ``None`` if the response has no code."""
        tests = read_tests(example, self.key)
        code = extract_code(response)
        if code is None:
            return None
        prompt = example.get("prompt")
        return tests | {
            "code": code,
            "prompt": prompt if isinstance(prompt, str) else "",
            "stop": self.score == "all",
            "tolerance": self.tolerance,
            "limits": self.limits,
        }

    def _run(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What workers say of jobs."""
        if not jobs:
            return []
        try:
            with self._lock, private_folder() as folder:
                return self._run_in(folder, jobs)
        except (RuntimeError, OSError) as error:  # no room for a folder, or no more processes
            return [{"unavailable": f"{type(error).__name__}: {error}"}] * len(jobs)

    def _run_in(self, folder: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for i, job in enumerate(jobs):
            job.update(folder=folder, running=os.path.join(folder, f"running-{i}"), tier=self._tier)
        most_tests = max(len(job.get("tests", ())) for job in jobs)
        self._pool.time_limit = self.limits.seconds + 2 * START_SECONDS + most_tests * _START_OF_ONE
        results = self._pool.run([pack(job) for job in jobs])
        return [
            _explain(result, os.path.exists(job["running"])) if isinstance(result, Lost) else result
            for job, result in zip(jobs, results, strict=True)
        ]

    def _score(self, result: dict[str, Any]) -> float | Exception:
        """The score of what a worker says."""
        if "unavailable" in result:
            self.counts["sandbox_failures"] += 1
            return Unavailable(result["unavailable"])
        if "bad_test" in result:
            return ValueError(f"The tests cannot be used: {result['bad_test']}")
        self.counts["timeouts"] += result["end"] == "timeout"
        share = result["passed"] / result["total"]
        return share if self.score == "share" else float(share == 1)

    def _probe(self, tiers: list[int]) -> Tier:
        """Find the tier, and say which it is and why no better one.

        Raises:
            RuntimeError: If there is none.
        """
        remove_orphans()
        with private_folder() as folder:
            found = self._pool.run([pack({"kind": "probe", "tiers": tiers, "folder": folder})])[0]
        if isinstance(found, Lost):
            raise RuntimeError(f"No sandbox could be tried: {found.reason} {found.detail}")
        reasons = " ".join(f"Tier {number} is refused ({reason})." for number, reason in found["refused"].items())
        if found["tier"] is None:
            self.close()
            raise RuntimeError(f"No sandbox for code works here. {reasons} docs/sandbox.md says what each tier needs.")
        tier = Tier(**found["tier"])
        level = logging.INFO if tier.number == 1 else logging.WARNING
        log.log(level, "Code runs in a sandbox of tier %d (%s). %s", tier.number, tier.how, reasons)
        return tier


def _explain(lost: Lost, running: bool) -> dict[str, Any]:
    """What became of a job whose worker said nothing: its tests hang, or no sandbox came up."""
    if lost.reason != "error" and running:  # the worker died of it twice, say: of what it does with what was returned
        return {"passed": 0, "total": 1, "end": lost.reason}
    return {"unavailable": f"the worker was lost: {lost.reason} {lost.detail}".strip()}
