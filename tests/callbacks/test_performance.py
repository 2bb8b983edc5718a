import pytest
import torch
from torch import nn

from rlalign.callbacks.performance import Performance, measured_peak, multiplied_weights, peak_memory, real_tokens
from rlalign.data.demonstrations import collate_demonstrations
from rlalign.models.policy import Policy, PolicyConfig
from short_runs import run

NAMES = ("iteration_seconds", "trained_tokens_per_second", "tflops", "mfu", "peak_memory_mib")
SHARES = ("sample_share", "score_share", "update_share")


def test_an_iteration_is_told_in_parts(tiny_model, prompts_file, tmp_path):
    trainer, *_ = run(tiny_model, prompts_file, tmp_path, [Performance()], 2)
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("perf/")}
    assert all(values[f"perf/{name}"] > 0 for name in NAMES)
    assert sum(values[f"perf/{name}"] for name in SHARES) == pytest.approx(1, abs=0.02)
    assert 0 <= values["perf/padding_share"] < 1


def test_tokens_and_positions_are_those_of_the_minibatches(tiny_model, prompts_file, tmp_path):
    seen = []

    class Watch(Performance):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            lengths = batch.attention_mask.sum(1) - batch.response_mask.sum(1)
            prompts = dict(zip(batch.prompt_index.tolist(), lengths.tolist(), strict=True))
            needed = int(batch.response_mask.sum()) + sum(prompts.values())
            seen.append((int(batch.attention_mask.sum()), batch.attention_mask.numel(), needed))

    callback = Watch()
    trainer, *_ = run(tiny_model, prompts_file, tmp_path, [callback], 1)
    tokens, positions, needed = (sum(values) for values in zip(*seen, strict=True))
    assert trainer.callback_metrics["perf/padding_share"] == pytest.approx(1 - tokens / positions)
    seconds = tokens / float(trainer.callback_metrics["perf/trained_tokens_per_second"])
    forward, backward = callback._weights
    assert needed < tokens
    tflops = 2 * (forward + backward) * needed / seconds / 1e12
    assert float(trainer.callback_metrics["perf/tflops"]) == pytest.approx(tflops, rel=1e-4)
    assert float(trainer.callback_metrics["perf/mfu"]) == pytest.approx(tflops * 1e12 / callback.peak, rel=1e-4)


def test_weights_that_are_multiplied_by(tiny_model):
    policy = Policy(PolicyConfig(tiny_model), with_reference=True)
    matrices = sum(p.numel() for n, p in policy.lm.named_parameters() if p.ndim == 2 and "embed_tokens" not in n)
    head = policy.model.get_output_embeddings().weight.numel()  # is tied to the embedding, and a product all the same
    assert multiplied_weights(policy) == (matrices + head, 2 * (matrices + head))
    adapted = Policy(PolicyConfig(tiny_model, lora_rank=2))
    adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert multiplied_weights(adapted) == (matrices + head + adapters, matrices + head + 2 * adapters)
    assert multiplied_weights(nn.Embedding(3, 4)) == (0, 0)


def test_the_peak_is_that_of_a_product():
    slow, fast = 1e6, 1e15
    assert slow < measured_peak(torch.device("cpu"), torch.float32) < fast
    assert 10 < peak_memory(torch.device("cpu")) < 1e7


def test_validation_is_no_part_of_an_iteration(tiny_model, prompts_file, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rlalign.callbacks.performance.measured_peak", lambda device, dtype: 1e12)
    monkeypatch.setattr("rlalign.callbacks.performance.time.perf_counter", lambda: now[0])

    class Slow(Performance):
        """Comes first; everything takes no time but a minibatch, 3 s, and validation, 100 s."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            now[0] += 3.0

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            now[0] += 100.0

    trainer, *_ = run(tiny_model, prompts_file, tmp_path, [Slow()], 1, steps=2, data={"num_held_out": 4})
    assert now[0] > 100
    assert float(trainer.callback_metrics["perf/iteration_seconds"]) == 6.0


def test_what_is_no_padding_in_demonstrations():
    items = [([5, 6, 7, 8], [False, False, True, True]), ([5, 6], [False, True]), ([9, 9, 9], [False, True, True])]
    apart = collate_demonstrations(items, pad_id=0)
    assert real_tokens(apart).sum(1).tolist() == [4, 2, 3]
    packed = collate_demonstrations(items, pad_id=0, packed_width=6)
    assert real_tokens(packed).sum(1).tolist() == [6, 3]
    apart.loss_mask = torch.zeros_like(apart.loss_mask)  # of a rank without data
    assert real_tokens(apart).sum() == 0
    assert real_tokens(object()) is None
