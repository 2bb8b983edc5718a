#!/usr/bin/env python3
"""The planner's prediction against the peak memory of real runs on this machine's CPU.

usage: check_plan.py [--only NAME ...] [--parts]

Each case trains a model of random weights for a few steps in a process of its own, whose C library gives back what is
freed; its peak counts from after a run of the same kind on the embedded model. Closes with ``cases N worst W%``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OFFLINE = {"sft", "dpo", "kto", "simpo", "orpo", "reward_model"}


@dataclass(frozen=True)
class Case:
    """A run, small enough for any machine."""

    method: str
    model: tuple[int, int, int, int, int, int]
    """Hidden, layers, heads, keys, inner width, vocabulary."""
    rows: int
    prompt: int
    response: int
    precision: str = "32-true"
    lora: int = 0
    base: str = "float32"
    group: int = 8
    minibatches: int = 2
    checkpointing: bool = False
    options: tuple[str, ...] = field(default=())


SMALL = (256, 6, 4, 2, 704, 4096)  # 5 million weights
MEDIUM = (384, 8, 6, 2, 1024, 8192)  # 15 million
LARGE = (576, 10, 9, 3, 1536, 16384)  # 43 million
TINY = (128, 2, 4, 2, 256, 1024)
CASES = {
    "sft-tiny": Case("sft", TINY, 8, 48, 64),
    "grpo-medium": Case("grpo", MEDIUM, 16, 64, 128),
    "sft-medium-lora": Case("sft", MEDIUM, 16, 64, 192, lora=16),
    "dpo-medium-bf16": Case("dpo", MEDIUM, 8, 64, 128, "bf16-mixed"),
    "grpo-large-bf16": Case("grpo", LARGE, 16, 96, 160, "bf16-mixed"),
    "dapo-large": Case("dapo", LARGE, 8, 64, 192),
    "gspo-small": Case("gspo", SMALL, 32, 128, 128),
    "ppo-medium": Case("ppo", MEDIUM, 16, 64, 96, group=1),
    "ppo-small-bf16": Case("ppo", SMALL, 32, 64, 128, "bf16-mixed", group=1),
    "sft-large": Case("sft", LARGE, 16, 64, 128),
    "sft-large-saving": Case("sft", LARGE, 32, 64, 192, checkpointing=True),
    "dpo-large-lora": Case("dpo", LARGE, 8, 64, 128, "bf16-mixed", lora=32, base="bfloat16"),
    "kto-medium": Case("kto", MEDIUM, 32, 64, 128),
    "reward-large": Case("reward_model", LARGE, 8, 64, 128),
    "grpo-large-lora": Case("grpo", LARGE, 32, 64, 128, lora=16),
    "grpo-small-long": Case("grpo", SMALL, 8, 64, 384),
}


def prediction(case: Case, folder: Path, prompt: int) -> Any:
    """What the planner says."""
    from rlalign.planning.memory import Setting, Workload, estimate
    from rlalign.planning.methods import METHODS
    from rlalign.planning.shapes import shape_of

    setting = Setting(
        "lora" if case.lora else "full",
        case.lora or 16,
        case.precision,  # type: ignore[arg-type]
        case.base,  # type: ignore[arg-type]
        on_cpu=True,
    )
    sampled = case.rows * case.minibatches
    work = Workload(case.rows, prompt, case.response, case.group, sampled, case.minibatches > 1, case.checkpointing)
    return estimate(shape_of(str(folder)), METHODS[case.method], setting, work)


def make_model(case: Case, folder: Path) -> int:
    """A model of random weights and its data; the tokens of a prompt."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from rlalign.assets import EMBEDDED_MODEL

    hidden, layers, heads, keys, inner, vocabulary = case.model
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=1e-3)  # near uniform: responses run to their limit
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.save_pretrained(folder)

    def length(text: str) -> int:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        return len(ids["input_ids"] if hasattr(ids, "keys") else ids)

    text = "x" * (case.prompt - length("x") + 1)
    answer = "y" * (case.response - 1)  # and the end token
    with (folder / "data.jsonl").open("w") as file:
        for number in range(256):
            question = f"{number:03d}{text[3:]}"
            row = {
                "prompt": question,
                "answer": answer,
                "response": answer,
                "chosen": answer,
                "rejected": "z" * len(answer),
            }
            file.write(json.dumps(row) + "\n")
    return length(text)


def model_option(case: Case, model: str) -> str:
    """Which model the run starts from."""
    return f"--model.init_args.{'' if case.method == 'reward_model' else 'policy.'}model={model}"


def arguments(case: Case, folder: Path) -> list[str]:
    """The command line of the run."""
    policy = "model.init_args" if case.method == "reward_model" else "model.init_args.policy"
    words = [
        "fit",
        "--config",
        str(ROOT / "configs/base.yaml"),
        "--config",
        str(ROOT / f"configs/tiny/{case.method}.yaml"),
    ]
    words += [
        f"--{policy}.model={folder}",
        f"--data.init_args.train={folder / 'data.jsonl'}",
        "--data.init_args.val=null",
    ]
    words += [
        f"--data.init_args.minibatch_size={case.rows}",
        f"--data.init_args.step_size={case.rows * case.minibatches}",
    ]
    words += [f"--trainer.accumulate_grad_batches={case.minibatches}", f"--trainer.precision={case.precision}"]
    words += [
        "--trainer.max_epochs=2",
        "--trainer.accelerator=cpu",
        "--trainer.callbacks=null",
        "--run",
        str(folder / "run"),
    ]
    if case.lora:
        words += [f"--{policy}.lora_rank={case.lora}", f"--{policy}.dtype={case.base}"]
    if case.checkpointing:
        words.append(f"--{policy}.activation_checkpointing=true")
    if case.method == "sft":
        words.append("--data.init_args.columns={prompt: prompt, response: response}")
    if case.method in OFFLINE:
        words += ["--data.init_args.steps_per_epoch=1", "--trainer.check_val_every_n_epoch=100"]
    else:
        rows = case.rows * case.minibatches
        words += [
            f"--data.init_args.group_size={case.group}",
            f"--data.init_args.prompts_per_iteration={rows // case.group}",
        ]
        words += [f"--data.init_args.sampling.max_new_tokens={case.response}"]
        words.append('--data.init_args.rewards={"correct": "check_plan.varied"}')
    return [*words, *case.options]


def varied(example: dict[str, Any], response: str) -> float:
    """A reward that differs within groups, so that no method leaves them out."""
    return float(sum(response.encode()) % 2)


def run_case(name: str, folder: Path) -> None:
    """In a process of its own: train, and print the peak."""
    import rlalign.algorithms.module
    import rlalign.cli.classes
    import rlalign.cli.trainer
    from rlalign.cli import main

    def status(field: str) -> float:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
        return float(line.split()[1]) * 1024

    rlalign.algorithms.module.keep_freed_memory = lambda: False  # else what was freed would count
    small = replace(CASES[name], rows=8, minibatches=1, response=8)
    code = main([*arguments(small, folder), model_option(small, "embedded"), "--run", str(folder / "small")])
    before = status("VmRSS")  # with all that is loaded late
    code = code or main(arguments(CASES[name], folder))
    print(json.dumps({"code": code, "peak": status("VmHWM") - before, "libraries": before}))


def measure(name: str, folder: Path) -> float:
    """Peak bytes of a case."""
    command = [sys.executable, __file__, "--child", name, str(folder)]
    gives_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
    environment = {**os.environ, **gives_back, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["code"] == 0
    except (ValueError, IndexError, AssertionError):
        raise SystemExit(f"{name} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}") from None
    return float(found["peak"])


def main() -> None:
    """Compare them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME", help="Cases; all by default.")
    parser.add_argument("--parts", action="store_true", help="Print the parts of each prediction.")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return run_case(options.child[0], Path(options.child[1]))
    print("| case | weights | precision | measured | predicted | off | phase |\n|---|---|---|---|---|---|---|")
    worst, names = 0.0, options.only or [name for name in CASES if name != "sft-tiny"]  # too small to tell anything
    for name in names:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            prompt = make_model(case, folder)
            found = prediction(case, folder, prompt)
            peak = measure(name, folder)
        off = found.peak / peak - 1
        worst = max(worst, abs(off))
        kind = f"LoRA {case.lora} on {case.base}" if case.lora else "all"
        print(
            f"| {name} | {kind} | {case.precision} | {peak / 2**20:,.0f} MiB | {found.peak / 2**20:,.0f} MiB "
            f"| {off:+.1%} | {found.peak_phase} |",
            flush=True,
        )
        if options.parts:
            for phase, parts in found.phases.items():
                shown = ", ".join(f"{part} {size / 2**20:.0f}" for part, size in parts.items())
                print(f"    {phase} {found.total(phase) / 2**20:.0f}: {shown}", flush=True)
    print(f"cases {len(names)} worst {worst:.1%}")


if __name__ == "__main__":
    main()
