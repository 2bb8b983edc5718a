"""Grade HumanEval's own solutions, and bodies that return a constant, in the sandbox.

Every canonical solution must pass. Of the mutated ones (the body replaced by the return of None, 0, 1, True, False, an
empty string or an empty list), a problem counts if every one of them is rejected.

    python scripts/check_humaneval.py HumanEval.jsonl.gz [--tier 1]

The last line is ``canonical X/164 mutated Y/164``; both must be all of them.
"""

import argparse
import gzip
import json
import sys
import time
from pathlib import Path

from rlalign.rewards.code import CodeReward

BODIES = [f"    return {value}\n" for value in ("None", "0", "1", "True", "False", "''", "[]")]


def read_problems(path: Path) -> list[dict]:
    """The rows of a file of JSON lines, compressed or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def main() -> int:
    """Grade, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="HumanEval.jsonl, or .jsonl.gz")
    parser.add_argument("--tier", type=int, choices=(1, 2), help="tier of the sandbox; the best that works by default")
    parser.add_argument("--workers", type=int, help="answers graded at once; one a core by default")
    arguments = parser.parse_args()
    problems = read_problems(arguments.file)
    reward = CodeReward(tier=arguments.tier or "auto", workers=arguments.workers)
    print(f"tier {reward.tier}, {len(problems)} problems")

    begin = time.perf_counter()
    canonical = reward(problems, [problem["canonical_solution"] for problem in problems])
    seconds = time.perf_counter() - begin
    print(f"canonical: {1000 * seconds / len(problems):.1f} ms per answer")
    wrong = [problem["task_id"] for problem, score in zip(problems, canonical, strict=True) if score != 1.0]
    if wrong:
        print(f"canonical solutions that do not pass: {', '.join(wrong)}")

    survivors: dict[str, list[str]] = {}
    for body in BODIES:
        for problem, score in zip(problems, reward(problems, [body] * len(problems)), strict=True):
            if score != 0.0:
                survivors.setdefault(problem["task_id"], []).append(f"{body.strip()} ({score})")
    for task, bodies in survivors.items():
        print(f"{task}: not rejected: {'; '.join(bodies)}")
    print("mutated: problems of which every constant is rejected")
    print(f"counts: {dict(reward.counts)}")
    passed, rejected = len(problems) - len(wrong), len(problems) - len(survivors)
    print(f"canonical {passed}/{len(problems)} mutated {rejected}/{len(problems)}")
    return int(passed < len(problems) or rejected < len(problems))


if __name__ == "__main__":
    sys.exit(main())
