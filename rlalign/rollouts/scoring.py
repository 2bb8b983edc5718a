"""From completions to scored rollouts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlalign.rewards.base import Response
from rlalign.rewards.composition import Composition
from rlalign.rewards.suite import RewardSuite, Tally
from rlalign.rollouts.batch import Rollout
from rlalign.rollouts.prompts import Prompt, PromptDataset
from rlalign.rollouts.sampling.base import Completion
from rlalign.rollouts.template import decode_response


def responses_of(
    prompts: Sequence[Prompt], completions: Sequence[Completion], tokenizer: PreTrainedTokenizerBase
) -> list[Response]:
    """Each completion as rewards take it, ``completions[i]`` being one to ``prompts[i]``."""
    return [
        Response(
            decode_response(tokenizer, c.token_ids),
            num_tokens=len(c.token_ids),
            truncated=c.finish_reason == "length",
            prefill=prompt.prefill,
            token_ids=c.token_ids,
        )
        for c, prompt in zip(completions, prompts, strict=True)
    ]


def score(
    prompts: Sequence[tuple[Prompt, int]],
    completions: Sequence[Completion],
    rewards: RewardSuite,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Rollout]:
    """One rollout to each pair of prompt and sample number; nothing is normalised yet."""
    responses = responses_of([prompt for prompt, _ in prompts], completions, tokenizer)
    scores = rewards([prompt.example for prompt, _ in prompts], responses)
    prompt_ids = _tensors([prompt.ids for prompt, _ in prompts], torch.int32)
    token_ids = _tensors([completion.token_ids for completion in completions], torch.int32)
    logprobs = _tensors([completion.logprobs for completion in completions], torch.float32)
    return [
        Rollout(
            prompt_index=prompt.index,
            sample_index=sample,
            prompt_ids=prompt_ids[i],
            token_ids=token_ids[i],
            logprobs=logprobs[i],
            truncated=response.truncated,
            text=str(response),
            prefill=response.prefill,
            reward=None if (total := scores.total[i]) is None else float(total),
            correct=scores.correct[i],
            components={name: values[i] for name, values in scores.components.items()},
            unavailable=scores.unavailable[i],
            version=completions[i].version,
        )
        for i, ((prompt, sample), response) in enumerate(zip(prompts, responses, strict=True))
    ]


def _tensors(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Sequence[Tensor]:
    """Each row as a tensor, of memory that they share: one of hundreds costs less than hundreds."""
    return torch.tensor(list(chain.from_iterable(rows)), dtype=dtype).split([len(row) for row in rows])


def with_totals(rollouts: Sequence[Rollout], composition: Composition, group_size: int) -> list[Rollout]:
    """The rollouts with the totals that are learned from.

    Args:
        rollouts: All of a round of sampling, of all ranks: what is normalised over the batch needs all of it.
        composition: How the rewards make up a total.
        group_size: Responses a prompt, adjacent ones.
    """
    totals = composition.totals(components_of(rollouts), group_size)
    return [
        replace(rollout, reward=None if total is None else float(total))
        for rollout, total in zip(rollouts, totals, strict=True)
    ]


def components_of(rollouts: Sequence[Rollout]) -> dict[str, list[float | None]]:
    """Each reward by name, of all rollouts."""
    return {name: [r.components[name] for r in rollouts] for name in rollouts[0].components}


def verify(rollouts: list[Rollout], prompts: PromptDataset, verifier: RewardSuite) -> list[Rollout]:
    """The rollouts, with what a second verifier says of them.

    Args:
        rollouts: Responses to prompts of the data set.
        prompts: The data set.
        verifier: A suite of one reward.
    """
    scores = verifier([prompts[r.prompt_index].example for r in rollouts], [r.response for r in rollouts])
    return [
        replace(rollout, verified=None if value is None else right)
        for rollout, value, right in zip(rollouts, scores.components[verifier.correct], scores.correct, strict=True)
    ]


def rank(rollouts: Sequence[Rollout], prompts: PromptDataset, ranker: RewardSuite) -> list[float | None]:
    """What a ranker says of each response, higher is better; ``None`` where it could not score one.

    Args:
        rollouts: Responses to prompts of the data set.
        prompts: The data set.
        ranker: A suite of one reward.
    """
    scores = ranker([prompts[r.prompt_index].example for r in rollouts], [r.response for r in rollouts])
    return scores.components[ranker.correct]


def refuse_unscored(rollouts: Sequence[Rollout], tallies: Sequence[Tally], iteration: int, max_share: float) -> None:
    """Stop where too much could not be scored: what the rest teaches would not be what was asked for.

    Args:
        rollouts: Everything that was sampled, on all ranks.
        tallies: What scoring it was like, one a rank.
        iteration: From 0.
        max_share: Largest share of the responses that may be without a judgement because what judges was unavailable.

    Raises:
        RuntimeError: If that share is larger.
        ValueError: If no response has a number.
    """
    unavailable = _sentences({k: v for tally in tallies for k, v in tally.unavailable.items()}, "was unavailable")
    lost = sum(r.unavailable for r in rollouts)
    if lost > max_share * len(rollouts):
        raise RuntimeError(
            f"{lost} of the {len(rollouts)} responses of iteration {iteration} could not be judged, more than "
            f"data.max_unavailable_share={max_share:g} allows.{unavailable} Nothing was learned from them: see to it, "
            "and go on from the last checkpoint."
        )
    if all(rollout.reward is None for rollout in rollouts):
        raised = _sentences({k: v for tally in tallies for k, v in tally.errors.items()}, "raised")
        raise ValueError(
            f"Rewards ({', '.join(rollouts[0].components)}): none of the {len(rollouts)} responses of iteration "
            f"{iteration} got a number, only None, NaN, infinity or an exception.{raised}{unavailable} Check the "
            "rewards with `rlalign check`."
        )


def _sentences(reasons: dict[str, str], what: str) -> str:
    return "".join(f" '{name}' {what}: {reason.rstrip('.')}." for name, reason in reasons.items())
