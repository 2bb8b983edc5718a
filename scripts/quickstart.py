"""Teach the embedded model arithmetic with GRPO, and draw what happened: ``python scripts/quickstart.py``."""

import shutil
import time
from pathlib import Path

from rlalign.cli.folders import RUNS
from rlalign.cli.trainer import TrainerCLI

ROOT = Path(__file__).resolve().parents[1]
RUN = "quickstart"


def main() -> None:
    """Measure, train, measure again."""
    configs = [str(ROOT / "configs" / name) for name in ("base.yaml", "tiny/grpo.yaml")]
    arguments = [part for config in configs for part in ("--config", config)] + ["--run", RUN]
    shutil.rmtree(RUNS / RUN, ignore_errors=True)  # of an earlier quickstart
    before = TrainerCLI(["validate", *arguments])
    started = time.perf_counter()
    fitted = TrainerCLI(["fit", *arguments])
    seconds = time.perf_counter() - started
    after = TrainerCLI(["validate", *arguments, "--ckpt_path=last"])
    scores = [float(cli.trainer.callback_metrics["val/pass@1"]) for cli in (before, after)]
    data = after.datamodule
    print(f"curves: {fitted.folder / 'curves.png'}")
    print(
        f"quickstart: pass@1 {scores[0]:.2f} -> {scores[1]:.2f} on {len(data.val_prompts)} held-out problems "
        f"in {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
