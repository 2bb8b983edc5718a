"""Checkpoints of several ranks become a folder of transformers, and nothing in them is run."""

import os
import pickle
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed import run_distributed
from rlalign.callbacks import IterationCheckpoint
from rlalign.cli.export import export
from rlalign.models.sharding import gathered
from runs import make_run
from strategies import make_strategy


def on_rank(rank: int, name: str, options: dict, model: str, prompts: str, folder: str) -> Any:
    settings = {
        "devices": 2,
        "strategy": make_strategy(name, **options),
        "enable_checkpointing": True,
        "callbacks": [IterationCheckpoint()],
        "default_root_dir": folder,
    }
    adam = {"optimizer": lambda p: torch.optim.AdamW(p, lr=2e-3)}
    module, data, trainer = make_run(model, prompts, trainer=settings, step_size=8, **adam)
    trainer.fit(module, data)
    return {name: gathered(p).numpy().copy() for name, p in module.policy.lm.named_parameters()}


@pytest.mark.parametrize(
    ("name", "options"),
    [("fsdp2", {"save_distributed_checkpoint": True}), ("deepspeed_zero2", {}), ("deepspeed_zero3", {})],
    ids=["fsdp2", "zero2", "zero3"],
)
def test_a_sharded_checkpoint_is_exported(tiny_model, prompts_file, tmp_path, name, options):
    want, _ = run_distributed(on_rank, name, options, tiny_model, prompts_file, str(tmp_path / "run"))
    export(tmp_path / "run", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {n for n, _ in model.named_parameters()} == set(want)
    for parameter, value in model.named_parameters():
        assert torch.equal(value.detach(), torch.from_numpy(want[parameter])), parameter


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Any) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", ["fsdp2", "deepspeed"])
def test_what_is_no_data_is_refused(tmp_path, kind):
    folder, sprung = tmp_path / "iteration=00001.ckpt", tmp_path / "sprung"
    if kind == "fsdp2":
        folder.mkdir()
        torch.save({}, folder / "meta.pt")
        (folder / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    else:
        (folder / "checkpoint").mkdir(parents=True)
        torch.save({"module": Trap(sprung)}, folder / "checkpoint" / "mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match="cannot be read as a sharded checkpoint"):
        export(folder, tmp_path / "out")
    assert not sprung.exists()
