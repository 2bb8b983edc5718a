from rlalign.rewards import RewardSuite, TRLReward
from rlalign.rollouts.prompts import Prompt
from rlalign.rollouts.sampling.base import Completion
from rlalign.rollouts.scoring import score


class Tokenizer:
    def decode(self, ids, **_):
        return "".join(chr(ord("a") + i) for i in ids)

    all_special_ids = ()


def test_a_function_of_trl_gets_the_tokens_that_were_sampled():
    seen = []

    def lengths(completions, completion_ids, **_):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    prompts = [(Prompt(0, (5,), {"prompt": "?"}), s) for s in range(2)]
    completions = [Completion([0, 1], [0.0, 0.0], "eos"), Completion([2], [0.0], "length")]
    rollouts = score(prompts, completions, RewardSuite({"n": TRLReward(lengths)}), Tokenizer())
    assert [list(ids) for _, ids in seen] == [[0, 1], [2]]
    assert [r.reward for r in rollouts] == [2.0, 1.0]
    assert [r.response.token_ids for r in rollouts] == [(0, 1), (2,)]
    assert [r.response.truncated for r in rollouts] == [False, True]
