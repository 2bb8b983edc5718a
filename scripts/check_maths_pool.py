#!/usr/bin/env python3
"""MathReward under answers that hang, in one call; or its speed beside math-verify in one thread.

usage: check_maths_pool.py [--answers 10000] [--hanging 0.02] [--time-limit 1] [--workers N] [--seed 0]
       check_maths_pool.py --speed [--answers 1000] [--rounds 5] [--workers N] [--seed 0]

The first closes with `answers N timeouts T/EXPECTED wrong W seconds S peak_mib M`: W verdicts that are not what the
answers were made to get, M the proportional memory (Pss) of this process and all its workers together at its highest.
The second times, in turn, math-verify alone, the workers alone, and the reward with nothing in its cache, on simple
answers that are all different, and closes with the medians in seconds and how many times faster each is.
"""

import argparse
import logging
import os
import random
import statistics
import threading
import time
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rlalign.rewards.maths import MathReward
from rlalign.rewards.pool import default_workers

Item = tuple[str, str, float]  # right answer, response, score


def simple(rng: random.Random, number: int) -> Item:
    """A number, fraction, root, set, tuple, expression or equation, right or wrong; ``number`` makes it different."""
    n, k, right = number + 10, rng.randint(2, 9), rng.random() < 0.5
    other = n if right else n + 1
    gold, answer = rng.choice(
        [
            (f"{n}", f"{other:,}"),
            (f"{n}", f"${other}.00"),
            (rf"\frac{{{n}}}{{7}}", rf"\dfrac{{{other * k}}}{{{7 * k}}}"),
            (rf"{n}\sqrt{{{k * k * 3}}}", rf"{other * k}\sqrt{{3}}"),
            (rf"\{{{n}, {k}, -1\}}", rf"\{{-1, {other}, {k}\}}"),
            (f"({n}, {k})", rf"\left({other}, \frac{{{2 * k}}}{{2}}\right)"),
            (f"(x+{n})^2", f"x^2+{2 * other}x+{other * other}"),
            (f"x={n}", f"{other}"),
        ]
    )
    return gold, rf"Therefore it is $\boxed{{{answer}}}$.", float(right)


def hanging(number: int) -> Item:
    """A power tower that no one computes; each is another, so that a cache does not help."""
    return str(number), rf"\boxed{{\dfrac{{5^{{(5^{{(5^{{(5^5)}})}}-4)}}-{number}}}{{16}}}}", 0.0


def memory_mib(pids: list[int]) -> float:
    """Proportional set size of processes; one that has just ended counts nothing."""
    total = 0
    for pid in pids:
        try:
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
    return total / 1024


def check(arguments: argparse.Namespace) -> None:
    """Grade simple and hanging answers in one call."""
    rng = random.Random(arguments.seed)
    expected = round(arguments.answers * arguments.hanging)
    items = [hanging(i) for i in range(expected)] + [simple(rng, i) for i in range(arguments.answers - expected)]
    rng.shuffle(items)
    reward = MathReward(time_limit=arguments.time_limit, workers=arguments.workers)
    peak, finished = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns) as progress:
            task = progress.add_task("")
            while not finished.wait(0.25):
                memory = memory_mib([os.getpid(), *reward.pool.pids()])
                peak = max(peak, memory)
                progress.update(task, description=f"{len(items)} answers, {memory:.0f} MiB, at most {peak:.0f} MiB")

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    try:
        scores = reward([{"answer": gold} for gold, _, _ in items], [response for _, response, _ in items])
    finally:
        seconds = time.perf_counter() - started
        finished.set()
        watcher.join()
        reward.close()
    wrong = sum(score != item[2] for score, item in zip(scores, items, strict=True))
    print(f"{len(items) / seconds:.1f} answers a second, {reward.pool.workers} workers, counts {dict(reward.counts)}")
    print(
        f"answers {len(items)} timeouts {reward.counts['timeouts']}/{expected} wrong {wrong} "
        f"seconds {seconds:.1f} peak_mib {peak:.0f}"
    )


def speed(arguments: argparse.Namespace) -> None:
    """Time math-verify in this thread, the workers, and the reward, in turn."""
    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # it warns that its own time limits are off
    rng = random.Random(arguments.seed)
    sets = [[simple(rng, round_ * arguments.answers + i) for i in range(arguments.answers)] for round_ in range(99)]
    reward = MathReward(workers=arguments.workers)
    reward([{"answer": "x"}] * 64, [rf"\boxed{{x+{i}-{i}}}" for i in range(64)])  # starts the workers

    def alone(items: list[Item]) -> None:
        for gold, response, _ in items:
            verify(
                parse(f"${gold}$", parsing_timeout=None), parse(response, parsing_timeout=None), timeout_seconds=None
            )

    def workers(items: list[Item]) -> None:
        reward.pool.run([reward._pair({"answer": gold}, response) for gold, response, _ in items])

    def whole(items: list[Item]) -> None:
        scores = reward([{"answer": gold} for gold, _, _ in items], [response for _, response, _ in items])
        assert scores == [score for _, _, score in items]

    times: dict[str, list[float]] = {"math-verify": [], "workers": [], "reward": []}
    for index in range(arguments.rounds):
        for name, function, items in (
            ("math-verify", alone, sets[3 * index]),
            ("workers", workers, sets[3 * index + 1]),
            ("reward", whole, sets[3 * index + 2]),
        ):
            started = time.perf_counter()
            function(items)
            times[name].append(time.perf_counter() - started)
        print("  ".join(f"{name} {rounds[-1]:.2f} s" for name, rounds in times.items()))
    reward.close()
    medians = {name: statistics.median(rounds) for name, rounds in times.items()}
    base = medians["math-verify"]
    print(
        f"answers {arguments.answers} cores {default_workers()} workers {reward.pool.workers}  "
        + "  ".join(f"{name} {median:.2f} s ({base / median:.2f}x)" for name, median in medians.items())
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int)
    parser.add_argument("--hanging", type=float, default=0.02)
    parser.add_argument("--time-limit", type=float, default=1.0)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.answers = arguments.answers or (1000 if arguments.speed else 10_000)
    (speed if arguments.speed else check)(arguments)


if __name__ == "__main__":
    main()
