"""What ``rlalign predict`` writes."""

import json
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from lightning import Callback, LightningModule, Trainer

from rlalign.decoding import first_best, votes
from rlalign.metrics.curves import best_of_n_curves, draw_best_of_n
from rlalign.metrics.validation import ReadAnswers
from rlalign.rollouts.batch import Rollout
from rlalign.run_folder import write_atomically

Pick = Literal["all", "best", "majority"]
FIELDS = ("prompt_index", "sample_index", "text", "reward", "correct", "truncated", "components", "score")


class CheckPick(Callback):
    """Refuses, before anything is sampled, to pick where there is nothing to pick from or by.

    Args:
        pick: What ``--pick`` says.
    """

    def __init__(self, pick: Pick) -> None:
        self.pick = pick

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the data module and the algorithm.

        Raises:
            ValueError: If each prompt has one response, or nothing ranks them.
        """
        module: Any = pl_module
        if self.pick != "all" and module.data.val_samples == 1:
            raise ValueError(
                f"--pick={self.pick} chooses among the responses to a prompt, and data.val_samples=1 makes one: raise "
                "it."
            )
        if self.pick == "best" and module.rank([]) is None:
            raise ValueError("--pick=best needs what ranks responses: give data.ranker, or --pick=majority.")


def write_predictions(folder: Path, rollouts: Sequence[Rollout], pick: Pick, read_answers: ReadAnswers) -> None:
    """Write ``predictions.jsonl`` and, of several responses a prompt, ``best_of_n.json`` and ``best_of_n.png``.

    Args:
        folder: Where.
        rollouts: Those of a prompt are adjacent.
        pick: Write ``all`` of them, or one a prompt: that with the ``best`` score, or the first one with the answer of
            the ``majority``. Ties go to what was sampled first.
        read_answers: What responses answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups = [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.prompt_index)]
    lines = [line for group in groups for line in _lines(group, pick, read_answers)]
    path = folder / "predictions.jsonl"
    write_atomically(path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
    print(f"{len(lines)} responses in {path}")
    if len(rollouts) > len(groups):
        _write_curves(folder, rollouts, read_answers)


def _lines(group: Sequence[Rollout], pick: Pick, read_answers: ReadAnswers) -> list[dict[str, Any]]:
    lines = [{name: getattr(rollout, name) for name in FIELDS} for rollout in group]
    if pick == "best":
        return [lines[first_best([rollout.score for rollout in group])]]
    if pick == "majority":
        counts = votes(read_answers([rollout.response for rollout in group]))
        chosen = first_best(counts)
        return [lines[chosen] | {"votes": int(counts[chosen])}]
    return lines


def _write_curves(folder: Path, rollouts: Sequence[Rollout], read_answers: ReadAnswers) -> None:
    curves = best_of_n_curves(rollouts, read_answers)
    write_atomically(folder / "best_of_n.json", json.dumps(curves, indent=1) + "\n")
    partial = folder / ".best_of_n.png.partial"
    draw_best_of_n(curves, title=folder.name).savefig(partial, format="png", dpi=130)
    os.replace(partial, folder / "best_of_n.png")
    n = curves["n"][-1]
    figures = {"pass@1": curves["plain"], f"majority@{n}": curves["majority"][-1], f"pass@{n}": curves["pass"][-1]}
    if curves["best"] is not None:
        figures[f"best@{n}"] = curves["best"][-1]
    print(", ".join(f"{name} {value:.3f}" for name, value in figures.items()) + f": {folder / 'best_of_n.png'}")
