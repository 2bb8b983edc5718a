import pytest
import torch

from rlalign.functional.estimators import best_of_n_correct, majority_correct, pass_at_k
from rlalign.metrics.curves import best_of_n_curves, draw_best_of_n
from rlalign.rollouts.batch import Rollout


def rollout(prompt, text, correct, tokens, score=None, reward=0.0):
    ids = torch.zeros(tokens, dtype=torch.int32)
    return Rollout(
        prompt_index=prompt,
        sample_index=0,
        prompt_ids=ids,
        token_ids=ids,
        logprobs=torch.zeros(tokens),
        truncated=tokens > 5,
        text=text,
        prefill="",
        reward=reward,
        correct=correct,
        components={},
        score=score,
    )


FIRST = [("4", True, 2, 0.9), ("5", False, 3, 0.8), ("5", False, 4, 0.7), ("4", True, 3, 0.6), ("4", True, 2, None)]
SECOND = [("1", False, 6, 0.1), ("2", True, 1, 0.2), ("3", False, 1, 0.3), ("3", False, 1, 0.3), ("3", False, 2, 0.3)]
ROLLOUTS = [rollout(prompt, *cells) for prompt, group in enumerate((FIRST, SECOND)) for cells in group]


def read(responses):
    return [str(response) for response in responses]


def test_curves_are_the_means_of_what_each_prompt_gives():
    curves = best_of_n_curves(ROLLOUTS, read)
    assert (curves["prompts"], curves["samples"], curves["n"]) == (2, 5, [1, 2, 4, 5])
    assert curves["tokens"] == pytest.approx([2.5, 5.0, 10.0, 12.5])  # 25 tokens in 10 responses
    assert curves["plain"] == 0.4
    for i, n in enumerate(curves["n"]):
        groups = [list(zip(*group, strict=True)) for group in (FIRST, SECOND)]
        of_pass = sum(pass_at_k(5, sum(right), n) for _, right, _, _ in groups) / 2
        of_majority = sum(majority_correct(answers, right, n) for answers, right, _, _ in groups) / 2
        of_best = sum(best_of_n_correct(scores, right, n) for _, right, _, scores in groups) / 2
        found = [curves[name][i] for name in ("pass", "majority", "best")]
        assert found == pytest.approx([of_pass, of_majority, of_best])
    assert curves["majority"][-1] == 0.5
    assert curves["best"][-1] == 0.5  # 0.9 is right, three times 0.3 is wrong
    assert (curves["truncated_share"], curves["unscored_share"], curves["unranked_share"]) == (0.1, 0.0, 0.1)


def test_without_a_ranker_there_is_no_curve_of_it():
    curves = best_of_n_curves([rollout(0, "4", True, 2), rollout(0, "5", False, 2, reward=None)], read)
    assert curves["best"] is None
    assert curves["unranked_share"] is None
    assert curves["unscored_share"] == 0.5
    labels = [text.get_text() for text in draw_best_of_n(curves).legends[0].get_texts()]
    assert labels == ["at least one of n is right (pass@n)", "majority of n", "plain sampling (pass@1)"]


def test_the_figure_says_what_its_axes_are_and_draws_every_point():
    curves = best_of_n_curves(ROLLOUTS, read)
    band = {"best": [(value - 0.1, value + 0.1) for value in curves["best"]]}
    figure = draw_best_of_n(curves, "a run", band)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "generated tokens a prompt"
    assert axes.get_ylabel() == "share of right answers"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2.5", "5", "10", "12.5"]
    drawn = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert list(drawn["best of n by the ranker"]) == curves["best"]
    assert list(drawn["majority of n"]) == curves["majority"]
    assert list(drawn["plain sampling (pass@1)"]) == [0.4, 0.4]
    assert len(axes.collections) == 1


def test_prompts_with_unequally_many_responses_are_refused():
    with pytest.raises(ValueError, match=r"equally many responses to each prompt, got \[4, 5\]"):
        best_of_n_curves(ROLLOUTS[1:], read)
    with pytest.raises(ValueError, match="equally many"):
        best_of_n_curves([], read)
