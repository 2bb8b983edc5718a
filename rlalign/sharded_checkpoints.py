"""Checkpoints of several ranks, put together without running anything that is in them."""

import contextlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

_META, _PARTS = "meta.pt", "checkpoint"  # of Lightning: FSDP2's other contents; DeepSpeed's folder
_DESCRIBES = {
    "pathlib": {"Path", "PosixPath"},
    "torch": {"Size", "device"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""By module, what a description of tensors is made of."""


def is_sharded(path: Path) -> bool:
    """Whether a folder is a checkpoint of FSDP2 or DeepSpeed."""
    return (path / _META).is_file() or (path / _PARTS).is_dir()


def read_sharded(path: Path) -> dict[str, Any]:
    """Whole weights, as ``state_dict``, and ``hyper_parameters`` of a checkpoint that is a folder.

    Raises:
        ValueError: If the folder holds something else, or anything but data.
    """
    try:
        return _of_fsdp2(path) if (path / _META).is_file() else _of_deepspeed(path)
    except (OSError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError, AssertionError) as error:
        raise ValueError(f"{path} cannot be read as a sharded checkpoint: {str(error).splitlines()[0]}") from error


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Makes what describes tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _DESCRIBES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no description of a tensor")


class _Reader(dcp.FileSystemReader):
    """Torch's, whose description of what is where is data alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found: Metadata = _Unpickler(file).load()
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _of_fsdp2(path: Path) -> dict[str, Any]:
    reader = _Reader(path)
    described = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in described.items()
        if name.startswith("state_dict.") and isinstance(each, TensorStorageMetadata)
    }
    _load_state_dict(weights, storage_reader=reader, no_dist=True)
    found: dict[str, Any] = torch.load(path / _META, map_location="cpu", weights_only=True)
    return found | {"state_dict": {name.removeprefix("state_dict."): value for name, value in weights.items()}}


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def _of_deepspeed(path: Path) -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    known = [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]
    described = sorted((path / _PARTS).glob("*model_states.pt"))
    if not described:
        raise ValueError(f"{path} has no file *model_states.pt of DeepSpeed.")
    with _data_alone(), torch.serialization.safe_globals(known), open(os.devnull, "w") as nothing:
        found: dict[str, Any] = torch.load(described[0], map_location="cpu", weights_only=True)
        with contextlib.redirect_stdout(nothing):  # it tells of every file
            weights = get_fp32_state_dict_from_zero_checkpoint(str(path), _PARTS)
    return found | {"state_dict": {name.removeprefix("_forward_module."): value for name, value in weights.items()}}


@contextmanager
def _data_alone() -> Iterator[None]:
    """Have every ``torch.load`` read data, whatever it is told."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})
