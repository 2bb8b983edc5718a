"""``rlalign plan``: what fits on which GPUs, and how to run it."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlalign.planning.methods import METHODS

if TYPE_CHECKING:
    from rlalign.planning.memory import Peft
    from rlalign.planning.plan import Option, Request


_WIDTH = 130
_SHORT = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "reference": "ref",
    "critic": "critic",
    "activations": "activ",
    "logits": "logits",
    "KV cache": "KV",
    "gathered layers": "layers",
    "gathered weights": "whole",
    "optimizer's workspace": "work",
}
"""Part -> what its column is called."""


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        prog="rlalign plan",
        description="Memory of each GPU by part and strategy, the largest minibatch, and the command to run; from the "
        "shape of the model alone, without a network or a GPU.",
        allow_abbrev=False,
    )
    made.add_argument("--model", required=True, help="A folder, a config.json, embedded, or a name such as qwen2.5-7b.")
    made.add_argument("--gpus", required=True, help="COUNTxNAME-MEMORY: 8xA100-40GB, 1x24GB, 2xH100.")
    made.add_argument("--method", required=True, choices=list(METHODS), metavar="NAME", help=", ".join(METHODS))
    made.add_argument("--peft", choices=("auto", "full", "lora", "qlora"), default="auto", help="What is trained.")
    made.add_argument("--lora-rank", type=int, default=16)
    made.add_argument("--prompt", type=int, default=512, help="Tokens of a prompt.")
    made.add_argument("--response", type=int, default=1024, help="Tokens of a response.")
    made.add_argument("--group", type=int, default=8, help="Responses to a prompt.")
    made.add_argument("--step-size", type=int, default=512, help="Responses, or pairs, of an optimizer step.")
    made.add_argument("--sampled", type=int, default=256, help="Responses in flight on a GPU.")
    made.add_argument("--precision", choices=("bf16-mixed", "32-true"), default="bf16-mixed")
    made.add_argument("--json", action="store_true", help="Print everything as JSON.")
    return made


def main(argv: Sequence[str]) -> int:
    """Print the plan; 1 if nothing fits."""
    options = parser().parse_args(argv[1:])
    numbers = ("lora_rank", "prompt", "response", "group", "step_size", "sampled")
    bad = [name for name in numbers if getattr(options, name) < 1]
    if bad:
        print(f"rlalign: error: --{bad[0].replace('_', '-')} must be at least 1.", file=sys.stderr)
        return 2
    from rlalign.planning.hardware import parse_gpus
    from rlalign.planning.plan import Request, best, options_of
    from rlalign.planning.shapes import shape_of

    try:
        gpus, shape = parse_gpus(options.gpus), shape_of(options.model)
    except (ValueError, OSError) as error:
        print(f"rlalign: error: {error}", file=sys.stderr)
        return 2
    scalar = METHODS[options.method].scalar
    if scalar and options.peft == "qlora":
        print("rlalign: error: --peft qlora: a reward model trains all of its weights, or LoRA.", file=sys.stderr)
        return 2
    pefts: tuple[Peft, ...] = ("full", "lora", "qlora") if options.peft == "auto" else (options.peft,)
    request = Request(
        shape,
        options.method,
        gpus,
        options.prompt,
        options.response,
        options.group,
        options.step_size,
        options.sampled,
        options.precision,
        options.lora_rank,
        pefts,
    )
    ways = options_of(request)
    chosen = best(ways)
    print(as_json(request, ways, chosen)) if options.json else show(request, ways, chosen)
    return 0 if chosen else 1


def as_json(request: "Request", ways: "Sequence[Option]", chosen: "Option | None") -> str:
    """Everything, bytes a GPU."""
    from rlalign.planning.plan import command

    def one(way: "Option") -> dict[str, object]:
        return {
            "strategy": way.strategy.name,
            "peft": way.peft,
            "activation_checkpointing": way.checkpointing,
            "minibatch_size": way.rows,
            "max_rows": way.sampled,
            "peak": way.found.peak,
            "peak_phase": way.found.peak_phase,
            "host": way.found.host,
            "parts": way.found.parts,
        }

    found = {"model": request.shape.name, "parameters": request.shape.parameters, "gpus": str(request.gpus)}
    found |= {"method": request.method, "ways": [one(way) for way in ways]}
    found["recommended"] = one(chosen) | {"command": command(request, chosen)} if chosen else None
    return json.dumps(found, indent=2)


def show(request: "Request", ways: "Sequence[Option]", chosen: "Option | None") -> None:
    """As tables."""
    from rich.console import Console
    from rich.table import Table

    from rlalign.planning.hardware import GIB
    from rlalign.planning.plan import command

    found = Console()
    console = found if found.is_terminal else Console(width=_WIDTH)
    console.print(
        f"{request.method} of {request.shape.name} ({request.shape.parameters / 1e9:.2f} billion weights) on "
        f"{request.gpus}, prompts of {request.prompt} and responses of {request.response} tokens; GiB of a GPU.",
        highlight=False,
    )
    present = {name for way in ways for name in way.found.parts}
    columns = {name: short for name, short in _SHORT.items() if name in present and console.width >= _WIDTH}
    table = Table("strategy", "trains", "batch", "peak in", "peak", *columns.values(), padding=(0, 0), pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    plain = {(way.strategy, way.peft) for way in ways if way.fits and not way.checkpointing}
    for way in ways:
        if way.checkpointing and (way.strategy, way.peft) in plain:
            continue  # it is not needed
        label = way.strategy.name + (" +ckpt" if way.checkpointing else "")
        sizes = [way.found.parts.get(name, 0.0) for name in columns]
        cells = [f"{size / GIB:.1f}" if size else "" for size in sizes]
        style = "bold" if way is chosen else "" if way.fits else "dim"
        batch = str(way.rows) if way.fits else "-"
        peak = f"{way.found.peak / GIB:.1f}"
        table.add_row(label, way.peft, batch, way.found.peak_phase, peak, *cells, style=style)
    console.print(table)
    console.print("batch: the largest minibatch of a GPU that fits; +ckpt: with activation checkpointing.", style="dim")
    if chosen is None:
        least = min(ways, key=lambda way: way.found.peak)
        console.print(
            f"Nothing fits: the least is {least.found.peak / GIB:.1f} GiB a GPU, by {least.strategy.name} with "
            f"{least.peft}, in its phase '{least.found.peak_phase}'. Take more or larger GPUs, a smaller model or "
            "shorter responses.",
            highlight=False,
        )
        return
    host = f"; {chosen.found.host / GIB:.0f} GiB of each rank lie in the host's memory" if chosen.found.host else ""
    console.print(
        f"Recommended: {chosen.strategy.text} ({chosen.strategy.name}), {chosen.peft}{host}.", highlight=False
    )
    print(command(request, chosen))
