import errno
import os

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from rlalign.callbacks.checkpoint import IterationCheckpoint
from rlalign.checkpoints import is_whole, list_checkpoints, newest_whole
from runs import make_run


def train(folder, model, prompts, *callbacks, checkpoint=None, val=None, **trainer):
    options = {
        "max_epochs": 3,
        "default_root_dir": str(folder),
        "enable_checkpointing": True,
        "callbacks": list(callbacks),
    }
    module, data, fitted = make_run(model, prompts, trainer=options | trainer, step_size=8, val=val)
    fitted.fit(module, data, ckpt_path=checkpoint)
    return fitted


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture
def held_out(tmp_path):
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "a+b=", "answer": "c"}\n{"prompt": "b+c=", "answer": "d"}\n')
    return str(path)


def test_keeps_the_newest(tmp_path, tiny_model, prompts_file):
    saver = IterationCheckpoint(keep=2)
    train(tmp_path, tiny_model, prompts_file, saver)
    assert names(tmp_path) == ["iteration=00002.ckpt", "iteration=00003.ckpt", "last.ckpt"]
    assert os.readlink(tmp_path / "checkpoints/last.ckpt") == "iteration=00003.ckpt"
    assert saver.last_good_path == str(tmp_path / "checkpoints/iteration=00003.ckpt")


def test_every_and_the_last_iteration(tmp_path, tiny_model, prompts_file):
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(every=2))
    assert names(tmp_path) == ["iteration=00002.ckpt", "iteration=00003.ckpt", "last.ckpt"]


def test_folder(tmp_path, tiny_model, prompts_file):
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(folder=str(tmp_path / "elsewhere")), max_epochs=1)
    assert (tmp_path / "elsewhere/iteration=00001.ckpt").is_file()
    assert not (tmp_path / "checkpoints").exists()


def test_holds_tensors_and_plain_values_only(tmp_path, tiny_model, prompts_file):
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), max_epochs=1)
    checkpoint = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["policy"]["model"] == tiny_model


def test_full_disk_leaves_the_last_good_checkpoint_kf80(tmp_path, tiny_model, prompts_file, monkeypatch):
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    write = TorchCheckpointIO.save_checkpoint

    def full(self, checkpoint, path, storage_options=None):
        if checkpoint["epoch"] == 1:
            with open(path, "wb") as file:
                file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, checkpoint, path, storage_options)

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", full)
    saver = IterationCheckpoint()
    with pytest.raises(
        OSError, match=r"iteration=00002\.ckpt could not be written: .*No space left.*iteration=00001\.ckpt"
    ):
        train(tmp_path, tiny_model, prompts_file, saver)
    assert names(tmp_path) == ["iteration=00001.ckpt", "last.ckpt"]
    assert is_whole(tmp_path / "checkpoints/last.ckpt")
    assert saver.last_good_path == str(tmp_path / "checkpoints/iteration=00001.ckpt")


def test_name_appears_only_when_the_file_is_whole_kf80(tmp_path, tiny_model, prompts_file, monkeypatch):
    seen = []

    def look(path):
        seen.append((path.name, names(tmp_path)))
        raise KeyboardInterrupt  # a kill before the rename

    monkeypatch.setattr("rlalign.checkpoints._sync", look)
    with pytest.raises(SystemExit):
        train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), max_epochs=1)
    assert seen == [(".iteration=00001.ckpt.tmp", [".iteration=00001.ckpt.tmp"])]
    assert names(tmp_path) == []


def test_leftovers_of_a_kill_are_cleared(tmp_path, tiny_model, prompts_file):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/.iteration=00009.ckpt.tmp").write_bytes(b"half")
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), max_epochs=1)
    assert names(tmp_path) == ["iteration=00001.ckpt", "last.ckpt"]


def test_last_good_path_is_known_after_resuming(tmp_path, tiny_model, prompts_file):
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), max_epochs=2)
    seen = []

    class Look(IterationCheckpoint):
        def on_train_epoch_start(self, trainer, pl_module):
            seen.append(self.last_good_path)

    train(tmp_path, tiny_model, prompts_file, Look(), checkpoint=tmp_path / "checkpoints/iteration=00001.ckpt")
    assert seen[0] == str(tmp_path / "checkpoints/iteration=00001.ckpt")


def test_damage_in_the_middle_is_found_kf80(tmp_path, tiny_model, prompts_file):
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), max_epochs=2)
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged"):
        assert newest_whole(tmp_path / "checkpoints").name == "iteration=00001.ckpt"


def test_nothing_whole(tmp_path):
    (tmp_path / "iteration=00001.ckpt").write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged"):
        assert newest_whole(tmp_path) is None


def test_last_decides_where_an_older_checkpoint_was_continued(tmp_path, tiny_model, prompts_file):
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(keep=5))
    start = tmp_path / "checkpoints/iteration=00001.ckpt"
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(keep=5), checkpoint=start, max_epochs=2)
    assert (tmp_path / "checkpoints/iteration=00003.ckpt").exists()
    assert newest_whole(tmp_path / "checkpoints").name == "iteration=00002.ckpt"


@pytest.mark.parametrize("epochs_between_validation", [1, 2])
def test_best_by_pass_at_1_next_to_it_kf95(tmp_path, tiny_model, prompts_file, held_out, epochs_between_validation):
    best = ModelCheckpoint(monitor="val/pass@1", mode="max", filename="best")
    options = {"val": held_out, "check_val_every_n_epoch": epochs_between_validation, "max_epochs": 4}
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(keep=9), best, **options)
    whole = torch.load(tmp_path / "checkpoints/iteration=00004.ckpt", weights_only=True)
    assert best.best_model_path.endswith("best.ckpt")
    # A best one is as good a point to go on from as any.
    other = tmp_path / "other"
    again = ModelCheckpoint(monitor="val/pass@1", mode="max", filename="best")
    train(other, tiny_model, prompts_file, IterationCheckpoint(), again, checkpoint=best.best_model_path, **options)
    resumed = torch.load(other / "checkpoints/iteration=00004.ckpt", weights_only=True)
    assert all(torch.equal(whole["state_dict"][k], v) for k, v in resumed["state_dict"].items())


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (lambda: ModelCheckpoint(every_n_train_steps=1), "every_n_train_steps"),
        (
            lambda: ModelCheckpoint(train_time_interval=__import__("datetime").timedelta(minutes=1)),
            "train_time_interval",
        ),
        (lambda: ModelCheckpoint(save_on_exception=True), "save_on_exception"),
        (lambda: ModelCheckpoint(save_on_train_epoch_end=False), "save_on_train_epoch_end=false"),
        (lambda: ModelCheckpoint(save_last=True), "save_last"),
        (lambda: OnExceptionCheckpoint("."), "OnExceptionCheckpoint"),
    ],
)
def test_saving_inside_an_iteration_is_refused(tmp_path, tiny_model, prompts_file, other, expected, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an OnExceptionCheckpoint saves on this very exception
    with pytest.raises(ValueError, match=expected):
        train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), other())


def test_ending_or_validating_inside_an_iteration_is_refused(tmp_path, tiny_model, prompts_file, held_out):
    with pytest.raises(ValueError, match="max_steps=3 ends inside an iteration of 2 optimizer steps"):
        train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), max_steps=3)
    with pytest.raises(ValueError, match="val_check_interval"):
        train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), val_check_interval=0.5, val=held_out)
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), max_steps=4, max_epochs=-1)
    assert "iteration=00002.ckpt" in names(tmp_path)


def test_sizes():
    with pytest.raises(ValueError, match="at least 1"):
        IterationCheckpoint(every=0)
    with pytest.raises(ValueError, match="at least 1"):
        IterationCheckpoint(keep=0)
