#!/usr/bin/env python3
"""Grade GSM8K's own answers, and answers that are one too large, with MathReward.

usage: check_gsm8k.py FILE

FILE has a JSON object a line, whose `answer` ends in `#### NUMBER` (test.jsonl of GSM8K). Closes with
`gold X/N wrong Y/N`: how many of the data set's answers score 1, and how many of the others do.
"""

import argparse
import json
from pathlib import Path

from rlalign.rewards.maths import MathReward


def main() -> None:
    """Grade both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    examples = [json.loads(line) for line in parser.parse_args().file.read_text().splitlines()]
    numbers = [int(example["answer"].rpartition("####")[2].replace(",", "")) for example in examples]
    reward = MathReward()
    gold = reward(examples, [example["answer"] for example in examples])
    wrong = reward(examples, [f"It is one more.\n#### {number + 1:,}" for number in numbers])
    reward.close()
    for example, score in zip(examples, gold, strict=True):
        if score != 1.0:
            print(f"scores {score}: {example['answer'].rpartition('####')[2]}")
    total = len(examples)
    print(f"gold {gold.count(1.0)}/{total} wrong {total - wrong.count(0.0)}/{total}")


if __name__ == "__main__":
    main()
