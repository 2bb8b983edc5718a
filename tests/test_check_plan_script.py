"""The script that measures what the planner predicts."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_case_is_measured_and_predicted(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/check_plan.py"), "--only", "sft-tiny", "--parts"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    row = next(line for line in done.stdout.splitlines() if line.startswith("| sft-tiny"))
    measured, predicted = (float(x.replace(",", "")) for x in re.findall(r"([\d,]+) MiB", row))
    assert measured > 0
    assert predicted > 0
    assert "update" in done.stdout
    assert re.fullmatch(r"cases 1 worst \d+\.\d%", done.stdout.splitlines()[-1])
