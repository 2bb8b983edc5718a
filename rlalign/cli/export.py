"""``rlalign export CKPT OUT``: a checkpoint as a Hugging Face folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlalign.checkpoints import newest_whole
from rlalign.cli.errors import sentences
from rlalign.cli.output import be_quiet
from rlalign.differences import read_checkpoint
from rlalign.models.merged import merged_weights
from rlalign.models.policy import Policy, PolicyConfig, locate_model
from rlalign.models.scalar import ScalarModel, merge_adapters
from rlalign.sharded_checkpoints import is_sharded, read_sharded


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint; nothing in it is run.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is none of ours.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint {path}.")
    if path.is_dir() and not is_sharded(path):
        whole = newest_whole(path if path.name == "checkpoints" else path / "checkpoints")
        if whole is None:
            raise ValueError(f"{path} is neither a checkpoint nor the folder of a run that has one.")
        path = whole
    if path.is_dir():
        checkpoint = read_sharded(path)
    else:
        try:
            checkpoint = read_checkpoint(path)
        except FileNotFoundError:
            raise
        except Exception as error:  # torch says "not a checkpoint" in many types of exception
            raise ValueError(f"{path} cannot be read as a checkpoint: {str(error).splitlines()[0]}") from error
    known = checkpoint.get("hyper_parameters", {}) if isinstance(checkpoint, dict) else {}
    if "policy" not in known and known.get("kind") != "reward_model":
        raise ValueError(f"{path} is not a checkpoint of rlalign: it does not say which policy it holds.")
    return checkpoint


def export(checkpoint_path: Path, out: Path, adapter: bool = False) -> str:
    """Write the model of a checkpoint, with its tokenizer, as ``from_pretrained`` reads it.

    Args:
        checkpoint_path: A checkpoint, or a run's folder, whose newest is taken.
        out: The folder to write; must be empty or not exist.
        adapter: Write the adapter alone; by default it is merged into the weights, which are then float32 where
            they had been of four bits.

    Returns:
        What loads the folder.

    Raises:
        ValueError: If ``adapter`` is asked of a model without one, or the checkpoint does not fit its own model.
        FileExistsError: If ``out`` has something in it.
    """
    checkpoint = load_checkpoint(checkpoint_path)
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; choose another folder.")
    known = checkpoint["hyper_parameters"]
    config = PolicyConfig(**known["policy"]) if "policy" in known else None
    if adapter and not (config and config.uses_lora):
        why = "is a reward model, which is exported whole" if config is None else "was trained without LoRA"
        raise ValueError(f"{checkpoint_path} {why}, so there is no adapter; leave --adapter out.")
    name, code = (config.model, config.trust_remote_code) if config else (known["model"], known["trust_remote_code"])
    tokenizer = AutoTokenizer.from_pretrained(locate_model(name), trust_remote_code=code)
    lora = {key: known[key] for key in ("lora_rank", "lora_alpha") if key in known} if config is None else {}
    module: Policy | ScalarModel = Policy(config) if config else ScalarModel(name, trust_remote_code=code, **lora)
    holds_not = f"{checkpoint_path} does not hold the weights of {name}"
    _load_weights(module, checkpoint, "policy." if config else "scorer.", holds_not)
    model: Any = module.lm
    if isinstance(model, PeftModel) and not adapter:
        trained = cast(Policy, module).model
        model = _dequantized(trained, config) if config and config.is_quantized else model.merge_and_unload()
    if isinstance(module, ScalarModel):
        model = merge_adapters(module, name, code) if lora.get("lora_rank") else model
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(str(out))
    tokenizer.save_pretrained(out)
    return "AutoModelForCausalLM.from_pretrained" if config else "the reward LearnedReward"


def _dequantized(trained: Any, config: PolicyConfig) -> PreTrainedModel:
    """A model of float32 weights that are those of four bits plus their adapters: rounding again would undo a part."""
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        locate_model(config.model), dtype=torch.float32, trust_remote_code=config.trust_remote_code
    )
    plain.load_state_dict(dict(merged_weights(trained)), strict=False)  # without a head that is tied to the embedding
    return plain


def _load_weights(module: Policy | ScalarModel, checkpoint: dict[str, Any], prefix: str, message: str) -> None:
    """Fill a model with the weights of a checkpoint, which may hold more than these.

    Raises:
        ValueError: If one is missing or of another shape.
    """
    ours, saved = module.state_dict(), checkpoint["state_dict"]
    theirs = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
    missing = [name for name, value in ours.items() if name not in theirs or theirs[name].shape != value.shape]
    if missing:
        raise ValueError(f"{message}: {missing[0]} is missing or differs.")
    module.load_state_dict({name: theirs[name] for name in ours})


def main(argv: Sequence[str]) -> int:
    """Parse the arguments and export."""
    parser = argparse.ArgumentParser(prog="rlalign export", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path, help="A checkpoint, file or folder, or the folder of a run.")
    parser.add_argument("out", type=Path, help="The folder to write.")
    parser.add_argument("--adapter", action="store_true", help="The adapter alone, not merged.")
    arguments = parser.parse_args(argv[1:])
    be_quiet()
    with sentences():
        loader = export(arguments.checkpoint, arguments.out, arguments.adapter)
    print(f"{arguments.out}: load it with {loader}.")
    return 0
