import pytest
import torch
from test_invariance_of_training import fit

from rlalign.algorithms.dapo import DAPO
from rlalign.algorithms.grpo import GRPO
from rlalign.models.policy import Policy


def of_some_prompts(example: dict, response: str) -> float:
    """Differs within the groups of half of the prompts."""
    return len(response) % 5 / 2 if int(example["prompt"].partition("+")[0]) % 2 else 1.0


def of_none(example: dict, response: str) -> float:
    return 1.0


@pytest.fixture
def rows(monkeypatch):
    """Counts the rows that the policy scores with a gradient."""
    seen = []
    forward = Policy.forward

    def counted(self, input_ids, *args, **kwargs):
        if torch.is_grad_enabled():
            seen.append(len(input_ids))
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(Policy, "forward", counted)
    return seen


@pytest.fixture
def reward(monkeypatch):
    return lambda function: monkeypatch.setattr("test_invariance_of_training.length_reward", function)


@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
@pytest.mark.parametrize(("minibatch", "accumulate"), [(8, 1), (2, 4)])
def test_the_weights_are_the_same_and_fewer_rows_are_computed(
    tiny_model, prompts_file, rows, reward, reduction, minibatch, accumulate
):
    reward(of_some_prompts)
    found = []
    for skip in (False, True):
        rows.clear()
        loss = {"kl_coef": 0.0, "reduction": reduction, "skip_zero_advantages": skip}
        weights, _, metrics = fit(tiny_model, prompts_file, loss, minibatch, accumulate, iterations=2)
        found.append((weights, sum(rows), metrics))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-12, rtol=0)
    assert found[1][1] < 0.8 * found[0][1]
    assert "rollout/skipped_share" not in found[0][2]
    assert found[1][2]["rollout/skipped_share"] == pytest.approx(0.5, abs=0.26)
    assert all(torch.as_tensor(value).isfinite() for value in found[1][2].values())


@pytest.mark.parametrize("coefficient", ["kl_coef", "entropy_coef"])
def test_nothing_is_skipped_where_another_term_has_a_gradient(tiny_model, prompts_file, rows, reward, coefficient):
    reward(of_some_prompts)
    loss = {"kl_coef": 0.0, coefficient: 0.1, "skip_zero_advantages": True}
    _, _, metrics = fit(tiny_model, prompts_file, loss, 8, 1)
    assert sum(rows) == 16
    assert "rollout/skipped_share" not in metrics


def test_an_iteration_with_nothing_to_learn_has_its_metrics(tiny_model, prompts_file, rows, reward):
    reward(of_none)
    _, _, metrics = fit(tiny_model, prompts_file, {"kl_coef": 0.0, "skip_zero_advantages": True}, 8, 1)
    assert sum(rows) == 16
    assert metrics["rollout/skipped_share"] == 1
    assert metrics["train/entropy"] > 0


def test_it_is_off_unless_asked_for_and_every_group_method_takes_it():
    assert not GRPO().skips_zero_advantages
    assert DAPO(skip_zero_advantages=True).skips_zero_advantages
