"""The scripts of scripts/launch start what they say, as far as one machine can tell."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = [
    "--config",
    str(ROOT / "configs/base.yaml"),
    "--config",
    str(ROOT / "configs/tiny/grpo.yaml"),
    "--config",
    str(ROOT / "configs/strategies/ddp.yaml"),
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--data.init_args.prompts_per_iteration=4",
    "--data.init_args.val_limit=4",
    "--run=launched",
]


@pytest.fixture
def environment(tmp_path):
    """Commands of this environment first, nothing of a cluster."""
    found = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_"))}
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{found['PATH']}"
    (tmp_path / "bin").mkdir()
    return found | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def iterations(folder: Path) -> list[str]:
    with (folder / "runs/launched/metrics.csv").open() as file:
        return [row["iteration"] for row in csv.DictReader(file)]


def test_torchrun_begins_and_goes_on(tmp_path, environment):
    script = ROOT / "scripts/launch/torchrun.sh"
    for epochs in (1, 2):
        words = ["bash", str(script), *SMALL, f"--trainer.max_epochs={epochs}"]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment | {"GPUS": "2", "PORT": "0"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert iterations(tmp_path) == ["0", "1"]


SRUN = """#!/usr/bin/env bash
# Stands in for SLURM: two tasks on this machine.
shift
for rank in 0 1; do
    SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 \\
        SLURM_NODELIST=localhost SLURM_NNODES=1 SLURM_JOB_NAME=test MASTER_ADDR=127.0.0.1 "$@" &
    tasks[$rank]=$!
done
trap 'kill -TERM "${tasks[@]}"' TERM
wait "${tasks[0]}" && wait "${tasks[1]}"
"""


def tool(environment: dict, name: str, text: str) -> None:
    path = Path(environment["PATH"].split(":")[0]) / name
    path.write_text(text)
    path.chmod(0o755)


def test_slurm_starts_its_tasks_and_queues_the_job_again(tmp_path, environment):
    tool(environment, "srun", SRUN)
    tool(environment, "scontrol", f'#!/usr/bin/env bash\necho "$@" > {tmp_path / "queued"}\n')
    job = environment | {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    script = ["bash", str(ROOT / "scripts/launch/slurm.sbatch"), *SMALL]
    done = subprocess.run([*script, "--trainer.max_epochs=1"], cwd=tmp_path, env=job, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert iterations(tmp_path) == ["0"]
    assert not (tmp_path / "queued").exists()
    # Its time is over in the midst of a long run.
    process = subprocess.Popen(
        [*script, "--trainer.max_epochs=500"], cwd=tmp_path, env=job, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "completions an iteration" in line or len(iterations(tmp_path)) > 1:
            break
    process.send_signal(subprocess.signal.SIGUSR1)  # type: ignore[attr-defined]
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-2000:]
    assert (tmp_path / "queued").read_text().split() == ["requeue", "7"]
