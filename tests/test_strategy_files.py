"""The files of configs/strategies: each runs, and spreads what it says."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.tensor import DTensor

from distributed import run_distributed
from runs import make_run
from strategies import CONFIGS, make_strategy

FILES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
SPREADS_WEIGHTS = {"fsdp2", "fsdp2_tp", "deepspeed_zero3", "deepspeed_zero3_offload"}
KEEPS_MOMENTS = {"ddp"}


def held(parameters: Iterator[torch.nn.Parameter]) -> tuple[int, int]:
    """Numbers on this rank, and over all."""
    own = whole = 0
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            own, whole = own + parameter.to_local().numel(), whole + parameter.numel()
        elif hasattr(parameter, "ds_id"):
            own, whole = own + parameter.ds_tensor.numel(), whole + parameter.ds_numel
        else:
            own, whole = own + parameter.numel(), whole + parameter.numel()
    return own, whole


def moments(optimizer: Any) -> int:
    """Numbers of Adam's that this rank keeps."""
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [state["exp_avg"] for state in inner.state.values() if "exp_avg" in state]
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)


def on_rank(rank: int, name: str, model: str, prompts: str) -> tuple[float, float, bool]:
    settings = {"devices": 2, "strategy": make_strategy(name), "gradient_clip_val": 1.0}
    adam = {"optimizer": lambda p: torch.optim.AdamW(p, lr=2e-3)}
    module, data, trainer = make_run(model, prompts, trainer=settings, step_size=8, kl_coef=0.1, **adam)
    trainer.fit(module, data)
    own, whole = held(module.policy.lm.parameters())
    kept = moments(trainer.optimizers[0])
    return own / whole, kept / whole, module.policy.is_whole


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("ddp_")])
def test_it_runs_and_spreads_what_it_says(tiny_model, prompts_file, name):
    for weights, moments_, is_whole in run_distributed(on_rank, name, tiny_model, prompts_file):
        assert weights == pytest.approx(0.5 if name in SPREADS_WEIGHTS else 1.0, abs=0.07)
        assert moments_ == pytest.approx(1.0 if name in KEEPS_MOMENTS else 0.5, abs=0.07)
        assert is_whole == (name not in SPREADS_WEIGHTS)


def test_fsdp1_is_refused_kf87(tiny_model, prompts_file):
    module, _, _ = make_run(tiny_model, prompts_file)
    module._trainer = SimpleNamespace(strategy=FSDPStrategy(), precision="32-true")
    with pytest.raises(ValueError, match=r"FSDPStrategy \(FSDP1\) .* use rlalign.strategies.fsdp2.FSDP2Strategy"):
        module.configure_model()
