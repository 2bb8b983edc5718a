import json
from pathlib import Path

import pytest
from lightning import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from distributed import run_distributed
from rlalign.callbacks import SampleTable
from rlalign.callbacks.samples import keep_rows_before
from short_runs import checkpoint, run


def read(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


class Sampled(Callback):
    def __init__(self):
        self.rollouts = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.rollouts.append(trainer.datamodule.last_rollouts)


def test_rows_say_what_was_sampled(tiny_model, prompts_file, tmp_path):
    sampled = Sampled()
    run(tiny_model, prompts_file, tmp_path, [SampleTable(rows=100), sampled], 2)
    rows = read(tmp_path)
    assert [r["iteration"] for r in rows] == [0] * 8 + [1] * 8
    prompts = [json.loads(line)["prompt"] for line in Path(prompts_file).read_text().splitlines()]
    for row, rollout in zip(rows, sampled.rollouts[0] + sampled.rollouts[1], strict=True):
        assert row == {
            "iteration": row["iteration"],
            "prompt": prompts[rollout.prompt_index],
            "response": rollout.text,
            "reward": rollout.reward,
            "components": {"length": rollout.components["length"]},
            "correct": rollout.correct,
            "truncated": rollout.truncated,
            "length": len(rollout.token_ids),
        }


def test_rows_are_spread_over_prompts_and_every_skips(tiny_model, prompts_file, tmp_path):
    sampled = Sampled()
    run(tiny_model, prompts_file, tmp_path, [SampleTable(every=2, rows=2), sampled], 4)
    rows = read(tmp_path)
    assert [r["iteration"] for r in rows] == [0, 0, 2, 2]
    first = sampled.rollouts[0]
    assert [r["response"] for r in rows[:2]] == [first[0].text, first[4].text], "one of each prompt"


def test_a_reward_that_could_not_be_computed_is_null(tiny_model, prompts_file, tmp_path):
    def sometimes(example, response):
        return None if len(response) % 2 else 1.0

    run(tiny_model, prompts_file, tmp_path, [SampleTable(rows=8)], 2, data={"rewards": {"sometimes": sometimes}})
    rewards = [(r["reward"], r["components"]["sometimes"]) for r in read(tmp_path)]
    assert (None, None) in rewards


def test_rows_that_are_run_again_are_cut_off_on_resume(tiny_model, prompts_file, tmp_path):
    run(tiny_model, prompts_file, tmp_path, [SampleTable(rows=1)], 4)
    whole = (tmp_path / "samples.jsonl").read_text()
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write('{"iteration": 4, "prompt": "\u00e9'.encode()[:-1])  # killed while writing
    run(tiny_model, prompts_file, tmp_path, [SampleTable(rows=1)], 4, resume=checkpoint(tmp_path, 2))
    assert (tmp_path / "samples.jsonl").read_text() == whole
    run(tiny_model, prompts_file, tmp_path, [SampleTable(rows=1)], 4, resume=checkpoint(tmp_path, 4))
    assert (tmp_path / "samples.jsonl").read_text() == whole, "at the very end nothing was sampled"


def test_a_damaged_row_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"iteration": 0}\nnonsense\n{"iteration": 1}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 2: expected a JSON object with an iteration"):
        keep_rows_before(path, 1)
    assert path.read_text().count("\n") == 3


def test_a_response_with_odd_line_separators_stays_one_row(tmp_path):
    path = tmp_path / "samples.jsonl"
    row = json.dumps({"iteration": 0, "response": "a\u2028b\x85c\nd"}, ensure_ascii=False) + "\n"
    path.write_text(row, encoding="utf-8")
    keep_rows_before(path, 1)
    assert path.read_text(encoding="utf-8") == row


def test_tensorboard_gets_a_text(tiny_model, prompts_file, tmp_path):
    logger = TensorBoardLogger(tmp_path / "board")
    run(tiny_model, prompts_file, tmp_path, [SampleTable(rows=1)], 1, trainer={"logger": logger})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    text = events.Tensors("rollout/samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text.strip("`\n")) == read(tmp_path)[0]


def test_wandb_gets_a_table(tiny_model, prompts_file, tmp_path, monkeypatch):
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    tables = []
    monkeypatch.setattr(WandbLogger, "experiment", property(lambda self: None))
    monkeypatch.setattr(WandbLogger, "log_hyperparams", lambda self, *a, **k: None)
    monkeypatch.setattr(WandbLogger, "log_metrics", lambda self, metrics, step=None: None)
    monkeypatch.setattr(WandbLogger, "finalize", lambda self, status: None)
    monkeypatch.setattr(WandbLogger, "after_save_checkpoint", lambda self, callback: None)
    monkeypatch.setattr(WandbLogger, "log_text", lambda self, key, **table: tables.append((key, table)))
    run(tiny_model, prompts_file, tmp_path, [SampleTable(rows=2)], 1, trainer={"logger": logger})
    [(key, table)] = tables
    rows = read(tmp_path)
    assert key == "rollout/samples"
    assert table["columns"] == list(rows[0])
    assert [row[2] for row in table["data"]] == [row["response"] for row in rows]
    assert json.loads(table["data"][0][4]) == rows[0]["components"]
    assert table["step"] == 1


def on_rank(rank, model, prompts, folder):
    run(model, prompts, folder, [SampleTable(rows=100)], 1, trainer={"devices": 2, "strategy": "ddp"})


def test_two_ranks_write_once_and_everything(tiny_model, prompts_file, tmp_path):
    run_distributed(on_rank, tiny_model, prompts_file, tmp_path / "two")
    run(tiny_model, prompts_file, tmp_path / "one", [SampleTable(rows=100)], 1)
    assert read(tmp_path / "two") == read(tmp_path / "one")


@pytest.mark.parametrize("options", [{"every": 0}, {"rows": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match="must be at least 1"):
        SampleTable(**options)
