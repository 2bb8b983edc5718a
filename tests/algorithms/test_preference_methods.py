"""Methods on preferences: their steps restated, and the same however a step is cut."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rlalign.data.preferences as preferences_file
from distributed import run_distributed
from rlalign.algorithms.dpo import DPO
from rlalign.algorithms.kto import KTO
from rlalign.algorithms.orpo import ORPO
from rlalign.algorithms.reward_model import RewardModel
from rlalign.algorithms.simpo import SimPO
from rlalign.cli.export import export
from rlalign.data.labelled import LabelledDataModule
from rlalign.data.offline import pad_rows
from rlalign.data.preferences import PreferenceDataModule
from rlalign.models.fused import fuse
from rlalign.models.policy import PolicyConfig
from rlalign.rewards.learned import LearnedReward, render
from runs import make_trainer, sgd

ROWS = [
    {
        "prompt": "what is this?"[: 3 + i],
        "chosen": "abcdefghij"[: 1 + (i * 3) % 7],
        "rejected": "jihgfedcba"[: 1 + (i * 2) % 5],
        "margin": 0.25 * i,
    }
    for i in range(7)
]
"""Seven pairs of many lengths: steps of four and three."""


@dataclass
class Method:
    """A method with its options, and its loss of two pairs' log-probabilities in plain formulas."""

    cls: type
    options: dict[str, Any] = field(default_factory=dict)
    loss: Callable[..., torch.Tensor] | None = None
    mean: bool = False
    data: type = PreferenceDataModule

    def module(self, model: str, **more: Any) -> Any:
        """The module."""
        policy = PolicyConfig(model, share_prompts=False, fused_layers=False)  # as transformers computes, to the bit
        base = {"model": model} if self.cls is RewardModel else {"policy": policy}
        return self.cls(**(base | {"optimizer": sgd} | self.options | more))


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def margin(c, r, rc, rr):
    return (c - rc) - (r - rr)


def odds(x):
    return torch.exp(x) / (1 - torch.exp(x))


def gentle(parameters):
    return torch.optim.SGD(parameters, lr=0.002)


METHODS = {
    "dpo": Method(DPO, {"beta": 0.5}, lambda *x: -torch.log(sigmoid(0.5 * margin(*x)))),
    "cdpo": Method(
        DPO,
        {"label_smoothing": 0.1},
        lambda *x: -0.9 * torch.log(sigmoid(0.1 * margin(*x))) - 0.1 * torch.log(sigmoid(-0.1 * margin(*x))),
    ),
    "robust": Method(
        DPO,
        {"loss": "robust", "label_smoothing": 0.1},
        lambda *x: (-0.9 * torch.log(sigmoid(0.1 * margin(*x))) + 0.1 * torch.log(sigmoid(-0.1 * margin(*x)))) / 0.8,
    ),
    "hinge": Method(DPO, {"loss": "hinge"}, lambda *x: torch.clamp(1 - 0.1 * margin(*x), min=0)),
    "ipo": Method(DPO, {"loss": "ipo", "beta": 0.5, "optimizer": gentle}, lambda *x: (margin(*x) - 1) ** 2),
    "ipo_of_means": Method(
        DPO, {"loss": "ipo", "beta": 0.5, "token_reduction": "mean"}, lambda *x: (margin(*x) - 1) ** 2, mean=True
    ),
    "simpo": Method(SimPO, {"gamma": 0.7}, lambda c, r, *_: -torch.log(sigmoid(2 * c - 2 * r - 0.7)), mean=True),
    "orpo": Method(
        ORPO, {"weight": 0.3}, lambda c, r, *_: -c - 0.3 * torch.log(sigmoid(torch.log(odds(c) / odds(r)))), mean=True
    ),
    "kto": Method(KTO, {"beta": 0.5, "undesirable_weight": 0.7}, data=LabelledDataModule),
    "reward_model": Method(RewardModel, {"centering": 0.1}),
}
OF_PAIRS = [name for name, method in METHODS.items() if method.loss is not None]


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """The file of the pairs."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def trained(module: Any) -> torch.Tensor:
    """All trained weights."""
    return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])


def fit(name: str, model: str, data: str, minibatch=4, accumulate=1, devices=1, epochs=2, more=None, **options):
    """Weights, metrics and the module after two epochs of two steps, in float64."""
    lightning.seed_everything(5)
    method = METHODS[name]
    module = method.module(model, **(more or {}))
    source = method.data(data, data, **({"step_size": 4, "minibatch_size": minibatch} | options))
    trainer = make_trainer(
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        precision="64-true",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
    )
    trainer.fit(module, source)
    return trained(module), {k: float(v) for k, v in trainer.callback_metrics.items()}, module


def tokenised(tokenizer: Any, row: dict[str, str], response: str) -> tuple[torch.Tensor, int]:
    """Ids of a whole row, and how many of them are prompt."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    return torch.tensor([[*prompt, *tokenizer(response)["input_ids"], tokenizer.eos_token_id]]), len(prompt)


def logprob(model: Any, ids: torch.Tensor, start: int, mean: bool = False) -> torch.Tensor:
    """Of a response, by transformers' own forward pass."""
    logp = model(ids).logits[0].log_softmax(-1)[start - 1 : -1].gather(-1, ids[0, start:, None])
    return logp.mean() if mean else logp.sum()


@pytest.mark.parametrize("name", OF_PAIRS)
def test_the_steps_are_the_formula_s_kf30_kf32(tiny_model, pairs, name):
    """Two passes of two steps, each a mean over its pairs, redone by transformers and the formula."""
    got, _, module = fit(name, tiny_model, pairs)
    method, rows = METHODS[name], [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model, ref = (AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64) for _ in "ab")
    optimizer = method.options.get("optimizer", sgd)(model.parameters())
    for epoch in range(2):
        for items in module.trainer.datamodule.plan.steps(7, 5, epoch):
            losses = []
            for row in (rows[i] for i in items):
                four = [
                    logprob(m, *tokenised(tokenizer, row, row[key]), mean=method.mean)
                    for m in (model, ref)
                    for key in ("chosen", "rejected")
                ]
                losses.append(method.loss(four[0], four[1], four[2].detach(), four[3].detach()))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    want = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = torch.cat([p.detach().flatten() for p in ref.parameters()])
    assert (want - start).abs().max() > 1e-4, "the run must move the weights"
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)


def test_the_steps_of_kto_are_the_formula_s_kf33(tiny_model, pairs):
    """The reference point of a step is that of its own mismatched responses, before it moves."""
    got, metrics, module = fit("kto", tiny_model, pairs)
    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    singles = [(row, row[key], key == "chosen") for row in rows for key in ("chosen", "rejected")]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model, ref = (AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64) for _ in "ab")
    optimizer, points = sgd(model.parameters()), []

    def ratio(row: dict, response: str) -> torch.Tensor:
        ids, start = tokenised(tokenizer, row, response)
        return logprob(model, ids, start) - logprob(ref, ids, start).detach()

    for epoch in range(2):
        for items in module.trainer.datamodule.plan.steps(14, 5, epoch):
            step = [singles[i] for i in items]
            crossed = []
            for place, (row, _, _) in enumerate(step):
                later = [step[(place + k) % len(step)] for k in range(1, len(step))]
                other = next((s for s in later if s[0]["prompt"] != row["prompt"]), None)
                if other is not None:
                    crossed.append(ratio(row, other[1]).item())
            points.append(max(0.0, sum(crossed) / len(crossed)))
            losses = []
            for row, response, good in step:
                gain = 0.5 * (ratio(row, response) - points[-1])
                losses.append(1 - sigmoid(gain) if good else 0.7 * (1 - sigmoid(-gain)))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    assert max(points) > 1e-3, "the reference point must count"
    want = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
    sizes = [len(items) for items in module.trainer.datamodule.plan.steps(14, 5, 1)]
    last = sum(p * n for p, n in zip(points[-len(sizes) :], sizes, strict=True)) / 14
    assert metrics["train/reference_point"] == pytest.approx(last, abs=1e-6)


def test_the_steps_of_a_reward_model_are_the_formula_s_kf48(tiny_model, pairs):
    got, _, module = fit("reward_model", tiny_model, pairs)
    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).double().eval()
    assert fuse(model)  # as theirs, which normalise in float32, the steps would be others by 1e-7
    optimizer = sgd(model.parameters())

    def score(row: dict, response: str) -> torch.Tensor:
        ids = torch.tensor([render(tokenizer, row["prompt"], response)])
        assert ids[0, -1] == tokenizer.eos_token_id
        return model.score(model.base_model(ids).last_hidden_state)[0, -1, 0]

    for epoch in range(2):
        for items in module.trainer.datamodule.plan.steps(7, 5, epoch):
            losses = []
            for row in (rows[i] for i in items):
                c, r = score(row, row["chosen"]), score(row, row["rejected"])
                losses.append(-torch.log(sigmoid(c - r - row["margin"])) + 0.1 * (c + r) ** 2)
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    want = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", METHODS)
def test_minibatches_and_padding_change_nothing_kf1_kf2_kf83(tiny_model, pairs, name, monkeypatch):
    want, metrics, _ = fit(name, tiny_model, pairs)

    def check(**settings):
        got, got_metrics, _ = fit(name, tiny_model, pairs, **settings)
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
        for key, value in metrics.items():
            if key.startswith(("train/", "val/")):
                assert got_metrics[key] == pytest.approx(value, abs=1e-6), key

    check(minibatch=2, accumulate=2)
    check(minibatch=1, accumulate=4)

    def wider(rows, left=False, fill=0):
        extra = torch.full((len(rows), 2), fill)
        parts = [extra, pad_rows(rows, left, fill)]
        return torch.cat(parts if left else parts[::-1], 1)

    monkeypatch.setattr(preferences_file, "pad_rows", wider)
    check(minibatch=2, accumulate=2)


def on_rank(rank: int, model: str, data: str, expected: dict) -> dict[str, float]:
    """By how much each method differs on two ranks."""
    found = {}
    for name, (want, metrics) in expected.items():
        got, got_metrics, _ = fit(name, model, data, minibatch=1, accumulate=2, devices=2)
        off = [abs(got_metrics[k] - v) for k, v in metrics.items() if k.startswith(("train/", "val/"))]
        found[name] = max(float((got - want).abs().max()) * 1e4, *off)
    return found


def test_ranks_change_nothing_kf83_kf85(tiny_model, pairs):
    names = ("dpo", "ipo_of_means", "simpo", "orpo", "kto", "reward_model")
    expected = {name: fit(name, tiny_model, pairs)[:2] for name in names}
    for of_rank in run_distributed(on_rank, tiny_model, pairs, expected):
        assert max(of_rank.values()) < 1e-6, of_rank


@pytest.mark.parametrize("policy", [{}, {"lora_rank": 4}, {"share_prompts": True}])
def test_dpo_begins_at_ln_2_kf31(tiny_model, pairs, policy):
    module = DPO(policy=PolicyConfig(tiny_model, **policy), optimizer=sgd)
    trainer = make_trainer()
    trainer.fit(module, PreferenceDataModule(pairs, step_size=7))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert logged["train/reward_margin"] == pytest.approx(0, abs=1e-5)
    assert logged["train/grad_norm"] > 0


def test_the_metrics_of_pairs_are_those_of_held_out_pairs(tiny_model, pairs):
    _, metrics, module = fit("dpo", tiny_model, pairs)
    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    tokenizer, ref = (
        AutoTokenizer.from_pretrained(tiny_model),
        AutoModelForCausalLM.from_pretrained(tiny_model).double(),
    )
    margins, chosen = [], []
    for row in rows:
        c, r = (tokenised(tokenizer, row, row[key]) for key in ("chosen", "rejected"))
        four = [float(logprob(m, *x).detach()) for m in (module.policy.model, ref) for x in (c, r)]
        margins.append(0.5 * ((four[0] - four[2]) - (four[1] - four[3])))
        chosen.append(four[0])
    assert metrics["val/reward_margin"] == pytest.approx(sum(margins) / 7, abs=1e-5)
    assert metrics["val/preference_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 7, abs=1e-6)
    assert metrics["val/chosen_logprob"] == pytest.approx(sum(chosen) / 7, abs=1e-4)
    names = {"loss", "reward_margin", "preference_accuracy", "chosen_reward", "rejected_reward", "chosen_logprob"}
    for stage in ("train", "val"):
        assert {f"{stage}/{name}" for name in names | {"rejected_logprob"}} <= set(metrics)


@pytest.mark.parametrize("name", ["dpo", "kto", "reward_model"])
def test_a_resumed_run_is_the_same_to_the_bit(tiny_model, pairs, tmp_path, name):
    def runner(epochs):
        return make_trainer(max_epochs=epochs), METHODS[name].module(tiny_model)

    def source():
        return METHODS[name].data(pairs, step_size=4, steps_per_epoch=1, seed=1)

    lightning.seed_everything(5)
    trainer, whole = runner(5)
    trainer.fit(whole, source())
    lightning.seed_everything(5)
    trainer, first = runner(3)
    trainer.fit(first, source())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    lightning.seed_everything(77)
    trainer, second = runner(5)
    trainer.fit(second, source(), ckpt_path=tmp_path / "half.ckpt")
    assert not torch.equal(trained(first), trained(whole))
    assert torch.equal(trained(second), trained(whole))


def test_one_prompt_leaves_kto_without_a_mismatch_and_without_a_nan_kf33(tiny_model, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "chosen": "b" * i, "rejected": "c"}) + "\n" for i in (1, 2, 3)))
    weights, metrics, _ = fit("kto", tiny_model, str(path))
    assert weights.isfinite().all()
    assert metrics["train/reference_point"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_weights_of_kto_move_the_two_kinds_apart(tiny_model, pairs):
    _, even, _ = fit("kto", tiny_model, pairs)
    _, good, _ = fit("kto", tiny_model, pairs, more={"undesirable_weight": 0.0})
    assert good["val/desirable_reward"] > even["val/desirable_reward"]
    assert good["val/undesirable_reward"] > even["val/undesirable_reward"]


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo", "kto", "reward_model"])
def test_it_learns_the_pairs(tiny_model, pairs, name):
    losses = [fit(name, tiny_model, pairs, epochs=n)[1]["val/loss"] for n in (1, 5)]
    assert losses[1] < losses[0]


def test_an_exported_reward_model_scores_the_same_kf48_kf49(tiny_model, pairs, tmp_path):
    for model, file, rank in (("embedded", "chat", 0), (tiny_model, "plain", 0), (tiny_model, "adapted", 4)):
        lightning.seed_everything(5)
        module, trainer = RewardModel(model, optimizer=sgd, lora_rank=rank), make_trainer()
        trainer.fit(module, PreferenceDataModule(pairs, pairs, step_size=4))
        trainer.save_checkpoint(tmp_path / f"{file}.ckpt")
        assert export(tmp_path / f"{file}.ckpt", tmp_path / file) == "the reward LearnedReward"
        files = {path.name for path in (tmp_path / file).iterdir()}
        assert {"model.safetensors", "config.json", "tokenizer.json"} <= files
        config = json.loads((tmp_path / file / "config.json").read_text())
        assert config["architectures"] == ["LlamaForSequenceClassification"]
        assert config["pad_token_id"] == module.tokenizer.pad_token_id
        assert bool(module.tokenizer.chat_template) == ("chat_template.jinja" in files)
        reward = LearnedReward(str(tmp_path / file), batch_size=3)
        responses = [row[key] for row in ROWS for key in ("chosen", "rejected")]
        got = reward([{"prompt": row["prompt"]} for row in ROWS for _ in "ab"], responses)
        batch = module.trainer.datamodule.batch(module.trainer.datamodule.val_data, range(7), range(7))
        with torch.no_grad():
            values = module.scorer(batch.input_ids, batch.attention_mask)
        last = [int(mask.nonzero().max()) for mask in batch.attention_mask]
        want = [float(values[row, column]) for row, column in enumerate(last)]
        assert got == pytest.approx(want, abs=1e-5)
        assert len({round(score, 3) for score in got}) > 7, "scores must differ"
    with pytest.raises(ValueError, match="exported whole, so there is no adapter"):
        export(tmp_path / "chat.ckpt", tmp_path / "other", adapter=True)
    with pytest.raises(FileExistsError, match="chat is not empty"):
        export(tmp_path / "chat.ckpt", tmp_path / "chat")


def test_dropout_of_a_reward_model_is_in_training_only(tiny_model, pairs):
    plain, dropped = (fit("reward_model", tiny_model, pairs, more={"dropout": p}) for p in (0.0, 0.5))
    again = fit("reward_model", tiny_model, pairs, more={"dropout": 0.5})
    assert not torch.equal(plain[0], dropped[0])
    assert torch.equal(again[0], dropped[0])
    ids = torch.arange(3, 9).unsqueeze(0)
    scorer = dropped[2].scorer.eval()
    assert torch.equal(scorer(ids, ids.bool()), scorer(ids, ids.bool()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPO(loss="sigmod"), r"There is no loss 'sigmod' \(did you mean 'sigmoid'\?\)"),
        (lambda: DPO(loss="hinge", label_smoothing=0.1), "loss=hinge knows no label_smoothing"),
        (lambda: DPO(loss="ipo", label_smoothing=0.1), "loss=ipo knows no label_smoothing"),
        (lambda: DPO(loss="robust", label_smoothing=0.5), "label_smoothing must be in"),
        (lambda: DPO(beta=0), "beta must be positive"),
        (lambda: DPO(token_reduction="average"), "reduction must be 'sum' or 'mean', got 'average'"),
        (lambda: SimPO(gamma=-1), "gamma must be 0 or more"),
        (lambda: ORPO(weight=-1), "weight must be 0 or more"),
        (lambda: KTO(desirable_weight=-1), "Weights must be 0 or more"),
        (lambda: RewardModel(centering=-1), "centering must be 0 or more"),
        (lambda: RewardModel(dropout=1), "dropout must be in"),
    ],
)
def test_options_out_of_bounds_are_refused_at_once_kf32(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_steps_without_a_kind_of_response_log_no_mean_of_nothing(tiny_model, tmp_path):
    path = tmp_path / "labelled.jsonl"
    rows = [{"prompt": f"is it {i}?", "response": "abc"[: 1 + i % 3], "label": i != 3} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = []

    class Watched(KTO):
        def on_train_epoch_end(self):
            seen.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})

    lightning.seed_everything(5)
    module = Watched(policy=PolicyConfig(tiny_model), optimizer=sgd)
    make_trainer(max_epochs=3).fit(module, LabelledDataModule(str(path), step_size=2, steps_per_epoch=1))
    assert sum("train/undesirable_reward" in metrics for metrics in seen) in (1, 2, 3)
    assert all(math.isfinite(value) for metrics in seen for value in metrics.values())
