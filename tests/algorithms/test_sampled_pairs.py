"""Methods that learn from pairs of their own responses: losses restated, invariance, annotators, resuming."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from distributed import run_distributed
from rlalign.algorithms.direct_alignment_po import DirectAlignmentPO
from rlalign.algorithms.online_dpo import OnlineDPO
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.annotators import FileAnnotator, RewardAnnotator, SelfAnnotator, ValueAnnotator
from runs import make_run, weights


def double_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02)


def run(model, prompts, cls, trainer=None, **options):
    """A run in float64; the algorithms here have no kl_coef."""
    module, data, fitted = make_pairs_run(model, prompts, cls, trainer, **options)
    fitted.fit(module, data)
    return module, data, fitted


def make_pairs_run(model, prompts, cls, trainer=None, **options):
    class WithoutKL(cls):
        def __init__(self, kl_coef=None, **kwargs):
            super().__init__(**kwargs)

    trainer = {"precision": "64-true", **(trainer or {})}
    return make_run(model, prompts, WithoutKL, trainer, **({"optimizer": double_sgd} | options))


class Watch:
    """Keeps each minibatch with the log-probabilities, the loss and its gradient."""

    def score(self, batch, reference=False):
        self.scores = super().score(batch, reference)
        return self.scores

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        logprobs = self.scores.logprobs
        (gradient,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
        self.seen = [*getattr(self, "seen", []), (batch, logprobs.detach(), loss.item(), gradient)]
        return loss


def watched(cls):
    return type(f"Watched{cls.__name__}", (Watch, cls), {})


def restated(beta: float, batch, logprobs) -> tuple[float, torch.Tensor]:
    """-log sigmoid(beta (log-ratio of the better - of the other)), a mean over pairs, and its gradient, in floats."""
    total, gradient = 0.0, torch.zeros_like(logprobs)
    num_pairs = batch.step_sequences / 2
    for i in range(0, len(batch), 2):
        sums = []
        for row in (i, i + 1):
            own = int(batch.response_lengths[row])
            reference = 0.0 if batch.ref_logprobs is None else float(batch.ref_logprobs[row, :own].sum())
            sums.append(float(logprobs[row, :own].sum()) - reference)
        wrong = 1 / (1 + math.exp(beta * (sums[0] - sums[1])))
        total -= math.log(1 - wrong) / num_pairs
        for row, sign in ((i, -1), (i + 1, 1)):
            gradient[row, : int(batch.response_lengths[row])] = sign * beta * wrong / num_pairs
    return total, gradient


@pytest.mark.parametrize(
    ("cls", "options", "beta"),
    [(OnlineDPO, {"beta": 0.3}, 0.3), (DirectAlignmentPO, {}, 1 / 0.8), (DirectAlignmentPO, {"tau": 2.0}, 0.5)],
)
def test_the_loss_and_its_gradient_restated_kf30(tiny_model, prompts_file, cls, options, beta):
    module, _, _ = run(tiny_model, prompts_file, watched(cls), {"max_epochs": 2}, step_size=8, **options)
    assert len(module.seen) == 4
    for batch, logprobs, loss, gradient in module.seen:
        assert len(batch) >= 2
        want, slopes = restated(beta, batch, logprobs)
        assert loss == pytest.approx(want, abs=1e-9)
        torch.testing.assert_close(gradient, slopes, atol=1e-9, rtol=1e-7)
    assert (module.seen[0][0].ref_logprobs is None) == (cls is DirectAlignmentPO)


def test_the_first_loss_of_online_dpo_is_ln_2_kf31(tiny_model, prompts_file):
    module, _, _ = run(tiny_model, prompts_file, watched(OnlineDPO))
    assert module.seen[0][2] == pytest.approx(math.log(2), abs=1e-12)


def test_a_pair_is_the_best_and_the_worst_of_a_prompt(tiny_model, prompts_file):
    module, data, trainer = run(tiny_model, prompts_file, watched(OnlineDPO))
    ((batch, *_),) = module.seen
    groups = {}
    for r in data.last_rollouts:
        groups.setdefault(r.prompt_index, []).append(r.reward)
    got = {}
    for i in range(0, len(batch), 2):
        assert batch.prompt_index[i] == batch.prompt_index[i + 1]
        got[int(batch.prompt_index[i])] = (float(batch.rewards[i]), float(batch.rewards[i + 1]))
    want = {p: (max(r), min(r)) for p, r in groups.items() if max(r) > min(r)}
    assert got == want
    assert trainer.callback_metrics["rollout/pairs"] == len(want)


def test_ties_give_no_pair_and_are_counted_and_an_unscored_response_is_in_none(tiny_model, prompts_file):
    def some(example: dict, response: str) -> float | None:
        if example["prompt"].startswith(("0", "1", "2", "3", "4", "5")):
            return 1.0
        return None if response.startswith(tuple("abcdef")) else float(sum(map(ord, response)) % 4)

    module, data, trainer = run(
        tiny_model, prompts_file, watched(OnlineDPO), rewards={"some": some}, prompts_per_iteration=12
    )
    ((batch, *_),) = module.seen
    assert batch.valid.all()
    assert batch.loss_mask.any(-1).all()
    tied = sum(len({r.reward for r in data.last_rollouts if r.prompt_index == p} - {None}) < 2 for p in range(12))
    assert tied >= 8, "prompts 0 to 5, 10 and 11"
    assert trainer.callback_metrics["rollout/prompts_without_pair"] == tied
    assert trainer.callback_metrics["rollout/pairs"] == 12 - tied == len(batch) / 2


@pytest.mark.parametrize("cls", [OnlineDPO, DirectAlignmentPO])
def test_an_iteration_of_ties_moves_nothing_and_logs_no_nan(tiny_model, prompts_file, cls):
    same = {"same": lambda example, response: 1.0}
    module, _, trainer = run(tiny_model, prompts_file, cls, rewards=same, step_size=8)
    start = torch.cat([p.detach().flatten() for p in Policy(PolicyConfig(tiny_model)).lm.parameters()])
    assert torch.equal(weights(module), start.double())
    assert trainer.callback_metrics["train/empty_steps"] == 2
    assert not any(torch.as_tensor(v).isnan() for v in trainer.callback_metrics.values())


METHODS = {
    "online_dpo": (OnlineDPO, {"loss": "hinge", "beta": 0.5}),
    "direct": (DirectAlignmentPO, {}),
    "negatives": (DirectAlignmentPO, {"unlikely_share": 0.3, "perturbed_share": 0.3, "stale_share": 0.4}),
}


def cut(model, prompts, method, minibatch, accumulate, devices=1):
    cls, options = METHODS[method]
    trainer = {"accumulate_grad_batches": accumulate, "max_epochs": 3, "devices": devices}
    trainer |= {"strategy": "ddp"} if devices > 1 else {}
    sizes = {"step_size": 12, "minibatch_size": minibatch, "prompts_per_iteration": 6}
    module, _, fitted = run(model, prompts, cls, trainer, **sizes, **options)
    return weights(module), {k: float(v) for k, v in fitted.callback_metrics.items() if k.startswith("train/")}


@pytest.mark.parametrize("method", METHODS)
def test_minibatches_and_padding_change_no_weight_kf1_kf2_kf5(tiny_model, prompts_file, method):
    want, metrics = cut(tiny_model, prompts_file, method, 12, 1)
    got, other = cut(tiny_model, prompts_file, method, 2, 6)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
    for name, value in metrics.items():
        assert other[name] == pytest.approx(value, abs=1e-6), name


def differences(rank, model, prompts, expected):
    return [float((cut(model, prompts, method, 2, 3, 2)[0] - want).abs().max()) for method, want in expected.items()]


def test_ranks_change_no_weight_kf54_kf83(tiny_model, prompts_file):
    expected = {method: cut(tiny_model, prompts_file, method, 12, 1)[0] for method in METHODS}
    for of_rank in run_distributed(differences, tiny_model, prompts_file, expected):
        assert max(of_rank) < 1e-10


def test_a_run_with_older_responses_resumes_to_the_bit_kf75(tiny_model, prompts_file, tmp_path):
    """The store of older responses is in the checkpoint: prompts come again after it."""
    options = {"stale_share": 1.0, "prompts_per_iteration": 6}
    long, short = ({"precision": "32-true", "max_epochs": epochs} for epochs in (4, 2))
    whole, _, _ = run(tiny_model, prompts_file, DirectAlignmentPO, long, **options)
    _, _, trainer = run(tiny_model, prompts_file, DirectAlignmentPO, short, **options)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    module, data, trainer = make_pairs_run(tiny_model, prompts_file, DirectAlignmentPO, long, **options)
    trainer.fit(module, data, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert trainer.callback_metrics["rollout/pairs_stale"] > 0
    assert torch.equal(weights(module), weights(whole))
    stores = [m.negatives.state_dict()["stale"] for m in (module, whole)]
    assert [(p, ids.tolist(), s) for p, ids, s in stores[0]] == [(p, ids.tolist(), s) for p, ids, s in stores[1]]


def test_kinds_of_pairs_are_counted_and_made_rows_have_a_measured_kl(tiny_model, prompts_file):
    """What no policy sampled here is scored before the iteration where the KL is measured."""
    cls = watched(DirectAlignmentPO)
    options = {"perturbed_share": 1.0, "prompts_per_iteration": 12}
    module, data, trainer = make_pairs_run(tiny_model, prompts_file, cls, **options)
    module.needs_kl_step = True
    trainer.fit(module, data)
    metrics = trainer.callback_metrics
    assert metrics["rollout/pairs_perturbed"] == metrics["rollout/pairs"] > 0
    assert metrics["rollout/pairs_annotated"] == metrics["rollout/pairs_stale"] == 0
    assert 0 < metrics["train/kl_step"] < 1
    ((batch, *_),) = module.seen
    assert (batch.sample_index[1::2] == -1).all()
    assert not (batch.sample_index[::2] == -1).any()


def scores_of(model, prompts, annotator, **options):
    """The annotator's scores of an iteration, and its rollouts."""

    class Kept(OnlineDPO):
        def advantages(self, rollouts, group_size):
            self.kept = super().advantages(rollouts, group_size)
            return self.kept

    module, data, trainer = run(model, prompts, Kept, annotator=annotator, **options)
    return module.kept.squeeze(1), data.last_rollouts, trainer


def test_rewards_annotate_unless_something_else_is_asked(tiny_model, prompts_file):
    assert isinstance(run(tiny_model, prompts_file, OnlineDPO)[0].annotator, RewardAnnotator)
    scores, rollouts, _ = scores_of(tiny_model, prompts_file, RewardAnnotator())
    assert scores.tolist() == [r.reward for r in rollouts]


def test_the_policy_judges_by_agreement_or_by_likelihood(tiny_model, prompts_file):
    first = {"prompts_per_iteration": 12, "rewards": {"first": FirstLetter()}}
    scores, rollouts, _ = scores_of(tiny_model, prompts_file, SelfAnnotator(), **first)
    for start in range(0, len(rollouts), 4):
        answers = [r.text[:1] or None for r in rollouts[start : start + 4]]
        for answer, score in zip(answers, scores[start : start + 4].tolist(), strict=True):
            assert math.isnan(score) if answer is None else score == answers.count(answer) / 4
    assert len(set(scores.tolist())) > 1
    scores, rollouts, _ = scores_of(tiny_model, prompts_file, SelfAnnotator("likelihood"))
    assert scores.tolist() == pytest.approx([float(r.logprobs.double().mean()) for r in rollouts], abs=1e-5)
    with pytest.raises(ValueError, match="by must be 'agreement' or 'likelihood', got 'votes'"):
        SelfAnnotator("votes")


class FirstLetter:
    def __call__(self, example: dict, response: str) -> float:
        return 1.0

    def answer(self, response: str) -> str | None:
        return response[:1] or None


def test_a_value_function_annotates(tiny_model, prompts_file, tmp_path):
    """Its folder is a classifier of transformers, read at the last token of prompt and response."""
    torch.manual_seed(1)
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).eval()
    classifier.save_pretrained(tmp_path / "value")
    scores, rollouts, _ = scores_of(tiny_model, prompts_file, ValueAnnotator(str(tmp_path / "value"), batch_size=3))
    for score, rollout in zip(scores.tolist(), rollouts, strict=True):
        ids = torch.cat([rollout.prompt_ids, rollout.token_ids]).long()
        with torch.no_grad():
            hidden = classifier.model(input_ids=ids[None]).last_hidden_state[0, -1]
        assert score == pytest.approx(float(classifier.score(hidden)), abs=1e-4)


def test_choices_from_a_file_annotate_what_they_name(tiny_model, prompts_file, tmp_path):
    """First a run that shows what is sampled, then the same with somebody's choices among that."""
    _, rollouts, _ = scores_of(tiny_model, prompts_file, RewardAnnotator())
    lines = Path(prompts_file).read_text().splitlines()
    prompts = {i: json.loads(line)["prompt"] for i, line in enumerate(lines)}
    by_prompt: dict[int, list[str]] = {}
    for r in rollouts:
        by_prompt.setdefault(r.prompt_index, []).append(r.text.strip())
    first, second, third, _ = by_prompt
    a, b, c = (list(dict.fromkeys(by_prompt[prompt])) for prompt in (first, second, third))
    rows = [
        {"prompt": prompts[first], "preferred": a[1], "other": a[0]},
        {"prompt": prompts[second], "responses": b[:3], "ranks": [2, 1, 2]},
        {"prompt": prompts[third], "preferred": "never sampled", "other": c[0]},
    ]
    path = tmp_path / "choices.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores, again, trainer = scores_of(tiny_model, prompts_file, FileAnnotator(str(path)))
    assert [r.token_ids.tolist() for r in again] == [r.token_ids.tolist() for r in rollouts]
    want = {(first, a[1]): 1, (first, a[0]): -1, (second, b[1]): 2, (second, b[0]): -1, (second, b[2]): -1}
    want[third, c[0]] = -1
    for rollout, score in zip(again, scores.tolist(), strict=True):
        expected = want.get((rollout.prompt_index, rollout.text.strip()))
        assert math.isnan(score) if expected is None else score == expected
    assert trainer.callback_metrics["rollout/pairs"] == 2
    assert trainer.callback_metrics["rollout/prompts_without_pair"] == 2
    assert trainer.callback_metrics["rollout/annotated_share"] < 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"preferred": "a", "other": "b"}, "row 1 has no prompt"),
        ({"prompt": "p", "preferred": "a"}, "row 1 must have the texts 'preferred' and 'other'"),
        ({"prompt": "p", "responses": ["a", "b"], "ranks": [1]}, "a number in 'ranks' for each of its 2 responses"),
        ({"prompt": "p", "responses": ["a", 3], "ranks": [1, 2]}, "or a list of texts 'responses'"),
    ],
)
def test_a_file_of_choices_that_cannot_be_read_is_refused(tmp_path, row, message):
    path = tmp_path / "choices.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        FileAnnotator(str(path))
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        FileAnnotator(str(tmp_path / "none.jsonl"))


def test_what_cannot_be_is_refused(tiny_model, prompts_file):
    for options, message in [
        ({"tau": 0.0}, "tau must be above 0"),
        ({"stale_share": 0.7, "unlikely_share": 0.4}, "1 at most together"),
        ({"noise": 0.0}, r"noise must be in \(0, 1\]"),
        ({"max_stale": 0}, "max_stale at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            DirectAlignmentPO(policy={"model": tiny_model}, **options)
    for fixed in ("reduction", "importance_cap"):
        with pytest.raises(TypeError, match=fixed):
            OnlineDPO(policy={"model": tiny_model}, **{fixed: None})
    with pytest.raises(ValueError, match=r"data\.group_size=1 leaves no two responses"):
        run(tiny_model, prompts_file, OnlineDPO, group_size=1)
    with pytest.raises(ValueError, match=r"minibatch_size=1 .* must be a multiple of 2"):
        run(tiny_model, prompts_file, OnlineDPO, {"accumulate_grad_batches": 16})


def test_the_kl_is_measured_on_what_the_policy_sampled(tiny_model, prompts_file):
    """A perturbed response is no sample of the policy: its tokens would count as ones that it draws."""
    probes = []

    class Watched(DirectAlignmentPO):
        def kl_step(self, probe):
            probes.append(probe)
            return super().kl_step(probe)

    module, data, trainer = make_pairs_run(
        tiny_model, prompts_file, Watched, perturbed_share=1.0, prompts_per_iteration=12
    )
    module.needs_kl_step = True
    trainer.fit(module, data)
    (probe,) = probes
    assert len(probe) == trainer.callback_metrics["rollout/pairs"] > 0
    assert (probe.sample_index >= 0).all()
    assert probe.old_logprobs is not None
