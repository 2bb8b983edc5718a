import math

import pytest
import torch
from transformers import AutoTokenizer

from rlalign.decoding import best_of_n, first_best, votes
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rewards import ExactMatch, LearnedReward
from rlalign.rollouts.sampling.base import SamplingParams

PROMPTS = ["12+30=", "7-4=", "55+21="]
SHORT = SamplingParams(max_new_tokens=12)


def texts(choices):
    return [[candidate.text for candidate in choice.candidates] for choice in choices]


def length(example, response):
    return float(len(response))


def test_the_highest_score_is_chosen_and_all_candidates_are_there():
    seen = []

    def scorer(example, response):
        seen.append(example)
        return length(example, response)

    choices = best_of_n("embedded", PROMPTS, 6, scorer, SHORT)
    assert [len(choice.candidates) for choice in choices] == [6, 6, 6]
    assert seen == [{"prompt": prompt} for prompt in PROMPTS for _ in range(6)]
    for choice in choices:
        assert [c.score for c in choice.candidates] == [len(c.text) for c in choice.candidates]
        assert len({c.text for c in choice.candidates}) > 1  # there is something to choose
        longest = max(len(c.text) for c in choice.candidates)
        assert choice.text == next(c.text for c in choice.candidates if len(c.text) == longest)
        assert all(1 <= c.num_tokens <= 12 for c in choice.candidates)


def test_fewer_responses_are_the_first_of_more_and_a_seed_gives_others():
    eight, four = best_of_n("embedded", PROMPTS, 8, length, SHORT), best_of_n("embedded", PROMPTS, 4, length, SHORT)
    assert [group[:4] for group in texts(eight)] == texts(four)
    assert texts(best_of_n("embedded", PROMPTS, 4, length, SHORT, seed=1)) != texts(four)
    assert best_of_n("embedded", [], 4, length, SHORT) == []


def test_majority_takes_what_most_candidates_answer():
    choices = best_of_n("embedded", PROMPTS, 16, params=SHORT, read_answer=ExactMatch().answer)
    for choice in choices:
        answers = [ExactMatch().answer(candidate.text) for candidate in choice.candidates]
        counts = [0 if answer is None else answers.count(answer) for answer in answers]
        assert [candidate.score for candidate in choice.candidates] == counts
        assert choice.index == counts.index(max(counts))
    by_first_letter = best_of_n(
        "embedded", PROMPTS, 16, params=SHORT, read_answer=lambda response: response[:1] or None
    )
    assert texts(by_first_letter) == texts(choices)
    assert [c.score for c in by_first_letter[0].candidates] != [c.score for c in choices[0].candidates]


def test_votes_and_the_first_of_the_best():
    assert votes(["a", None, "b", "a", None]) == [2, 0, 1, 2, 0]
    assert first_best([1.0, None, 3.0, 3.0]) == 2
    assert first_best([None, math.nan, -5.0]) == 2
    assert first_best([None, None]) == 0
    assert first_best([0.0, math.inf, math.inf]) == 1


def test_a_response_that_cannot_be_scored_is_not_chosen():
    def scorer(example, response):
        if example["prompt"] == PROMPTS[0] or len(response) > 1:
            return None
        return 1.0

    nothing, *others = best_of_n("embedded", PROMPTS, 16, scorer, SHORT)
    assert nothing.index == 0
    assert nothing.candidates[0].score is None
    for choice in others:
        scored = [i for i, candidate in enumerate(choice.candidates) if candidate.score is not None]
        assert choice.index == (scored[0] if scored else 0)
    assert any(choice.candidates[choice.index].score == 1.0 for choice in others)


def test_a_scorer_that_can_score_nothing_is_an_error():
    with pytest.raises(ValueError, match="could score none of the 12 responses"):
        best_of_n("embedded", PROMPTS[:3], 4, lambda example, response: None, SHORT)


def test_an_exported_folder_with_a_chat_template_is_asked_in_its_template(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
    policy = Policy(PolicyConfig(tiny_model))
    plain = best_of_n(policy, ["1+2="], 4, length, SHORT, tokenizer=tokenizer, rendering="plain")
    chat = best_of_n(policy, ["1+2="], 4, length, SHORT, tokenizer=tokenizer)
    as_messages = best_of_n(policy, [[{"role": "user", "content": "1+2="}]], 4, length, SHORT, tokenizer=tokenizer)
    assert texts(chat) == texts(as_messages)
    assert texts(chat) != texts(plain)


def test_an_exported_policy_and_a_learned_reward_work_from_their_folders(tmp_path, tiny_model):
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    policy, tokenizer = Policy(PolicyConfig(tiny_model)), AutoTokenizer.from_pretrained(tiny_model)
    policy.lm.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    ranker = LlamaForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    ranker.save_pretrained(tmp_path / "ranker")
    tokenizer.save_pretrained(tmp_path / "ranker")
    reward = LearnedReward(str(tmp_path / "ranker"))
    from_folder = best_of_n(str(tmp_path / "policy"), PROMPTS, 4, reward, SHORT)
    assert from_folder == best_of_n(policy, PROMPTS, 4, reward, SHORT)
    for prompt, choice in zip(PROMPTS, from_folder, strict=True):
        scores = reward([{"prompt": prompt}] * 4, [candidate.text for candidate in choice.candidates])
        assert [candidate.score for candidate in choice.candidates] == pytest.approx(scores, abs=1e-5)
        assert choice.index == max(range(4), key=scores.__getitem__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"scorer": "best"}, "scorer must be 'majority' or a reward, got 'best'"),
        ({"scorer": length, "read_answer": str}, "read_answer is for scorer='majority'"),
        ({"params": SamplingParams(max_new_tokens=4096)}, "Prompt 0 has .* with max_new_tokens=4096"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        best_of_n("embedded", PROMPTS, **options)
