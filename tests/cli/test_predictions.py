import json
from pathlib import Path

import pytest

from rlalign.cli import main

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ["--config", str(ROOT / "configs/base.yaml"), "--config", str(ROOT / "configs/tiny/grpo.yaml")]
PREDICT = ["predict", *CONFIGS, "--data.val_limit=6", "--trainer.accelerator=cpu", "--data.val_samples=4"]
RANKER = "--data.ranker=test_predictions.LongestFirst"


class LongestFirst:
    """Ranks by length; what is empty it cannot score."""

    def __call__(self, example: dict, response: str) -> float | None:
        return float(len(response)) or None


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("RLALIGN_RUN", "")
    monkeypatch.delenv("RLALIGN_RUN")


def predict(run: str, *options: str) -> list[dict]:
    assert main([*PREDICT, *options, f"--run={run}"]) == 0
    return [json.loads(line) for line in Path(f"runs/{run}/predictions.jsonl").read_text().splitlines()]


def test_all_or_the_best_or_the_majority_of_the_same_responses(capsys):
    every = predict("all", RANKER)
    assert [(line["prompt_index"], line["sample_index"]) for line in every] == [
        (p, s) for p in range(6) for s in range(4)
    ]
    assert all(line["score"] == (len(line["text"]) or None) for line in every)
    assert "24 responses in runs/all/predictions.jsonl" in capsys.readouterr().out
    groups = [every[i : i + 4] for i in range(0, 24, 4)]

    best = predict("best", RANKER, "--pick=best")
    assert best == [max(group, key=lambda line: line["score"] or 0) for group in groups]  # max takes the first

    majority = predict("majority", "--pick", "majority")
    for line, group in zip(majority, groups, strict=True):
        answers = [each["text"].strip() for each in group]
        counts = [answers.count(answer) for answer in answers]
        assert line["votes"] == max(counts)
        assert line["sample_index"] == counts.index(max(counts))
        assert line["score"] is None  # nothing ranks here


def test_curves_are_written_where_there_is_something_to_choose_from(capsys):
    lines = predict("a", RANKER)
    curves = json.loads(Path("runs/a/best_of_n.json").read_text())
    assert (curves["prompts"], curves["samples"], curves["n"]) == (6, 4, [1, 2, 4])
    of_prompts = []
    for group in (lines[i : i + 4] for i in range(0, 24, 4)):
        longest = max(len(line["text"]) for line in group)
        right = [line["correct"] for line in group if len(line["text"]) == longest]
        of_prompts.append(sum(right) / len(right))
    assert curves["best"][-1] == pytest.approx(sum(of_prompts) / 6)
    assert curves["plain"] == pytest.approx(sum(line["correct"] for line in lines) / 24)
    assert [curves["best"][0], curves["majority"][0], curves["pass"][0]] == pytest.approx([curves["plain"]] * 3)
    assert Path("runs/a/best_of_n.png").read_bytes().startswith(b"\x89PNG")
    assert f"best@4 {curves['best'][-1]:.3f}: runs/a/best_of_n.png" in capsys.readouterr().out
    predict("one", "--data.val_samples=1")
    assert [path.name for path in Path("runs/one").iterdir() if path.name != ".lock"] == ["predictions.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pick=best"], "--pick=best needs what ranks responses: give data.ranker"),
        (["--pick=majority", "--data.val_samples=1"], "data.val_samples=1 makes one: raise it"),
        (["--pick=most"], "most"),
        (["--pick=best", "--data.ranker=NeedsColumn"], "NeedsColumn"),
    ],
)
def test_what_cannot_be_picked_is_refused_before_sampling(options, message, capsys, monkeypatch):
    from rlalign.rollouts.datamodule import RolloutDataModule

    def sampled(self, *args):
        raise AssertionError("it sampled")

    monkeypatch.setattr(RolloutDataModule, "sample", sampled)
    with pytest.raises(SystemExit):
        main([*PREDICT, *options, "--run=a"])
    assert message in capsys.readouterr().err


def test_validation_reports_the_best_of_n():
    from rlalign.cli.trainer import TrainerCLI

    cli = TrainerCLI(["validate", *PREDICT[1:], RANKER, "--run=a"])
    metrics = cli.trainer.callback_metrics
    assert {"val/best@2", "val/best@4", "val/majority@2", "val/pass@2", "val/unranked_share"} <= metrics.keys()
    predict("a", RANKER)
    curves = json.loads(Path("runs/a/best_of_n.json").read_text())
    for name, curve in (("best", "best"), ("majority", "majority"), ("pass", "pass")):
        for n, value in zip(curves["n"][1:], curves[curve][1:], strict=True):
            assert metrics[f"val/{name}@{n}"].item() == pytest.approx(value, abs=1e-6)
    assert metrics["val/unranked_share"].item() == pytest.approx(curves["unranked_share"])


class ReadsWhatIsNotThere(LongestFirst):
    columns = ("nothing",)


def test_a_ranker_says_which_column_is_missing(capsys):
    with pytest.raises(SystemExit):
        main([*PREDICT, "--data.ranker=test_predictions.ReadsWhatIsNotThere", "--run=a"])
    assert "Reward 'ranker' reads the column 'nothing'" in capsys.readouterr().err
