"""Steps of TRL's GRPOTrainer, timed: ``peer_trl.py MODEL CASE STEPS bf16|fp32 [ROWS]``, so many in a minibatch.

A line a step, then the peak memory.
"""

import os
import sys
import tempfile
import time

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}

from datasets import Dataset
from transformers import LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import CASES, DEVICE, GROUP, PROMPTS, ROWS, Lengths, peak_gb, questions, score


class Clock(TrainerCallback):
    """Says how long each step took: all the optimizer steps that one round of responses is for."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """Begin."""
        self.last = time.perf_counter()

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """The end of an optimizer step."""
        if state.global_step % self.updates == 0:
            now = time.perf_counter()
            print(f"step {now - self.last:.3f}", flush=True)
            self.last = now


def main() -> None:
    """Train."""
    model, case, steps, dtype = sys.argv[1], CASES[sys.argv[2]], int(sys.argv[3]), sys.argv[4]
    bf16 = dtype == "bf16"
    step_size = PROMPTS * GROUP // case.updates
    rows_at_once = int(sys.argv[5]) if len(sys.argv) > 5 else ROWS or step_size
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=step_size // rows_at_once,
        steps_per_generation=PROMPTS * GROUP // rows_at_once,
        num_generations=GROUP,
        max_completion_length=case.max_tokens,
        max_steps=steps * case.updates,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=DEVICE == "cpu",
        bf16=bf16,
        learning_rate=1e-6,
        beta=0.0,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "bfloat16" if bf16 else "float32"},
        disable_tqdm=True,
        loss_type="dapo",
        temperature=1.0,
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in questions(PROMPTS * steps * 2, case)]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [score(c[0]["content"]) for c in completions],
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock(case.updates)],
    )
    generate = trainer.model.generate
    end = trainer.processing_class.eos_token_id

    def to_length(*args: object, **kwargs: object) -> object:
        return generate(*args, logits_processor=LogitsProcessorList([Lengths(case, end)]), **kwargs)

    trainer.model.generate = to_length
    trainer.train()
    print(f"peak_gb {peak_gb():.3f}")


if __name__ == "__main__":
    main()
