"""Checkpoints that hold what changed: back to the bit, small, and never without the one they stand on."""

import hashlib
import os
import shutil

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from rlalign.callbacks.checkpoint import IterationCheckpoint
from rlalign.checkpoints import is_whole, newest_whole
from rlalign.cli.export import load_checkpoint
from rlalign.differences import base_of, difference, read_checkpoint, state_hash
from runs import make_run, weights

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool)


def state(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    tensors = {str(dtype): torch.randn(7, 5, generator=generator).mul(3).to(dtype) for dtype in TYPES}
    tensors |= {"scalar": torch.tensor(seed), "empty": torch.zeros(0, 3), "frozen": torch.arange(10.0)}
    tensors |= {"nan": torch.tensor([float("nan"), -0.0, float("inf"), seed]), "turned": tensors[str(TYPES[0])].T}
    return {
        "epoch": seed,
        "state_dict": tensors,
        "optimizers": [{"state": {0: {"step": torch.tensor(seed), "exp_avg": torch.randn(9)}}, "betas": (0.9, 0.99)}],
        "name": "a",
        "nothing": None,
    }


def same(left, right) -> bool:
    """Equal in structure, types, shapes and bits."""
    if isinstance(left, torch.Tensor):
        fits = left.dtype == right.dtype and left.shape == right.shape
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (left, right)]
        return fits and torch.equal(*bits)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.fixture
def pair(tmp_path):
    """Files of a state and of what changed after it, and the later state."""
    old, new = state(1), state(2)
    new["state_dict"]["added"] = torch.randn(3)
    new["state_dict"]["scalar"] = torch.zeros(2)  # another shape
    del new["state_dict"]["empty"]
    base, path = tmp_path / "iteration=00001.ckpt", tmp_path / "iteration=00002.ckpt"
    torch.save(old, base)
    torch.save(difference(new, base), path)
    return base, path, new


def test_a_state_comes_back_to_the_bit(pair):
    base, path, new = pair
    assert same(read_checkpoint(path), new)
    assert same(read_checkpoint(base), state(1) | {"optimizers": read_checkpoint(base)["optimizers"]})
    assert (base_of(path), base_of(base)) == (base.name, None)
    assert read_checkpoint(path)["state_dict"]["frozen"].is_floating_point()
    kept = torch.load(path, weights_only=True)["difference"]["tensors"]
    assert not any("frozen" in name for name in kept), "what is as it was takes no room"


def test_small_steps_take_less_room_than_the_whole(tmp_path):
    old = {"moved": torch.randn(50_000), "frozen": torch.randn(200_000)}
    new = {"moved": old["moved"] * (1 + 1e-6 * torch.randn(50_000)), "frozen": old["frozen"].clone()}
    base, path, whole = (tmp_path / name for name in ("base", "path", "whole"))
    torch.save(old, base)
    torch.save(difference(new, base), path)
    torch.save({"moved": new["moved"]}, whole)
    assert path.stat().st_size < 0.5 * whole.stat().st_size
    assert same(read_checkpoint(path), new)


def test_the_hash_is_that_of_all_bytes_and_names():
    x = torch.tensor([1.0, 2.0])
    want = hashlib.sha256(b"a float32 [2]\n" + x.numpy().tobytes()).hexdigest()
    assert state_hash({"a": x}) == want
    others = ({"b": x}, {"a": x.view(2, 1)}, {"a": x.view(torch.int32)}, {"a": -x})
    assert len({want, *(state_hash(other) for other in others)}) == 5


def test_a_missing_or_altered_base_is_said(pair):
    base, path, _ = pair
    other = state(1)
    other["state_dict"]["frozen"][3] = 7.0
    kept = base.read_bytes()
    torch.save(other, base)
    with pytest.raises(ValueError, match=r"holds what changed since .*00001\.ckpt, which is not what it was"):
        read_checkpoint(path)
    base.write_bytes(kept)
    read_checkpoint(path)
    base.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds what changed since .*00001\.ckpt, which is not there"):
        read_checkpoint(path)


def test_a_changed_difference_is_noticed(pair):
    _, path, _ = pair
    written = torch.load(path, weights_only=True)
    name = next(name for name in written["difference"]["tensors"] if "int64" in name)
    written["difference"]["tensors"][name]["planes"] = [
        torch.zeros(35, dtype=torch.uint8) for _ in written["difference"]["tensors"][name]["planes"]
    ]
    torch.save(written, path)
    with pytest.raises(ValueError, match="do not give the state that was saved"):
        read_checkpoint(path)


# ---- runs ------------------------------------------------------------------------------------------------------------


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def train(folder, model, prompts, checkpoint=None, max_epochs=3, **options):
    saver = IterationCheckpoint(**options)
    trainer = {"max_epochs": max_epochs, "default_root_dir": str(folder), "enable_checkpointing": True}
    module, data, fitted = make_run(
        model, prompts, trainer=trainer | {"callbacks": [saver]}, step_size=8, optimizer=adam
    )
    fitted.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    return module


def bases(folder) -> dict[str, str | None]:
    paths = sorted((folder / "checkpoints").glob("iteration=*.ckpt"))
    return {path.stem[-1]: base if (base := base_of(path)) is None else base[-6] for path in paths}


def test_every_so_many_are_whole_and_a_base_stays_as_long_as_it_is_needed(tmp_path, tiny_model, prompts_file):
    train(tmp_path / "a", tiny_model, prompts_file, max_epochs=7, keep=9, full_every=3)
    assert bases(tmp_path / "a") == {"1": None, "2": "1", "3": "1", "4": None, "5": "4", "6": "4", "7": None}
    train(tmp_path / "b", tiny_model, prompts_file, max_epochs=6, keep=1, full_every=3)
    assert bases(tmp_path / "b") == {"4": None, "6": "4"}
    train(tmp_path / "c", tiny_model, prompts_file, max_epochs=7, keep=1, full_every=3)
    assert bases(tmp_path / "c") == {"7": None}
    train(tmp_path / "d", tiny_model, prompts_file, max_epochs=6, keep=9, every=2, full_every=2)
    assert bases(tmp_path / "d") == {"2": None, "4": "2", "6": None}


def test_a_run_resumed_from_a_difference_goes_on_to_the_bit(tmp_path, tiny_model, prompts_file):
    straight = train(tmp_path / "a", tiny_model, prompts_file, max_epochs=4)
    train(tmp_path / "b", tiny_model, prompts_file, full_every=5)
    path = tmp_path / "b/checkpoints/iteration=00003.ckpt"
    assert base_of(path) == "iteration=00001.ckpt"
    resumed = train(tmp_path / "b", tiny_model, prompts_file, str(path), max_epochs=4, full_every=5)
    assert torch.equal(weights(resumed), weights(straight))
    assert base_of(tmp_path / "b/checkpoints/last.ckpt") == "iteration=00001.ckpt"
    whole, part = (tmp_path / name / "checkpoints/iteration=00004.ckpt" for name in ("a", "b"))
    assert same(load_checkpoint(part)["state_dict"], load_checkpoint(whole)["state_dict"])
    assert same(load_checkpoint(part)["optimizer_states"], load_checkpoint(whole)["optimizer_states"])
    # And a run without the option reads it as well.
    other = train(tmp_path / "c", tiny_model, prompts_file, str(path), max_epochs=4)
    assert torch.equal(weights(other), weights(straight))


def test_the_newest_whole_one_is_not_one_whose_base_is_damaged(tmp_path, tiny_model, prompts_file):
    train(tmp_path, tiny_model, prompts_file, max_epochs=5, keep=9, full_every=2)
    folder = tmp_path / "checkpoints"
    assert bases(tmp_path) == {"1": None, "2": "1", "3": None, "4": "3", "5": None}
    (folder / "iteration=00005.ckpt").write_bytes(b"damaged")
    assert newest_whole(folder) == folder / "iteration=00004.ckpt"
    (folder / "iteration=00003.ckpt").unlink()
    assert not is_whole(folder / "iteration=00004.ckpt")
    with pytest.warns(UserWarning, match="is damaged"):
        assert newest_whole(folder) == folder / "iteration=00002.ckpt"


def test_a_damaged_base_is_not_built_upon(tmp_path, tiny_model, prompts_file):
    train(tmp_path, tiny_model, prompts_file, max_epochs=2)
    whole = tmp_path / "checkpoints/iteration=00002.ckpt"
    kept = shutil.copy(whole, tmp_path / "kept.ckpt")
    whole.write_bytes(whole.read_bytes()[:1000])
    train(tmp_path, tiny_model, prompts_file, str(kept), full_every=2)
    assert base_of(tmp_path / "checkpoints/iteration=00003.ckpt") is None


def test_a_full_disk_leaves_the_base_and_the_last_one(tmp_path, tiny_model, prompts_file, monkeypatch):
    write = TorchCheckpointIO.save_checkpoint

    def full(self, checkpoint, path, storage_options=None):
        if checkpoint["epoch"] == 2:
            raise OSError(28, "No space left on device")
        write(self, checkpoint, path, storage_options)

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", full)
    with pytest.raises(OSError, match="could not be written"):
        train(tmp_path, tiny_model, prompts_file, keep=1, full_every=4)
    assert bases(tmp_path) == {"1": None, "2": "1"}
    assert os.readlink(tmp_path / "checkpoints/last.ckpt") == "iteration=00002.ckpt"


def test_out_of_bounds_and_other_strategies_are_refused(tiny_model, prompts_file):
    with pytest.raises(ValueError, match="full_every must be at least 1"):
        IterationCheckpoint(full_every=0)
    saver = IterationCheckpoint(full_every=2)
    _, _, trainer = make_run(tiny_model, prompts_file, trainer={"callbacks": [saver], "enable_checkpointing": True})

    class Other(TorchCheckpointIO):
        pass

    trainer.strategy.checkpoint_io = Other()
    with pytest.raises(ValueError, match="full_every=2 is for one device or DDP"):
        saver.setup(trainer, None, "fit")
