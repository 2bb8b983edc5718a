"""``rlalign export CKPT OUT``: a checkpoint as a Hugging Face folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoTokenizer

from rlalign.checkpoints import newest_whole
from rlalign.cli.errors import sentences
from rlalign.models.policy import Policy, PolicyConfig, locate_model

PREFIX = "policy."


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint; nothing in it is run.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is none of ours.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint {path}.")
    if path.is_dir():
        whole = newest_whole(path if path.name == "checkpoints" else path / "checkpoints")
        if whole is None or whole.is_dir():
            raise ValueError(
                f"{path} is no checkpoint file. A run's folder works; a sharded checkpoint is first to be consolidated."
            )
        path = whole
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch says "not a checkpoint" in many types of exception
        raise ValueError(f"{path} cannot be read as a checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(checkpoint, dict) or "policy" not in checkpoint.get("hyper_parameters", {}):
        raise ValueError(f"{path} is not a checkpoint of rlalign: it does not say which policy it holds.")
    return checkpoint


def export(checkpoint_path: Path, out: Path, adapter: bool = False) -> None:
    """Write the policy of a checkpoint, with its tokenizer, as ``from_pretrained`` reads it.

    Args:
        checkpoint_path: A checkpoint, or a run's folder, whose newest is taken.
        out: The folder to write; must be empty or not exist.
        adapter: Write the LoRA adapter alone; by default it is merged into the weights.

    Raises:
        ValueError: If ``adapter`` is asked of a policy without one, or the checkpoint does not fit its own policy.
        FileExistsError: If ``out`` has something in it.
    """
    checkpoint = load_checkpoint(checkpoint_path)
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; choose another folder.")
    config = PolicyConfig(**checkpoint["hyper_parameters"]["policy"])
    if adapter and not config.uses_lora:
        raise ValueError(f"{checkpoint_path} was trained without LoRA, so there is no adapter; leave --adapter out.")
    policy = Policy(config)
    ours = policy.state_dict()
    theirs = {k.removeprefix(PREFIX): v for k, v in checkpoint["state_dict"].items() if k.startswith(PREFIX)}
    missing = [name for name, value in ours.items() if name not in theirs or theirs[name].shape != value.shape]
    if missing:
        raise ValueError(
            f"{checkpoint_path} does not hold the weights of {config.model}: {missing[0]} is missing or differs."
        )
    policy.load_state_dict({name: theirs[name] for name in ours})
    model = policy.lm
    if isinstance(model, PeftModel) and not adapter:
        model = model.merge_and_unload()
    model.save_pretrained(str(out))
    AutoTokenizer.from_pretrained(locate_model(config.model)).save_pretrained(out)


def main(argv: Sequence[str]) -> int:
    """Parse the arguments and export."""
    parser = argparse.ArgumentParser(prog="rlalign export", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path, help="A .ckpt file, or the folder of a run.")
    parser.add_argument("out", type=Path, help="The folder to write.")
    parser.add_argument("--adapter", action="store_true", help="The LoRA adapter alone, not merged.")
    arguments = parser.parse_args(argv[1:])
    with sentences():
        export(arguments.checkpoint, arguments.out, arguments.adapter)
    print(f"{arguments.out}: load it with AutoModelForCausalLM.from_pretrained.")
    return 0
