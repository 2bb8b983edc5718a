import json
from pathlib import Path

import lightning
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distributed import run_distributed
from rlalign.algorithms.sft import SFT
from rlalign.data.demonstrations import DemonstrationDataModule, collate_demonstrations, pack
from rlalign.models.policy import PolicyConfig
from runs import make_trainer, sgd


@pytest.fixture
def demonstrations(tmp_path) -> str:
    """Eleven pairs of many lengths."""
    path = tmp_path / "demonstrations.jsonl"
    rows = [{"prompt": f"what is {i}?"[: 3 + i], "completion": "abcdefghij"[: 1 + (i * 3) % 7]} for i in range(11)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fit(model: str, data: str, minibatch: int = 4, accumulate: int = 1, devices: int = 1, epochs: int = 2, **options):
    lightning.seed_everything(5)
    module = SFT(policy=PolicyConfig(model), optimizer=sgd)
    source = DemonstrationDataModule(data, data, step_size=4, minibatch_size=minibatch, **options)
    trainer = make_trainer(
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        precision="64-true",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
    )
    trainer.fit(module, source)
    weights = torch.cat([p.detach().flatten() for p in module.policy.lm.parameters()])
    return weights, {k: float(v) for k, v in trainer.callback_metrics.items()}, trainer.global_step


def test_a_step_is_the_mean_over_its_response_tokens_restated(tiny_model, demonstrations):
    """Three steps of four, four and three demonstrations; the loss of each by transformers' own forward pass."""
    lightning.seed_everything(5)
    module = SFT(policy=PolicyConfig(tiny_model), optimizer=sgd)
    data = DemonstrationDataModule(demonstrations, step_size=4)
    trainer = make_trainer()
    trainer.fit(module, data)
    assert trainer.global_step == 3
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    optimizer = sgd(model.parameters())
    rows = [json.loads(line) for line in Path(demonstrations).read_text().splitlines()]
    for items in data.plan.steps(11, 5, 0):
        total, count = 0.0, 0
        for row in (rows[i] for i in items):
            prompt = tokenizer(row["prompt"])["input_ids"]
            response = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
            ids = torch.tensor([prompt + response])
            logp = model(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            total = total - logp.gather(-1, torch.tensor(response).unsqueeze(-1)).sum()
            count += len(response)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    for mine, theirs in zip(module.policy.lm.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def test_cutting_and_packing_change_no_weight_kf1_kf47(tiny_model, demonstrations):
    want, metrics, steps = fit(tiny_model, demonstrations)
    assert steps == 6
    for settings in (
        {"minibatch": 2, "accumulate": 2},
        {"minibatch": 1, "accumulate": 4},
        {"packing": True},
        {"packing": True, "packed_width": 60},
        {"minibatch": 2, "accumulate": 2, "packing": True},
    ):
        got, got_metrics, _ = fit(tiny_model, demonstrations, **settings)
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
        assert got_metrics["val/loss"] == pytest.approx(metrics["val/loss"], abs=1e-7)
        assert got_metrics["train/loss"] == pytest.approx(metrics["train/loss"], abs=1e-6)


def on_rank(rank: int, model: str, data: str, want: torch.Tensor):
    got, metrics, _ = fit(model, data, minibatch=1, accumulate=2, devices=2)
    return float((got - want).abs().max()), metrics["val/loss"]


def test_ranks_change_no_weight_kf83_kf85(tiny_model, demonstrations):
    want, metrics, _ = fit(tiny_model, demonstrations)
    for difference, loss in run_distributed(on_rank, tiny_model, demonstrations, want):
        assert difference < 1e-10
        assert loss == pytest.approx(metrics["val/loss"], abs=1e-7)


def test_it_learns(tiny_model, demonstrations):
    losses = [fit(tiny_model, demonstrations, epochs=n)[1]["val/loss"] for n in (1, 8)]
    assert losses[1] < 0.7 * losses[0]


def test_packing_fills_rows():
    rows = pack([5, 9, 3, 7, 2], 10)
    assert sorted(i for row in rows for i in row) == [0, 1, 2, 3, 4]
    assert all(sum([5, 9, 3, 7, 2][i] for i in row) <= 10 for row in rows)
    assert len(rows) == 3
    batch = collate_demonstrations([([1, 2, 3], [False, True, True]), ([4, 5], [True, True])], 0, 6)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, True]], "nothing predicts a first token"


def test_what_is_too_long_or_empty_is_dropped_and_counted_kf43_kf94(tiny_model, tmp_path):
    path = tmp_path / "d.jsonl"
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a" * 30, "completion": "b"},
        {"prompt": "c", "completion": None},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    module, data = SFT(policy=PolicyConfig(tiny_model)), DemonstrationDataModule(str(path), max_tokens=20)
    make_trainer().fit(module, data)
    assert data.train_data.kept == [0]
    assert data.train_data.dropped == {"over 20 tokens": 1, "empty response": 1}
    nothing = DemonstrationDataModule(str(path), max_tokens=1)
    with pytest.raises(ValueError, match="No demonstration is left of 3"):
        make_trainer().fit(SFT(policy=PolicyConfig(tiny_model)), nothing)


def test_other_columns_and_rows_held_out(tiny_model, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"q": "a", "r": "b" * (i + 1)}) + "\n" for i in range(9)))
    columns = {"prompt": "q", "response": "r"}
    data = DemonstrationDataModule(str(path), num_held_out=3, columns=columns, step_size=2)
    make_trainer().fit(SFT(policy=PolicyConfig(tiny_model)), data)
    assert (len(data.train_data), len(data.val_data)) == (6, 3)
    train, val = ({len(d[i][0]) for i in range(len(d))} for d in (data.train_data, data.val_data))
    assert not train & val


def test_system_prompt_and_rendering_reach_the_model(tmp_path, tiny_model):
    embedded = PolicyConfig("embedded")
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    texts = {}
    for name, options in {"plain": {"rendering": "plain"}, "chat": {}, "system": {"system_prompt": "Add."}}.items():
        module, data = SFT(policy=embedded), DemonstrationDataModule(str(path), step_size=1, **options)
        make_trainer().fit(module, data)
        texts[name] = module.tokenizer.decode(data.train_data[0][0])
    assert texts["plain"] == "1+1=2<|end|>"
    assert texts["chat"] == "<|user|>1+1=<|end|><|assistant|>2<|end|>"
    assert "Add." in texts["system"]
